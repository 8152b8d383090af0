"""Every kernel compiles for the GPUs that the package names; on sm_90 without spills, but for a
gradient that is added to a wider one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.stand_in import TARGETS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target):
    compilation = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_all", target],
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert compilation.returncode == 0, compilation.stderr
    built = [json.loads(line) for line in compilation.stdout.splitlines()]
    assert len({(row["kernel"], row["variant"]) for row in built}) == len(built) > 30
    moves = [row for row in built if row["variant"].startswith("move")]
    assert len(moves) >= 10
    # Threads write what they read, 16 bytes at a time, and exchange no more than ids and counts.
    assert [row for row in moves if row["shared"] > 16384] == []
    products = [row for row in built if "bfloat16, 256 rows" in row["variant"]]
    assert len(products) == 6
    if target.startswith("sm_"):  # fp32 is multiplied in fp32, unless TF32 is asked for
        wide = [row for row in built if "float32, " in row["variant"]]
        assert wide
        assert [row for row in wide if row["HMMA"] or row["HGMMA"]] == []
        assert [row for row in moves if row["LDG.E.U16"] or row["STG.E.U16"]] == []
    if target == "sm_80":  # a thread reads 16 bytes at a time, or they cannot be fetched ahead
        assert [row for row in products if row["LDG.E.U16"]] == []
    if target == "sm_90":
        spilling = {row["variant"] for row in built if row["spilled"]}
        assert spilling <= {"into float32"}
        specialized = [row for row in built if "specialized" in row["variant"] and row["HGMMA"]]
        assert len(specialized) == 7
        for row in products + specialized:  # Hopper's own tensor cores and copy engine
            assert min(row["HGMMA"], row["UTMALDG"], row["UTMASTG"]) > 0, row
        for row in specialized:  # what a tile stores first waits for the tile before; and the end
            assert row["DEPBAR.LE SB0, 0x0"] >= 2, row
