"""Where tokens go in a bench, if not where their own logits say: forced loads, and how a layer is
made to follow one.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

import ep_moe
from ep_moe.parallel import Process
from ep_moe.routing import count_tokens
from ep_moe.routing.forced import ForcedRouting


class Load(Protocol):
    """A `benchmarks.trace.Replay`, or one of those here."""

    def share(self, tokens: int, process: Process) -> ep_moe.Routing:
        """The routing of this rank's tokens, on its device."""
        ...

    def case(self, tokens: int, ranks: int) -> dict[str, Any]:
        """What a record says of it."""
        ...


@dataclass(frozen=True)
class Skewed:
    """The busiest expert has `skew` times the mean load, and loads fall as a power of the expert's
    number, so that rank 0 is the busiest: `ep_moe.routing.forced`, alike on every rank. All gate
    weights are equal."""

    moe: ep_moe.MoEConfig
    skew: float

    @cached_property
    def _forced(self) -> ForcedRouting:
        return ForcedRouting(replace(self.moe, forced_routing="skewed", forced_skew=self.skew))

    def share(self, tokens: int, process: Process) -> ep_moe.Routing:
        ids = self._forced.ids(tokens, torch.device("cpu")).to(process.device, torch.int32)
        return ep_moe.Routing(ids, torch.full(ids.shape, 1 / ids.shape[1], device=ids.device))

    def case(self, tokens: int, ranks: int) -> dict[str, Any]:
        ids = self._forced.ids(tokens, torch.device("cpu"))
        counts = count_tokens(ids, self.moe.num_experts)
        busiest = round(float(ep_moe.busiest_rank(counts, ranks)), 3)
        return {"skew": self.skew, "busiest_rank": busiest}


class Given(ForcedRouting):
    """These ids, whatever the logits say, and no look at them: `ep_moe.replay_routing` waits for
    the device in each call, to refuse ids that are no experts."""

    def __init__(self, config: ep_moe.MoEConfig, ids: Tensor) -> None:
        super().__init__(config)
        self._ids = ids.long()

    def ids(self, num_tokens: int, device: torch.device) -> Tensor:
        assert num_tokens == len(self._ids), "a load is of one number of tokens"
        return self._ids
