"""Decide once: what the forward pass chose, recomputation and other runs can be given back.

Two kinds. A *tape* remembers everything that a recomputation must not decide again (chosen ids,
sums over ranks, what dispatch learned); `replay()` lends one to each activation checkpoint. A
*routing record* holds chosen ids alone, as plain tensors that can be saved and replayed in another
run on any number of ranks (reinforcement learning routes its training pass like its sampling pass).
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import CheckpointFunction

from ep_moe.errors import InputError, RecomputationMismatch, ReentrantCheckpoint

T = TypeVar("T")


class Tape:
    """What one checkpointed call decided, in order. Read again from the start by each replay."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.complete = False
        self.cursor = 0

    def once(self, decide: Callable[[], T]) -> T:
        if not self.complete:
            self.items.append(decide())
            return self.items[-1]
        if self.cursor == len(self.items):
            raise RecomputationMismatch(
                f"the recomputation asks for decision {self.cursor + 1}, but the forward pass made "
                f"{len(self.items)}: the block must call the same layers in both"
            )
        self.cursor += 1
        return self.items[self.cursor - 1]


_TAPE: ContextVar[Tape | None] = ContextVar("ep_moe_tape", default=None)


def once(decide: Callable[[], T]) -> T:
    """decide(), or inside the recomputation of a checkpoint that replays, what it gave before."""
    tape = _TAPE.get()
    return decide() if tape is None else tape.once(decide)


def replay() -> Callable[[], tuple["_Use", "_Use"]]:
    """For `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False,
    context_fn=ep_moe.replay())`.

    The recomputation then takes the forward pass's ids and plans: no second count exchange, and no
    token that near a tie goes elsewhere the second time. Checkpoints may nest.
    """
    return _pair


def _pair() -> tuple["_Use", "_Use"]:
    # Inside another checkpoint that is being recomputed this gives the tape of the first time.
    tape = once(Tape)
    return _Use(tape), _Use(tape)


class _Use:
    """Re-enterable: an exception (early stop is one) or a second backward may leave it anywhere."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape

    def __enter__(self) -> None:
        self.tape.cursor = 0
        self.token = _TAPE.set(self.tape)

    def __exit__(self, *error: object) -> None:
        _TAPE.reset(self.token)
        self.tape.complete = True


def in_backward() -> bool:
    """Is this code run by a backward pass, which means: as a recomputation?"""
    return torch._C._current_graph_task_id() != -1


def refuse_reentrant_checkpoint() -> None:
    """Reentrant checkpointing loses the gradient of losses that are not returned as bare tensors,
    as those in RoutingStats are, and says nothing. Found out in its recomputation, before any
    gradient of the layer is computed."""
    if not in_backward():
        return
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            raise ReentrantCheckpoint(
                "checkpoint(use_reentrant=True) around an ep_moe layer silently detaches the "
                "losses in RoutingStats: pass use_reentrant=False"
            )
        frame = frame.f_back


@dataclass(eq=False)
class RoutingRecord:
    """What each layer call chose, in order: named tuples of tensors (T,K) (`routing.Choice`)."""

    choices: list[Any] = field(default_factory=list)

    def __getitem__(self, tokens: slice) -> "RoutingRecord":
        """The record of some of the tokens, for a run that spreads them otherwise."""
        return RoutingRecord([type(c)(*(value[tokens] for value in c)) for c in self.choices])

    def to(self, device: torch.device | str) -> "RoutingRecord":
        """A copy on another device."""
        return RoutingRecord([type(c)(*(value.to(device) for value in c)) for c in self.choices])


_RECORD: ContextVar[RoutingRecord | None] = ContextVar("ep_moe_record", default=None)
_GIVEN: ContextVar[Iterator[Any] | None] = ContextVar("ep_moe_given", default=None)


@contextmanager
def record_routing() -> Iterator[RoutingRecord]:
    """Keep what every layer called inside chooses. The record can be pickled and sliced by
    token."""
    record = RoutingRecord()
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


@contextmanager
def replay_routing(record: RoutingRecord) -> Iterator[None]:
    """Layers called inside take the recorded choices, in order and all of them; weights come from
    their own logits. Raises InputError for a record of other calls: longer, shorter, of another
    shape or of more experts."""
    given = iter(record.choices)
    token = _GIVEN.set(given)
    try:
        yield
    finally:
        _GIVEN.reset(token)
    if left := len(list(given)):
        got = f"{left} of {len(record.choices)} choices longer than the calls of layers inside"
        raise InputError("the routing record", got, "of these calls alone, one choice each")


def recorded(
    choose: Callable[[], Any], shape: tuple[int, int], num_experts: int, device: torch.device
) -> Any:
    """choose(), or the next recorded choice; recorded in turn when somebody records. What a
    checkpoint chooses again is no call of its own."""
    given, record = _GIVEN.get(), _RECORD.get()
    if in_backward():
        if given is not None:
            raise RecomputationMismatch(
                "a checkpoint recomputes inside replay_routing, whose record has one choice a "
                "call: pass context_fn=ep_moe.replay() to the checkpoint"
            )
        return choose()
    if given is None:
        choice = choose()
    else:
        choice = next(given, None)
        if choice is None:
            raise InputError("the routing record", "at its end", "as long as the layers called")
        _require_choice_of(choice, shape, num_experts, device)
    if record is not None:
        record.choices.append(choice)
    return choice


def _require_choice_of(
    choice: Any, shape: tuple[int, int], num_experts: int, device: torch.device
) -> None:
    """Reads the ids, one host sync on a GPU: an expert that the layer lacks would fail far from
    here, and on a GPU take the process with it."""
    if tuple(choice.ids.shape) != shape:
        got = f"of shape {tuple(choice.ids.shape)} at this call"
        raise InputError("the routing record", got, f"of shape {shape}")
    if choice.ids.device != device:
        rule = f"on {device}, as the layer's input: record.to({str(device)!r})"
        raise InputError("the routing record", f"on {choice.ids.device}", rule)
    if not choice.ids.numel():
        return
    ids = torch.stack([choice.ids, choice.wanted])
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < -1 or high >= num_experts:
        got = f"of experts {low} to {high} at this call"
        rule = f"-1 (nowhere) or 0 to {num_experts - 1}: the layer has {num_experts} experts"
        raise InputError("the routing record", got, rule)
