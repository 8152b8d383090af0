"""A program for test_dead_ranks: ranks that train a tiny model for ever, in a plain loop.

`training_loop.py WORLD_SIZE FOLDER` forks one process a rank (importing torch once) and only waits
for them: nobody ends a rank because another ended. It prints their process ids and, when all have
ended, their exit codes. FOLDER gets `stderr.R` and, once rank R has joined the others, `ready.R`.
With VICTIM, AT and DO in the environment, that rank does DO (kill, stop or raise) to itself
when it comes to a stage that holds AT. With DEAF, exchanges hang where those of gloo would fail.
"""

import os
import signal
import sys
import time
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which optimizers and DDP import: once, before the forks
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ep_moe
from ep_moe import parallel

CONFIG = ep_moe.MoEConfig(
    hidden_size=8,
    intermediate_size=8,
    num_experts=6,
    top_k=2,
    aux_loss_coef=0.01,
    aux_loss_scope="global",
)


class Model(nn.Module):
    def __init__(self, ep: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ep_moe.MoELayer(CONFIG, ep=ep) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        losses = []
        for layer in self.layers:
            y, stats = layer(x)
            x = x + y
            losses.append(stats)
        return x.square().mean() + ep_moe.total_aux(losses)


def do_to_itself(what: str) -> None:
    if what == "raise":
        raise ZeroDivisionError("planted")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])


def arm(at: str, what: str) -> None:
    """The package's own waits say when."""
    waiting = parallel._waiting

    def armed(group: Any, stage: str, splits: Any = None) -> AbstractContextManager[None]:
        if at in stage:
            do_to_itself(what)
        return waiting(group, stage, splits)

    parallel._waiting = armed


def hang_on_failure() -> None:
    """As NCCL's exchanges do."""
    exchange = dist.all_to_all_single

    def deaf(*args: Any, **options: Any) -> None:
        try:
            exchange(*args, **options)
        except RuntimeError:
            time.sleep(600)

    dist.all_to_all_single = deaf


def train(folder: Path) -> None:
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count()
    if gpus:  # ranks may share one: NCCL then needs to take them for hosts of their own
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % gpus)
    if "DEAF" in os.environ:
        hang_on_failure()
    process = ep_moe.init_process(timeout=timedelta(seconds=float(os.environ["TIMEOUT"])))
    (folder / f"ready.{process.rank}").touch()
    torch.manual_seed(0)
    if os.environ.get("VICTIM") == str(process.rank):
        arm(os.environ["AT"], os.environ["DO"])
    model = Model(process.group).to(process.device)
    wrapped = DistributedDataParallel(ep_moe.ddp_ignore(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
        wrapped(torch.randn(5, 8, device=process.device)).backward()
        ep_moe.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main(world_size: int, folder: Path) -> None:
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
            os.dup2(os.open(folder / f"stderr.{rank}", os.O_CREAT | os.O_WRONLY), 2)
            return train(folder)
        pids.append(pid)
    print(pids, flush=True)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    print(codes)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
