"""torch.distributed all-to-alls: gloo on CPUs, NCCL on GPUs. Works wherever torch does; the oracle
of the others.

A token goes to a rank once, however many of its experts live there: E=256, K=8 on 2 ranks moves a
quarter of the bytes that one row per (token, expert) would. Per dispatch: one exchange of counts,
one host sync (all-to-all wants its split sizes on the host), one exchange of ids and gates, one of
rows. Rows are packed in one launch, and a token's returned rows added up in one.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import ops
from ep_moe.check import Splits
from ep_moe.dispatch.moves import stage
from ep_moe.dispatch.protocol import Caps, Sent
from ep_moe.parallel import ExpertParallel
from ep_moe.types import Routing

# A multiprocessor for each of NCCL's channels, whose number it does not tell: as the others take.
CHANNELS = 16


@dataclass(frozen=True, eq=False)
class CollectivePlan:
    """local_ids      (A,K) int32 of the arrived rows.
    token_of_sent, sent_of_token, offsets  the order of the rows this rank sends (`ops.SendOrder`).
    splits         rows to each rank and from each, on the way out.
    max_packed     choices of the arrived rows that live here.
    call           the number of this dispatch among those of its layer.
    """

    local_ids: Tensor
    token_of_sent: Tensor
    sent_of_token: Tensor
    offsets: Tensor
    splits: Splits
    max_packed: int
    call: int


class CollectiveTransport:
    name: ClassVar[str] = "collective"
    caps: Caps = Caps(needs_group=True, max_ranks=None, deterministic=True, graphable=False)
    sms: int = CHANNELS

    def __init__(self, ep: ExpertParallel, max_tokens_per_rank: int | None = None) -> None:
        self.ep = ep
        self.layer, self.calls = next(ep.peers.layers), 0

    def __deepcopy__(self, _: dict[int, Any]) -> "CollectiveTransport":
        return CollectiveTransport(self.ep)  # of a layer of its own

    def dispatch(self, x: Tensor, routing: Routing, num_experts: int, *, keep: bool = True) -> Sent:
        self.calls += 1
        each = num_experts // self.ep.size
        order = ops.send_order(routing.ids, num_experts, self.ep.size)
        message = ops.message(routing.ids, routing.gate_weights, order, each)
        splits, max_packed = self._exchange_counts(order.offsets.diff(), order.choices)

        sent = sum(splits.sent)
        now = stage(self.layer, self.calls, "ids and gates out")
        message = exchange(message[:sent], splits, ep=self.ep, stage=now)
        top_k = routing.ids.shape[1]
        plan = CollectivePlan(
            local_ids=message[:, :top_k].contiguous(),
            token_of_sent=order.token_of_sent[:sent],
            sent_of_token=order.sent_of_token,
            offsets=order.offsets,
            splits=splits,
            max_packed=max_packed,
            call=self.calls,
        )
        arrived_gates = message[:, top_k:].clone(memory_format=torch.contiguous_format)
        gates = arrived_gates.view(routing.gate_weights.dtype)
        return Sent(plan, self.replay(plan, x), gates)

    def replay(self, plan: CollectivePlan, x: Tensor, *, keep: bool = True) -> Tensor:
        return self._out(plan, x, "rows out")

    def replay_gates(self, plan: CollectivePlan, gates: Tensor) -> Tensor:
        return self._out(plan, gates, "gates out")

    def combine(self, plan: CollectivePlan, rows: Tensor) -> Tensor:
        return self._back(plan, rows, "rows back")

    def combine_gates(self, plan: CollectivePlan, gates: Tensor) -> Tensor:
        return self._back(plan, gates, "gates back")

    def _out(self, plan: CollectivePlan, values: Tensor, what: str) -> Tensor:
        sent = ops.gather(values, plan.token_of_sent, plan.offsets)
        now = stage(self.layer, plan.call, what)
        return exchange(sent, plan.splits, ep=self.ep, stage=now)

    def _back(self, plan: CollectivePlan, values: Tensor, what: str) -> Tensor:
        back = Splits(sent=plan.splits.expected, expected=plan.splits.sent)
        now = stage(self.layer, plan.call, what)
        returned = exchange(values, back, ep=self.ep, stage=now)
        return ops.weighted_sum(returned, None, plan.sent_of_token)

    def _exchange_counts(self, rows: Tensor, choices: Tensor) -> tuple[Splits, int]:
        """Rows to each rank and choices among them (W,) -> splits, choices that arrive."""
        sent = torch.stack([rows, choices], dim=1)
        arrived = torch.empty_like(sent)
        with self.ep.waiting(stage(self.layer, self.calls, "the counts")):
            dist.all_to_all_single(arrived, sent, group=self.ep.group)
            (sent_rows, _), (rows_here, choices_here) = torch.stack([sent, arrived]).mT.tolist()
        return Splits(sent_rows, rows_here), sum(choices_here)


def exchange(rows: Tensor, splits: Splits, *, ep: ExpertParallel, stage: str) -> Tensor:
    """Rows to the ranks in order, splits.sent[r] of them to rank r; any dtype, moved as bytes.
    `stage` is what errors call this exchange.

    Gloo hangs where splits do not match, and NCCL reads other rows: EP_MOE_CHECK=1 compares them.
    """
    payload = rows.contiguous().view(torch.uint8)
    received = payload.new_empty(sum(splits.expected), payload.shape[1])
    with ep.waiting(stage, splits):
        dist.all_to_all_single(received, payload, splits.expected, splits.sent, group=ep.group)
    return received.view(rows.dtype)
