"""For tests of this package and of yours: comparisons with a name in them, and ranks that cannot
hang."""

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from ep_moe.peers import leave_all

# Relative to the largest magnitude of the expected tensor.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-2,
}


def assert_close(
    got: Tensor, expected: Tensor, *, name: str, tolerance: float | None = None
) -> None:
    """Largest difference over largest expected magnitude, against the tolerance of got's dtype. NaN
    never passes."""
    shapes = f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert got.shape == expected.shape, f"{name}: {shapes}"
    if not got.numel():
        return
    limit = TOLERANCE[got.dtype] if tolerance is None else tolerance
    difference = (got.double() - expected.double()).abs().max().item()
    scale = max(expected.double().abs().max().item(), 1e-30)
    error = difference / scale
    assert error <= limit, f"{name}: off by {error:.2e}, allowed {limit:.0e}"


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout: float = 60.0,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run function(rank, *args) on `world_size` processes joined in a process group; returns what
    each returned.

    `function` must be importable (defined at the top of a module). Any rank that raises, dies or is
    not done after `timeout` seconds fails the call with its traceback, and every process is gone
    when the call returns. With NCCL and fewer GPUs than ranks, ranks share GPUs (for correctness
    only: traffic goes through sockets).
    """
    context = mp.get_context("forkserver")
    # torch._dynamo: the first call of a layer needs it, which would be paid by every rank
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "ep_moe"])
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(
                target=_rank_main,
                args=(
                    function,
                    rank,
                    world_size,
                    args,
                    backend,
                    timeout,
                    folder,
                    dict(environ or {}),
                ),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        try:
            while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
                if any(p.exitcode not in (None, 0) for p in processes):
                    # peers get a moment to report errors of their own
                    deadline = min(deadline, time.monotonic() + 2.0)
                time.sleep(0.01)
            hanging = [rank for rank, p in enumerate(processes) if p.is_alive()]
        finally:
            for process in processes:
                process.kill()
                process.join()
        return _collect(Path(folder), processes, hanging, timeout)


def _collect(folder: Path, processes: list[Any], hanging: list[int], timeout: float) -> list[Any]:
    failures = [path.read_text() for path in sorted(folder.glob("error.*"))]
    if failures:
        raise AssertionError("\n".join(failures))
    if hanging:
        raise AssertionError(f"ranks {hanging} still ran after {timeout:g} s and were killed")
    for rank, process in enumerate(processes):
        if process.exitcode != 0:
            raise AssertionError(f"rank {rank} ended with exit code {process.exitcode}")
    return [
        torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(len(processes))
    ]


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    backend: str,
    timeout: float,
    folder: str,
    environ: Mapping[str, str],
) -> None:
    try:
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **environ}
        # NCCL refuses two ranks on one GPU of one host, unless it is of 2.30 or newer and told to
        # allow it; with different host ids it goes through sockets instead.
        shared = backend == "nccl" and world_size > torch.cuda.device_count()
        if shared and "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ:
            os.environ["NCCL_IB_DISABLE"] = "1"
            os.environ["NCCL_HOSTID"] = f"rank{rank}"
        torch.set_num_threads(1)
        if backend == "nccl":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        dist.init_process_group(
            backend,
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        result = function(rank, *args)
        torch.save(result, Path(folder, f"result.{rank}"))
        dist.barrier()
        leave_all()
        dist.destroy_process_group()
    except BaseException as error:
        Path(folder, f"error.{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        leave_all(error)
        os._exit(1)
