"""From the results of some steps to a line of metrics."""

import math
import time
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import ep_moe

# Of a line of metrics, what tells how evenly the tokens spread.
LOAD_FIGURES = ("max_vio", "busiest_rank", "load_change", "dropped_share", "dead_experts")


class StepResult(NamedTuple):
    """One step of this rank, on its device.

    tokens_per_expert  (layers, experts) int64, before any dropping
    dropped_share      (layers,) fp32
    """

    loss: Tensor
    grad_norm: Tensor
    tokens_per_expert: Tensor
    dropped_share: Tensor


class Progress:
    """Collects steps until the next line of metrics. Every rank has one and calls it alike."""

    def __init__(self, process: ep_moe.Process, tokens_per_step: int) -> None:
        self.process, self.tokens_per_step = process, tokens_per_step
        self.speeds: list[float] = []
        self._results: list[StepResult] = []
        self._last_batch: list[Tensor] = []  # its load, for the change to the next one
        self._mark = time.perf_counter()

    def add(self, result: StepResult) -> None:
        """One more step."""
        self._results.append(result)

    def line(self) -> dict[str, Any]:
        """Figures of the steps added since `start_line`, over all ranks.

        max_vio, dead_experts and tokens_per_expert are of the sum over these steps; busiest_rank
        (of `load_ranks` ranks) and load_change are means over single batches, whose slowest rank
        every other waits for. Layers are averaged, but dead experts are added.
        """
        columns = [torch.stack(values) for values in zip(*self._results, strict=True)]
        loss, grad_norm, counts, dropped = columns  # counts: (steps, layers, experts)
        means = torch.stack([loss.mean(), dropped.mean()]) / self.process.world_size
        if self.process.group is not None:
            dist.all_reduce(means, group=self.process.group)
            dist.all_reduce(counts, group=self.process.group)
        batches = list(counts.cpu())
        total = torch.stack(batches).sum(0)
        ranks = load_ranks(total.shape[1], self.process)
        busiest = [ep_moe.busiest_rank(n, ranks) for batch in batches for n in batch]
        changes = [
            ep_moe.load_change(before, after)
            for pair in pairwise(self._last_batch + batches)
            for before, after in zip(*pair, strict=True)
        ]
        self._last_batch = batches[-1:]
        tokens = self.tokens_per_step * len(batches)
        self.speeds.append(tokens / (time.perf_counter() - self._mark))
        return {
            "loss": means[0].item(),
            "grad_norm": grad_norm.mean().item(),
            "max_vio": torch.stack([ep_moe.max_vio(n) for n in total]).mean().item(),
            "busiest_rank": torch.stack(busiest).mean().item(),
            # a first line of one step has no change
            "load_change": torch.stack(changes).mean().item() if changes else None,
            "dropped_share": means[1].item(),
            "dead_experts": sum(int(ep_moe.dead_experts(n)) for n in total),
            "tokens_per_expert": total.tolist(),
            "tokens_per_second": self.speeds[-1],
        }

    def start_line(self) -> None:
        """Forget the steps of the last line and start the clock again."""
        self._results, self._mark = [], time.perf_counter()


def load_ranks(num_experts: int, process: ep_moe.Process) -> int:
    """Ranks over which loads are compared: those of the run, or of a run alone 8 imagined ones, or
    as many of them as the experts divide among."""
    return process.world_size if process.world_size > 1 else math.gcd(8, num_experts)
