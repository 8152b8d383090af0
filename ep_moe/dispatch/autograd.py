"""Gradients of dispatch and combine, once for all transports: each is the other's adjoint.

Every rank runs the same nodes and saves the same number of tensors, with or without tokens of its
own: a non-reentrant checkpoint stops recomputing at the last saved tensor, and ranks that stop at
different places pair up different collectives.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_moe import check
from ep_moe.dispatch.protocol import Plan, Sent, Transport
from ep_moe.errors import RecomputationMismatch
from ep_moe.measure import in_stage
from ep_moe.ops import SecondStream
from ep_moe.replay import once
from ep_moe.types import Arrived, Routing

T = TypeVar("T")


def dispatch(
    x: Tensor,
    routing: Routing,
    num_experts: int,
    transport: Transport,
    *,
    keep: bool | None = None,
) -> Arrived:
    """Send each row of x (T,H) to every rank that has one of its experts. keep: arrived rows may be
    read after the next dispatch or combine of the group (`Transport.dispatch`); None = where
    autograd is on, whose backward does."""
    return _dispatch(x, routing, num_experts, transport, None, keep)


def dispatch_beside(
    x: Tensor, routing: Routing, num_experts: int, transport: Transport, work: Callable[[], T]
) -> tuple[Arrived, T]:
    """`dispatch`, and what `work` returns. On a GPU the rows travel on a second stream while `work`
    runs, and in the backward their gradients travel back while that of `work` runs. `work` is
    launched first: a dispatch that makes the host wait does not keep it from the device. If `work`
    raises, nothing is sent."""
    trip = _Trip(x.device)
    try:
        outside = _Depart.apply(x, routing.gate_weights, trip)
        done = work()
        routing = Routing(routing.ids, outside[1])
        return _dispatch(outside[0], routing, num_experts, transport, trip), done
    finally:  # the early stop of a checkpoint's recomputation, too, leaves by an exception
        trip.out.join()


class _Trip:
    """Of rows out and of their gradients back, each on a second stream.

    out   of the forward.
    back  of the backward, from the gradient of `_Dispatch` to that of `_Depart`.
    read  what is read on the way back: freed sooner, it could be written by other work here.
    """

    def __init__(self, device: torch.device) -> None:
        self.out = SecondStream(device)
        self.back: SecondStream | None = None
        self.read: tuple[Tensor, ...] = ()

    def send_back(self, *read: Tensor) -> AbstractContextManager[object]:
        self.end()  # of a backward that did not come to `_Depart`
        self.back, self.read = SecondStream(read[0].device), read
        return self.back.launch()

    def end(self) -> None:
        if self.back is not None:
            self.back.join()
        self.back, self.read = None, ()


class _Depart(torch.autograd.Function):
    """Hands x and gates on to `_Dispatch`, and their gradients on when they are there. It comes
    before the nodes of the work beside the trip: autograd runs those first, while gradients travel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        return x.detach(), gates.detach()  # second handles, as `ep_moe.dispatch.local` has

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor, d_gates: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.end()
        return d_x, d_gates, None


def _dispatch(
    x: Tensor,
    routing: Routing,
    num_experts: int,
    transport: Transport,
    trip: _Trip | None,
    keep: bool | None = None,
) -> Arrived:
    if check.wanted():
        routing.validate(len(x), num_experts)
    with in_stage("dispatch"):
        rows, gates, plan = _Dispatch.apply(
            x,
            routing.gate_weights,
            routing.ids,
            num_experts,
            transport,
            torch.is_grad_enabled() if keep is None else keep,
            trip,
        )
    return Arrived(rows, gates, plan.local_ids, plan, plan.max_packed)


def combine(rows: Tensor, plan: Plan, transport: Transport) -> Tensor:
    """Bring the experts' rows (A,H) back to their tokens and add them up: (T,H)."""
    with in_stage("combine"):
        return _Combine.apply(rows, plan, transport)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_weights: Tensor,
        ids: Tensor,
        num_experts: int,
        transport: Transport,
        keep: bool,
        trip: _Trip | None,
    ) -> tuple[Tensor, Tensor, Plan]:
        sent: Sent | None = None

        def learn() -> Plan:
            nonlocal sent
            sent = transport.dispatch(x, Routing(ids, gate_weights), num_experts, keep=keep)
            return sent.plan

        with nullcontext() if trip is None else trip.out.launch():
            plan = once(learn)
            if sent is None:  # a recomputation that was given the plan: no counts, no ids
                gates = transport.replay_gates(plan, gate_weights)
                sent = Sent(plan, transport.replay(plan, x, keep=keep), gates)
        ctx.plan, ctx.transport, ctx.trip = plan, transport, trip
        # On one rank the experts work on x and the gates themselves, on more they work on copies.
        # Kept here at any number of ranks, so that changing them in place between forward and
        # backward is torch's own error everywhere.
        ctx.save_for_backward(x, gate_weights, ids)
        ctx.ids = ids
        ctx.version = 0 if ids.is_inference() else ids._version
        return sent.rows, sent.gate_weights, sent.plan

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_rows: Tensor, d_gates: Tensor, _: None) -> tuple[Tensor | None, ...]:
        _, _, ids = ctx.saved_tensors
        _check_recomputed(ids, ctx.ids, ctx.version)
        # Both moves, whatever needs a gradient here: an idle rank's x may need none where the
        # others' does, and all must meet.
        trip = ctx.trip
        with (
            in_stage("dispatch_backward"),
            nullcontext() if trip is None else trip.send_back(d_rows, d_gates),
        ):
            d_x = ctx.transport.combine(ctx.plan, d_rows)
            d_gate = ctx.transport.combine_gates(ctx.plan, d_gates)
        if trip is not None and torch.is_anomaly_enabled():
            trip.end()  # it looks for NaN between nodes
        needs_x, needs_gates, *_rest = ctx.needs_input_grad
        return d_x if needs_x else None, d_gate if needs_gates else None, *[None] * 5


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: Plan, transport: Transport) -> Tensor:
        ctx.plan, ctx.transport = plan, transport
        return transport.combine(plan, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        with in_stage("combine_backward"):
            return ctx.transport.replay(ctx.plan, d_y), None, None


def _check_recomputed(recomputed: Tensor, original: Tensor, version: int) -> None:
    """Under activation checkpointing the saved ids were chosen again; they must be the same ones,
    and those that came from outside still what they were.

    Compared at the origin: where each rank has one expert, two tokens that swap theirs change
    nothing that the receivers see but the rows themselves.
    """
    elsewhere = recomputed.data_ptr() != original.data_ptr()
    if original._version != version or (elsewhere and not torch.equal(recomputed, original)):
        raise RecomputationMismatch(
            "activation checkpointing recomputed a different routing than the forward pass had, so "
            "the gradients would belong to other experts: pass context_fn=ep_moe.replay() to the "
            "checkpoint, or make the block deterministic (no noise, no changed parameters or ids)"
        )
