"""A call's tokens in parts that follow each other: while the experts work on one, the next is on
its way to them and the last on its way back.

Moves go to a stream of their own, in this order on every rank: part 0 out; then, of each part, the
next part out and this one back. There are always as many parts as were asked for, empty ones
included, so that every rank makes the same moves whatever its number of tokens. A move is launched
after the experts that it runs beside: a transport that makes the host wait does not keep their work
from the device.

The backward is the same pipeline, and made by autograd alone: it runs a node's backward on the
stream of its forward, makes that stream wait for another where a gradient crosses, and not sooner
than for the node that takes it, and of the nodes that are ready it takes the one that was made
last. Of three parts the moves are then the gradients of 2 back, 1 back, 2 out, 0 back, 1 out and
0 out, on every rank alike. Before the last of them is launched, and beside it where the host is
ahead, the experts make the gradients of their weights, of all parts' rows (`Experts.in_parts`).

Memory that crosses streams goes back to the one that it came from, which may write it again at
once. Three rules keep it until it has been read, all but one without `record_stream`: that would
hold memory until the device has come so far, with the host several layers ahead.
  - what the main stream gave is held here until it has waited for the moves that read it;
  - what moves brought is held here until they have waited for the experts that read it;
  - but with autograd on arrived rows are held by the experts' nodes, which free them in their
    backward, where the moves wait for nothing: those are recorded. Autograd records gradients.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_moe.dispatch.autograd import combine, dispatch
from ep_moe.dispatch.protocol import Transport
from ep_moe.kernels.device import leaving
from ep_moe.ops import SecondStream
from ep_moe.ops.second_stream import Event
from ep_moe.types import Arrived, Routing

T = TypeVar("T")


class Coming(NamedTuple):
    arrived: Arrived
    there: Event  # when it is


def pipelined(
    x: Tensor,
    routing: Routing,
    num_experts: int,
    transport: Transport,
    work: Callable[[Arrived], Tensor],
    *,
    chunks: int,
    beside: Callable[[], T] | None = None,
) -> tuple[Tensor, T | None]:
    """Rows of x (T,H) to the experts, `work` on what arrives, its results back and added up: (T,H);
    and what `beside` returns.

    `work` is called for each of the parts, and leaves multiprocessors to the moves beside it.
    `beside` is called first, and runs beside the first part's way out; if it raises, nothing is
    sent.
    """
    moves = SecondStream(x.device, "moves")
    autograd_holds = torch.is_grad_enabled()

    def out(part: tuple[Tensor, Routing]) -> Coming:
        with moves.launch():
            arrived = dispatch(*part, num_experts, transport, keep=True)
        if autograd_holds:
            moves.read_here(arrived.rows, arrived.gate_weights, arrived.local_ids)
        return Coming(arrived, moves.place())

    parts, back, read_there = cut(x, routing, chunks), [], []
    try:
        done = None if beside is None else beside()
        coming = out(parts[0])
        for number in range(chunks):
            arrived, there = coming
            moves.wait(there)
            del read_there[:-1]  # read before this part came, unlike the last, which is read now
            with leaving(transport.sms):
                rows = work(arrived)
            if number + 1 < chunks:
                coming = out(parts[number + 1])
            moves.follow()
            with moves.launch():
                back.append(combine(rows, arrived.plan, transport))
            read_there.append(rows)
    finally:  # the early stop of a checkpoint's recomputation, too, leaves by an exception
        moves.join()
    return torch.cat(back), done


def cut(x: Tensor, routing: Routing, chunks: int) -> list[tuple[Tensor, Routing]]:
    """Parts of ceil(T / chunks) tokens, as many as there are, and always `chunks` of them.

    5 tokens, 3 parts -> 2, 2, 1;  4 tokens, 3 parts -> 2, 2, 0
    """
    tokens = len(x)
    each = -(-tokens // chunks)
    sizes = [max(0, min(each, tokens - number * each)) for number in range(chunks)]
    rows, gates = _Cut.apply(x, sizes), _Cut.apply(routing.gate_weights, sizes)
    routings = map(Routing, routing.ids.split(sizes), gates)
    return list(zip(rows, routings, strict=True))


class _Cut(torch.autograd.Function):
    """Handles of their own on the rows of a tensor. Those of `split` are views, and a tensor that
    is changed in place before the backward would be an error about views."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return tuple(part.detach() for part in whole.detach().split(sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_parts: Tensor) -> tuple[Tensor, None]:
        return torch.cat(d_parts), None
