"""One rank: arrived rows ARE x. No copy, no second implementation of the layer.

`detach` makes a second handle on the same memory. Autograd takes an output that is the very input
for a view of it, and would refuse `y += x` on one rank that it allows on two.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ep_moe.dispatch.protocol import Caps, Sent
from ep_moe.parallel import ExpertParallel
from ep_moe.types import Routing


@dataclass(frozen=True, eq=False)
class LocalPlan:
    local_ids: Tensor  # (T,K) int32

    @property
    def max_packed(self) -> int:
        return self.local_ids.numel()


class LocalTransport:
    name: ClassVar[str] = "local"
    caps: Caps = Caps(needs_group=False, max_ranks=1, deterministic=True, graphable=True)
    sms: int = 0

    def __init__(self, ep: ExpertParallel, max_tokens_per_rank: int | None = None) -> None:
        pass

    def dispatch(self, x: Tensor, routing: Routing, num_experts: int, *, keep: bool = True) -> Sent:
        ids = routing.ids.to(torch.int32, copy=True)  # a plan outlives the call, its ids may not
        return Sent(LocalPlan(ids), x.detach(), routing.gate_weights.detach())

    def replay(self, plan: LocalPlan, x: Tensor, *, keep: bool = True) -> Tensor:
        return x.detach()

    def replay_gates(self, plan: LocalPlan, gates: Tensor) -> Tensor:
        return gates.detach()

    def combine(self, plan: LocalPlan, rows: Tensor) -> Tensor:
        return rows.detach()

    def combine_gates(self, plan: LocalPlan, gates: Tensor) -> Tensor:
        return gates.detach()
