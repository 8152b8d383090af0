"""torch.distributed all-to-alls: gloo on CPUs, NCCL on GPUs. Works wherever torch does; the oracle
of the others.

A token goes to a rank once, however many of its experts live there: E=256, K=8 on 2 ranks moves a
quarter of the bytes that one row per (token, expert) would. Per dispatch: one exchange of counts,
one host sync (all-to-all wants its split sizes on the host), one exchange of rows, one of ids and
gates.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import ops
from ep_moe.dispatch.protocol import Caps, Sent
from ep_moe.parallel import ExpertParallel
from ep_moe.types import Routing


@dataclass(frozen=True)
class CollectivePlan:
    """W=2, two experts a rank, ids [[0,1],[3,0]] on this rank:
    sent_of_token = [[0,-1],[1,2]]   token_of_sent = [0,1,1]   sent_splits = [2,1]

    local_ids      (A,K) int32 of the arrived rows.
    token_of_sent  (N,) int64: the rows this rank sends, ordered by (destination, token).
    sent_of_token  (T,W) int32, -1 = that rank does not need this token.
    sent_splits, arrived_splits  rows to and from each rank.
    """

    local_ids: Tensor
    token_of_sent: Tensor
    sent_of_token: Tensor
    sent_splits: list[int]
    arrived_splits: list[int]


class CollectiveTransport:
    name: ClassVar[str] = "collective"
    caps: ClassVar[Caps] = Caps(
        needs_group=True, max_ranks=None, deterministic=True, graphable=False
    )

    def __init__(self, ep: ExpertParallel) -> None:
        self.ep = ep

    def dispatch(self, x: Tensor, routing: Routing, num_experts: int) -> Sent:
        each = num_experts // self.ep.size
        rank_of_slot = routing.ids.div(each, rounding_mode="floor")  # -1 stays -1
        ranks = torch.arange(self.ep.size, device=x.device)
        needed = (rank_of_slot[:, :, None] == ranks).any(dim=1)  # (T,W)

        sent_counts = needed.sum(dim=0)
        arrived_counts = self._exchange_counts(sent_counts)
        sent_splits, arrived_splits = torch.stack([sent_counts, arrived_counts]).tolist()

        before = sent_counts.cumsum(0) - sent_counts
        position = (before + needed.cumsum(dim=0) - 1).masked_fill(~needed, -1)
        # Absent pairs all write into one spare element behind the end.
        num_sent = sum(sent_splits)
        tokens = torch.arange(len(x), device=x.device)[:, None].expand_as(needed)
        slots = torch.where(needed, position, num_sent)
        token_of_sent = position.new_zeros(num_sent + 1).scatter_(
            0, slots.flatten(), tokens.flatten()
        )[:num_sent]

        first_expert = each * ranks.repeat_interleave(sent_counts, output_size=num_sent)
        local_ids = routing.ids[token_of_sent] - first_expert[:, None]
        local_ids = local_ids.masked_fill((local_ids < 0) | (local_ids >= each), -1).int()
        gates = routing.gate_weights[token_of_sent]
        message = torch.cat([local_ids, gates.view(torch.int32)], dim=1)
        message = self._exchange(message, sent_splits, arrived_splits)
        top_k = routing.ids.shape[1]
        plan = CollectivePlan(
            local_ids=message[:, :top_k].contiguous(),
            token_of_sent=token_of_sent,
            sent_of_token=position.int(),
            sent_splits=sent_splits,
            arrived_splits=arrived_splits,
        )
        arrived_gates = message[:, top_k:].clone(memory_format=torch.contiguous_format)
        return Sent(plan, self.replay(plan, x), arrived_gates.view(gates.dtype))

    def replay(self, plan: CollectivePlan, x: Tensor) -> Tensor:
        return self._exchange(x[plan.token_of_sent], plan.sent_splits, plan.arrived_splits)

    def replay_gates(self, plan: CollectivePlan, gates: Tensor) -> Tensor:
        return self.replay(plan, gates)

    def combine(self, plan: CollectivePlan, rows: Tensor) -> Tensor:
        returned = self._exchange(rows, plan.arrived_splits, plan.sent_splits)
        return ops.weighted_sum(returned, None, plan.sent_of_token)

    def combine_gates(self, plan: CollectivePlan, gates: Tensor) -> Tensor:
        return self.combine(plan, gates)

    def _exchange_counts(self, counts: Tensor) -> Tensor:
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.ep.group)
        return received

    def _exchange(self, rows: Tensor, out_splits: list[int], in_splits: list[int]) -> Tensor:
        """Send rows to the ranks in order, out_splits[r] to rank r; any dtype, moved as bytes."""
        payload = rows.contiguous().view(torch.uint8)
        received = payload.new_empty(sum(in_splits), payload.shape[1])
        dist.all_to_all_single(received, payload, in_splits, out_splits, group=self.ep.group)
        return received.view(rows.dtype)
