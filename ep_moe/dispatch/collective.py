"""torch.distributed all-to-alls: gloo on CPUs, NCCL on GPUs. Works wherever torch does; the oracle
of the others.

A token goes to a rank once, however many of its experts live there: E=256, K=8 on 2 ranks moves a
quarter of the bytes that one row per (token, expert) would. Per dispatch: one exchange of ids and
gates in blocks of equal size, one host sync (all-to-all wants the sizes of the rows on the host,
and the blocks say them), and one exchange of rows. Rows are packed, in one launch, while the first
exchange runs and before the host knows how many there are; a token's returned rows are added up in
one.

The blocks have room for as many rows as the largest of any rank had lately (among few ranks: for
the tokens of the busiest one). Each says what its sender needed, so that all ranks see alike when
that was too little, and send larger ones.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

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
PATIENCE = 8  # short calls in a row before the blocks shrink


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
        self.room = 0  # lines of a block; the same on every rank
        self._spare = 0  # calls in a row that needed less than a quarter of it
        self._heads: dict[torch.device, _Heads] = {}

    def __deepcopy__(self, _: dict[int, Any]) -> "CollectiveTransport":
        return CollectiveTransport(self.ep)  # of a layer of its own

    def dispatch(self, x: Tensor, routing: Routing, num_experts: int, *, keep: bool = True) -> Sent:
        self.calls += 1
        ids, gates = routing.ids, routing.gate_weights
        form = {"top_k": ids.shape[1], "gates": gates.dtype}
        now, packed = stage(self.layer, self.calls, "ids and gates out"), None
        while True:
            both = ops.empty_blocks(2, self.ep.size, lines=self.room, device=ids.device, **form)
            sent, arrived = both.unbind()
            order = ops.send_order(ids, gates, num_experts, sent)
            with self.ep.waiting(now):
                # Where it runs on a stream of its own, packing runs beside it.
                work = dist.all_to_all_single(
                    arrived, sent, group=self.ep.group, async_op=ids.is_cuda
                )
                if packed is None:
                    packed = ops.gather(x, order.token_of_sent, order.offsets)
                if work is not None:
                    work.wait()
                sent_heads, arrived_heads = self._read(both)
            if self._had_room(max(needed for _, _, needed in arrived_heads)):
                break

        splits = Splits([rows for rows, *_ in sent_heads], [rows for rows, *_ in arrived_heads])
        # First, so that the link does not wait for the host.
        rows = self._move(packed[: sum(splits.sent)], splits, self.calls, "rows out")
        local_ids, arrived_gates = ops.open_blocks(arrived, splits.expected, **form)
        plan = CollectivePlan(
            local_ids=local_ids,
            token_of_sent=order.token_of_sent[: sum(splits.sent)],
            sent_of_token=order.sent_of_token,
            offsets=order.offsets,
            splits=splits,
            max_packed=sum(choices for _, choices, _ in arrived_heads),
            call=self.calls,
        )
        return Sent(plan, rows, arrived_gates)

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
        return self._move(sent, plan.splits, plan.call, what)

    def _back(self, plan: CollectivePlan, values: Tensor, what: str) -> Tensor:
        back = Splits(sent=plan.splits.expected, expected=plan.splits.sent)
        returned = self._move(values, back, plan.call, what)
        return ops.weighted_sum(returned, None, plan.sent_of_token)

    def _move(self, rows: Tensor, splits: Splits, call: int, what: str) -> Tensor:
        return exchange(rows, splits, ep=self.ep, stage=stage(self.layer, call, what))

    def _read(self, blocks: Tensor) -> list[list[list[int]]]:
        """The first lines of blocks (2, W, lines, width), on the host."""
        heads = blocks[:, :, 0, : ops.HEAD]
        if not heads.is_cuda:
            return heads.tolist()
        if heads.device not in self._heads:
            self._heads[heads.device] = _Heads.make(heads)
        return self._heads[heads.device].read(heads)

    def _had_room(self, most: int) -> bool:
        """Was there room for so many rows? The next blocks have it, and not much more: but a few
        short calls among long ones leave it as it is, for to grow costs an exchange."""
        enough = most <= self.room
        self._spare = self._spare + 1 if 4 * most < self.room else 0
        if not enough or self._spare == PATIENCE:
            self.room, self._spare = 1 << max(most - 1, 0).bit_length(), 0
        return enough


class _Heads(NamedTuple):
    """Where a GPU leaves a few numbers for the host, and says that they are there. Kept, for both
    take long to make."""

    numbers: Tensor  # in pinned memory
    there: torch.cuda.Event

    @classmethod
    @torch.inference_mode(False)  # it outlives the call, and training may follow
    def make(cls, like: Tensor) -> "_Heads":
        return cls(torch.empty(like.shape, dtype=like.dtype, pin_memory=True), torch.cuda.Event())

    def read(self, heads: Tensor) -> list[list[list[int]]]:
        """Waits for nothing that is launched after this."""
        self.numbers.copy_(heads, non_blocking=True)
        self.there.record(torch.cuda.current_stream(heads.device))
        self.there.synchronize()
        return self.numbers.tolist()


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
