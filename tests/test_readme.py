"""The lines in the README that embed the layer are run, alone and on two ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINES = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_embedding_lines(ranks, tmp_path):
    program = tmp_path / "yours.py"
    program.write_text(LINES + "print('trained', float(y.square().mean()) > 0)\n")
    torchrun = [*["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"], str(ranks)]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(program)]
    environ = {"PATH": "", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT}
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environ
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("trained True") == ranks


def test_it_is_short():
    assert len([line for line in LINES.splitlines() if line and "import" not in line]) <= 12
