"""Where the time goes: the `ep_moe.*` ranges of a torch.profiler trace.

A kernel belongs to the ranges that its launch lies in, on the launching thread. That also finds the
kernels launched without a torch operator (Triton's), which the profiler's own sums can lose.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from ep_moe.parallel import Process

_PREFIX = "ep_moe."
_MEASURED = "ep_moe_measured"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")

Event = Mapping[str, Any]  # of a chrome trace: name, cat, ph, pid, tid, ts and dur in µs, args


def in_stage(name: str) -> AbstractContextManager[object]:
    """The range of a stage, for torch.profiler, emit_nvtx and emit_itt. Without them there is none,
    for it takes the host as long as an operator does."""
    wanted = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
    if torch.compiler.is_compiling() or not wanted:
        return nullcontext()
    return record_function(_PREFIX + name)


@contextmanager
def profile_stages(process: Process) -> Iterator[dict[str, float]]:
    """Profile what runs inside. The dict is filled at the end, by `stage_times`: ms of each stage,
    the mean over ranks; all of them must profile the same.

    On a GPU a stage is the sum of its kernels' times: waiting for the host is in none. On a CPU it
    is wall time, the wait for other ranks included, and the profiler slows small operators down.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes to stderr
    on_gpu = process.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    times: dict[str, float] = {}
    with profile(activities=activities) as profiler:
        if process.group is not None:
            dist.barrier(process.group)  # starting to profile takes each rank another time
        with record_function(_MEASURED):
            yield times
        if on_gpu:
            torch.cuda.synchronize()
    mine = stage_times(_events(profiler), on_gpu=on_gpu)
    of_ranks = [mine] * process.world_size
    if process.group is not None:
        dist.all_gather_object(of_ranks, mine, group=process.group)
    for name in mine:
        times[name] = sum(rank.get(name, 0.0) for rank in of_ranks) / process.world_size


def kernels_of(call: Callable[[], object]) -> list[str]:
    """Names of all that a call runs on a GPU: kernels, copies and fills."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler writes to stderr
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return [e["name"] for e in _events(profiler) if e.get("cat") in _ON_GPU]


def stage_times(events: Iterable[Event], *, on_gpu: bool) -> dict[str, float]:
    """ms of each stage within what was measured, in order of appearance, then `other` (in no stage)
    and `total`.

    A range inside another goes by its path and is part of the outer one: experts = 5 of which
    experts/permute = 2.
    """
    complete = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"]))
    annotations = [e for e in complete if e.get("cat") == "user_annotation"]
    (measured,) = (e for e in annotations if e["name"] == _MEASURED)
    begin = measured["ts"]
    ranges = [e for e in annotations if e["name"].startswith(_PREFIX) and e["ts"] >= begin]
    paths = [_enclosing(e, ranges) for e in ranges]
    times = {_name(path): 0.0 for path in paths}
    if on_gpu:
        total = in_stages = 0.0
        for launch, ms in _kernels(complete):
            if launch["ts"] < begin:
                continue
            path = _enclosing(launch, ranges)
            for depth in range(1, len(path) + 1):
                times[_name(path[:depth])] += ms
            total += ms
            in_stages += ms if path else 0.0
    else:
        total = measured["dur"] / 1e3
        in_stages = sum(path[-1]["dur"] / 1e3 for path in paths if len(path) == 1)
        for path in paths:
            times[_name(path)] += path[-1]["dur"] / 1e3
    return {**times, "other": total - in_stages, "total": total}


def _events(profiler: profile) -> list[Event]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def _enclosing(event: Event, ranges: Sequence[Event]) -> list[Event]:
    """The ranges around the event on its thread, outermost first; itself too, if it is one."""

    def holds(r: Event) -> bool:
        end, inner_end = r["ts"] + r["dur"], event["ts"] + event["dur"]
        return (r["pid"], r["tid"]) == thread and r["ts"] <= event["ts"] and inner_end <= end

    thread = (event["pid"], event["tid"])
    return [r for r in ranges if holds(r)]


def _name(path: Sequence[Event]) -> str:
    return "/".join(e["name"].removeprefix(_PREFIX) for e in path)


def _kernels(complete: Sequence[Event]) -> Iterator[tuple[Event, float]]:
    """(launch, ms on the device) of everything that ran there: kernels, copies, fills."""
    launches = {
        e["args"]["correlation"]: e
        for e in complete
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    for e in complete:
        if e.get("cat") in _ON_GPU:
            yield launches.get(e["args"]["correlation"], e), e["dur"] / 1e3
