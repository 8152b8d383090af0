import json

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_dispatch
from benchmarks.bench_dispatch import ALL_ROWS, Bench, DispatchBench
from benchmarks.records import Recorder
from ep_moe.parallel import Process
from ep_moe.testing import run_ranks
from tests.dispatch.fake_deepep import stand_in
from tests.dispatch.windows import needs_interpreter, share_files

SMALL = {
    "hidden_size": 8,
    "num_experts": 6,
    "top_k": 2,
    "tokens": (5, 8),
    "dtype": "float32",
    "windows_ms": (0.1,),
    "rest_ms": 0.0,
    "rounds": 1,
}
ARGS = [
    f"--{name}={list(value) if isinstance(value, tuple) else value}"
    for name, value in SMALL.items()
]


def records(folder):
    lines = (folder / "dispatch.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_packing_is_timed_beside_a_copy(tmp_path, capsys):
    bench_dispatch.main([*ARGS, "--simulated_ranks=3", f"--results={tmp_path}"])
    assert "## dispatch" in capsys.readouterr().out
    found = {(r["case"]["scope"], r["case"]["tokens"], r["impl"]) for r in records(tmp_path)}
    assert found == {
        (scope, tokens, impl)
        for scope in ("pack", "unpack")
        for tokens in (5, 8)
        for impl in ("ep_moe", "ceiling: copy")
    }


def on_ranks(rank, folder, window_files, changes, broken=False):
    share_files(window_files)
    stand_in("v2.5")
    process = Process(rank, rank, dist.get_world_size(), torch.device("cpu"), dist.group.WORLD)
    config = DispatchBench(**SMALL | changes)
    if broken:
        right = bench_dispatch._exchange
        bench_dispatch._exchange = lambda rows, *args: right(rows * 1.1, *args)
    Bench(config, process, Recorder.start(folder, process), None).run()


@needs_interpreter
@pytest.mark.parametrize("dtype, kept", [("float32", {"symm"}), ("bfloat16", {"symm", "deepep"})])
def test_every_transport_is_timed_beside_a_row_for_every_choice(dtype, kept, tmp_path):
    """But for one that does not move the dtype."""
    changes = {"skew": 1.5, "sms": 4, "dtype": dtype}
    run_ranks(on_ranks, 2, str(tmp_path), str(tmp_path), changes)
    found = {(r["case"]["scope"], r["case"]["tokens"], r["impl"]) for r in records(tmp_path)}
    assert found == {
        (scope, tokens, impl)
        for scope, impls in {
            "dispatch": {"collective", ALL_ROWS} | kept,
            "dispatch, kept": kept,
            "combine": {"collective", ALL_ROWS} | kept,
        }.items()
        for tokens in (5, 8)
        for impl in impls
    }
    assert {r["unit"] for r in records(tmp_path)} == {"ms", "calls", "GB/s", "SMs"}
    assert {r["value"] for r in records(tmp_path) if r["unit"] == "SMs"} == {4}


def test_rows_that_come_back_wrong_are_not_timed(tmp_path):
    changes = {"transports": ("collective",)}
    run_ranks(on_ranks, 2, str(tmp_path), str(tmp_path), changes, True)
    assert {r["impl"] for r in records(tmp_path)} == {"collective"}


def test_one_process_needs_to_be_told_what_to_time(tmp_path):
    with pytest.raises(SystemExit, match=r"simulated_ranks = 0.*torchrun"):
        bench_dispatch.main([*ARGS, f"--results={tmp_path}"])
    with pytest.raises(SystemExit):
        bench_dispatch.main([*ARGS, "--transports=[carrier pigeon]"])
