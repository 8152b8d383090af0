"""What a layer over several ranks is made of, each alone: computing without the moves, and the
moves without computing.

The moves of one real call are noted, with what was given to them and what they brought. Computing
alone is the same layer, whose moves give at once what the noted ones brought: router, shared
experts, experts and autograd run as ever, on rows that arrived before the clock started.
Communicating alone is to make the noted moves again, in their order, on what was given to them:
forward a dispatch and a combine, with the backward also their adjoints, of rows and of gates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

import ep_moe
from benchmarks.harness import Disagreement, Implementation
from benchmarks.peers import error_limit, largest_error
from benchmarks.rows import CEILING
from ep_moe.dispatch import Caps, Transport
from ep_moe.dispatch.protocol import Plan, Sent
from ep_moe.types import Routing

COMPUTE, COMMUNICATION = f"{CEILING}: compute alone", f"{CEILING}: communication alone"
Call = Callable[[], Any]


class Move(NamedTuple):
    """One call of a transport. plan: how many dispatches came before the one that made its plan;
    given: what else it was called with; brought: what it returned."""

    name: str
    plan: int
    given: tuple[Any, ...]
    keep: bool
    brought: Any


class Watched:
    """A transport whose moves are noted. What others may write over is copied. Notes are handles of
    their own: autograd hangs its graph on those that are returned, and a graph that is kept names
    the stream of this call to every later one, which cannot be captured then.
    """

    name: ClassVar[str] = "watched"

    def __init__(self, transport: Transport) -> None:
        self.transport, self.caps = transport, transport.caps
        self.sms = transport.sms
        self.moves: list[Move] = []
        self._plans: list[Plan] = []

    def dispatch(self, x: Tensor, routing: Routing, num_experts: int, *, keep: bool = True) -> Sent:
        sent = self.transport.dispatch(x, routing, num_experts, keep=keep)
        given = (x.detach(), Routing(routing.ids, routing.gate_weights.detach()), num_experts)
        rows = sent.rows if keep else sent.rows.clone()
        brought = Sent(sent.plan, rows.detach(), sent.gate_weights.detach())
        self.moves.append(Move("dispatch", len(self._plans), given, keep, brought))
        self._plans.append(sent.plan)
        return sent._replace(rows=rows)

    def replay(self, plan: Any, x: Tensor, *, keep: bool = True) -> Tensor:
        rows = self.transport.replay(plan, x, keep=keep)
        return self._note("replay", plan, x, rows if keep else rows.clone(), keep)

    def replay_gates(self, plan: Any, gates: Tensor) -> Tensor:
        brought = self.transport.replay_gates(plan, gates)
        return self._note("replay_gates", plan, gates, brought)

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        return self._note("combine", plan, rows, self.transport.combine(plan, rows))

    def combine_gates(self, plan: Any, gates: Tensor) -> Tensor:
        brought = self.transport.combine_gates(plan, gates)
        return self._note("combine_gates", plan, gates, brought)

    def _note(
        self, name: str, plan: Plan, given: Tensor, brought: Tensor, keep: bool = True
    ) -> Tensor:
        (number,) = (n for n, known in enumerate(self._plans) if known is plan)
        self.moves.append(Move(name, number, (given.detach(),), keep, brought.detach()))
        return brought


class Still:
    """A transport that moves nothing: it gives what noted moves brought, in their order. Each time
    by another handle, for autograd marks what it is given."""

    name: ClassVar[str] = "still"
    sms: int = 0

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self._moves: Sequence[Move] = ()
        self._made = 0

    def begin(self, moves: Sequence[Move]) -> None:
        """Of the call that comes next."""
        self._moves, self._made = moves, 0

    def dispatch(self, x: Tensor, routing: Routing, num_experts: int, *, keep: bool = True) -> Sent:
        plan, rows, gates = self._next("dispatch")
        return Sent(plan, rows.detach(), gates.detach())

    def replay(self, plan: Any, x: Tensor, *, keep: bool = True) -> Tensor:
        return self._next("replay").detach()

    def replay_gates(self, plan: Any, gates: Tensor) -> Tensor:
        return self._next("replay_gates").detach()

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        return self._next("combine").detach()

    def combine_gates(self, plan: Any, gates: Tensor) -> Tensor:
        return self._next("combine_gates").detach()

    def _next(self, name: str) -> Any:
        move = self._moves[self._made]
        assert move.name == name, f"{name} where {move.name} was noted"
        self._made += 1
        return move.brought


@dataclass(frozen=True)
class Parts:
    """A layer taken apart, by `take_apart`."""

    compute: Sequence[Call]
    communication: Sequence[Call]
    moves: Sequence[Move]  # of the first call
    graphable: bool

    def implementations(self, agrees: Callable[[Any], None]) -> Mapping[str, Implementation]:
        """agrees: whether what the layer computes is right, without which its time is none."""
        expected = _came_back(self.moves, [move.brought for move in self.moves])

        def check(brought: Sequence[Any]) -> None:
            error = largest_error(_came_back(self.moves, brought), expected)
            if not error <= error_limit(expected[0].dtype):
                raise Disagreement(f"its moves bring something else, off by {error:.1e}")

        return {
            COMPUTE: Implementation(self.compute, self.graphable, agrees),
            COMMUNICATION: Implementation(self.communication, self.graphable, check),
        }


def take_apart(layer: ep_moe.MoELayer, calls: Sequence[Call]) -> Parts:
    """`calls` of `layer`, one for each input set, are made once. From then on the layer moves
    nothing: it must be nobody else's, though its weights may."""
    transport = layer.transport
    noted = [_moves_of(layer, call) for call in calls]
    still = Still(transport.caps)
    layer.transport = cast(Transport, still)

    def compute(call: Call, moves: Sequence[Move]) -> Any:
        still.begin(moves)
        return call()

    return Parts(
        [partial(compute, call, moves) for call, moves in zip(calls, noted, strict=True)],
        [partial(make_again, moves, transport) for moves in noted],
        noted[0],
        transport.caps.graphable,
    )


def _moves_of(layer: ep_moe.MoELayer, call: Call) -> Sequence[Move]:
    before = layer.transport
    watched = Watched(before)
    layer.transport = cast(Transport, watched)
    try:
        call()
    finally:
        layer.transport = before
    return watched.moves


@torch.no_grad()
def make_again(moves: Sequence[Move], transport: Transport) -> Sequence[Any]:
    """The same moves with nothing between them -> what each brings, but for rows that arrive, whose
    memory the next move may write."""
    plans: list[Plan] = []
    brought: list[Any] = []
    for move in moves:
        if move.name == "dispatch":
            plans.append(transport.dispatch(*move.given, keep=move.keep).plan)
            brought.append(None)
        elif move.name == "replay":
            transport.replay(plans[move.plan], *move.given, keep=move.keep)
            brought.append(None)
        else:
            brought.append(getattr(transport, move.name)(plans[move.plan], *move.given))
    return brought


def _came_back(moves: Sequence[Move], brought: Sequence[Any]) -> tuple[Tensor, ...]:
    """What came back to the tokens. Of what arrived some places mean nothing: those where nothing
    did, and gates of choices that live elsewhere."""
    back = zip(moves, brought, strict=True)
    return tuple(value for move, value in back if move.name.startswith("combine"))
