"""DeepEP, of whatever generation is installed, as one of our transports.

Rows go out once for each rank that needs them, as ours do, and come back as a sum that the experts'
side has weighted. No host sync: `max_tokens_per_rank`, raised to a power of two, bounds what may
arrive, and DeepEP compiles its kernels for that number, the width and the choices. What it cannot
do is hidden here: rows are padded to a width that it combines, ids and gates get its dtypes, gates
alone travel as if they were rows. It moves bf16, for it can add up nothing else.

Rows that are kept for a backward are asked for in order, which takes DeepEP a sort: a recomputation
dispatches again, and would otherwise put rows beside gradients of others. Inference does without,
where nothing has made the other buffer yet.

Layers of a group that are alike in `sms` share one buffer, as large as the largest of them needs.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ep_moe.dispatch import deepep_buffers as buffers
from ep_moe.dispatch.deepep_buffers import MOST_CHOICES, MOVED, WIDTH, Buffer, Pool, Room, cut
from ep_moe.dispatch.moves import agree, capturing, stage
from ep_moe.dispatch.protocol import Caps, Sent
from ep_moe.errors import BackendUnavailable, ConfigError
from ep_moe.parallel import ExpertParallel
from ep_moe.types import Routing

SMS, MOST_SMS = 16, 128  # multiprocessors that a move takes

log = logging.getLogger("ep_moe")


@dataclass(frozen=True, eq=False)
class DeepEPPlan:
    """local_ids   (A,K) int32 of W * bound rows, -1 where none arrived.
    buffer, handle what DeepEP learned, and the buffer whose it is.
    max_packed     choices that may live here.
    call           the number of this dispatch among those of its layer.
    """

    local_ids: Tensor
    buffer: Buffer
    handle: Any
    max_packed: int
    call: int


class DeepEPTransport:
    name: ClassVar[str] = "deepep"
    caps: Caps = Caps(
        needs_group=True,
        max_ranks=None,
        deterministic=True,
        graphable=True,
        unordered=True,
        fixed_size=True,
        dtypes=(MOVED,),
        max_choices=MOST_CHOICES,
    )

    def __init__(self, ep: ExpertParallel, max_tokens_per_rank: int | None = None) -> None:
        assert max_tokens_per_rank is not None  # `make_transport` has seen to it
        self.ep, self.max_tokens = ep, max_tokens_per_rank
        self.bound = 1 << (max_tokens_per_rank - 1).bit_length()
        self.sms = SMS  # may be set before the first call, alike on every rank
        self.layer, self.calls, self.agreed = next(ep.peers.layers), 0, False

    def __deepcopy__(self, _: dict[int, Any]) -> "DeepEPTransport":
        copy = DeepEPTransport(self.ep, self.max_tokens)  # of a layer of its own
        copy.sms = self.sms
        return copy

    def dispatch(self, x: Tensor, routing: Routing, num_experts: int, *, keep: bool = True) -> Sent:
        buffers.check_call(self.name, x, routing, tokens=self.max_tokens, choices=MOST_CHOICES)
        gates = routing.gate_weights
        self.calls += 1
        self._agree()
        rows, top_k = _padded(x), routing.ids.shape[1]
        buffer = self._buffer(Room(self.bound, rows.shape[1], top_k), x.device, ordered=keep)
        # The handle keeps them for every later move, and looks whether they are what they were.
        ids = routing.ids.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
        with self._move(self.calls, "rows out"):
            received = buffer.dispatch(rows, ids, gates.contiguous(), num_experts, self.bound)
        arrived = torch.arange(len(received.rows), device=x.device) < received.count
        local_ids = torch.where(arrived[:, None], received.ids, -1).int()
        plan = DeepEPPlan(local_ids, buffer, received.handle, local_ids.numel(), self.calls)
        return Sent(plan, cut(received.rows, x.shape[1]), received.gates)

    def replay(self, plan: DeepEPPlan, x: Tensor, *, keep: bool = True) -> Tensor:
        with self._move(plan.call, "rows out"):
            return cut(plan.buffer.replay(plan.handle, _padded(x)), x.shape[1])

    def replay_gates(self, plan: DeepEPPlan, gates: Tensor) -> Tensor:
        """As bf16 rows of twice as many columns, whose bits nobody looks at."""
        with self._move(plan.call, "gates out"):
            bits = gates.contiguous().view(MOVED)
            moved = plan.buffer.replay(plan.handle, _padded(bits))
        return cut(moved, bits.shape[1]).view(gates.dtype)

    def combine(self, plan: DeepEPPlan, rows: Tensor) -> Tensor:
        with self._move(plan.call, "rows back"):
            summed, _ = plan.buffer.combine(plan.handle, _padded(rows))
        return cut(summed, rows.shape[1])

    def combine_gates(self, plan: DeepEPPlan, gates: Tensor) -> Tensor:
        """Beside the narrowest rows that there are, of zeros: gates do not travel back alone."""
        rows = gates.new_zeros(len(gates), WIDTH, dtype=MOVED)
        with self._move(plan.call, "gates back"):
            return plan.buffer.combine(plan.handle, rows, gates.contiguous())[1]

    def _move(self, call: int, what: str) -> AbstractContextManager[None]:
        if capturing():
            return nullcontext()
        return self.ep.waiting(stage(self.layer, call, what))

    def _agree(self) -> None:
        """In the first call: have all ranks been told the same?"""
        if self.agreed or capturing():
            return
        if not 1 <= self.sms <= MOST_SMS or self.sms % 2:
            raise ConfigError("sms", self.sms, f"an even number up to {MOST_SMS}")
        told = {"max_tokens_per_rank, as a power of two,": self.bound, "sms": self.sms}
        agree(self.ep.peers, self.layer, told)
        self.agreed = True

    def _buffer(self, room: Room, device: torch.device, *, ordered: bool) -> Buffer:
        """The group's, made or made larger where it must be; every rank comes here alike, for it is
        with all of them that one is made."""
        pool: Pool = self.ep.peers.shared.setdefault(f"{self.name}, {self.sms} sms", Pool())
        buffer = pool.find(room, ordered=ordered)
        if buffer is None:
            if capturing():
                raise BackendUnavailable(
                    "transport = 'deepep' cannot make its buffer while a CUDA graph is captured: "
                    "run it before, forward and backward, or call layer.warmup(tokens)"
                )
            library = buffers.load(self.name, self.ep.size, device)
            buffer = pool.make(library, self.ep, room, device, ordered=ordered, sms=self.sms)
            log.info("transport deepep: a buffer of %.3g GB, for %s", buffer.bytes / 1e9, room)
        return buffer


def _padded(values: Tensor) -> Tensor:
    """(n,H) -> as wide as DeepEP can combine."""
    return buffers.padded(values, values.shape[1] + -values.shape[1] % WIDTH)
