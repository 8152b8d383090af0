"""What a transport is: two adjoint moves without autograd, and what it can do."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ep_moe.parallel import ExpertParallel
from ep_moe.types import Routing


@dataclass(frozen=True)
class Caps:
    """What a transport promises; tests and `auto` read it.

    needs_group    works on a torch.distributed process group.
    max_ranks      the most ranks it serves; None = any number.
    deterministic  two runs agree bit for bit.
    graphable      can be captured in a CUDA graph (no host sync).
    in_place       rows that are not to be kept lie in memory that the next move writes.
    unordered      rows that are not to be kept are ordered by source rank alone, in each plan anew.
    fixed_size     its buffers have room for `max_tokens_per_rank` tokens of each rank.
    dtypes         of the rows that it moves; None = any.
    max_choices    of a token; None = any number.
    backward       its moves back are the adjoints of those out; without it, it runs with autograd
                   off only.
    weighs         combine multiplies by the gate weights, at the token's rank: experts must not. A
                   row arrives for each of a token's experts, with that one and gate 1.
    """

    needs_group: bool
    max_ranks: int | None
    deterministic: bool
    graphable: bool
    in_place: bool = False
    unordered: bool = False
    fixed_size: bool = False
    dtypes: tuple[torch.dtype, ...] | None = None
    max_choices: int | None = None
    backward: bool = True
    weighs: bool = False


class Plan(Protocol):
    """What dispatch learned and the way back needs. Outlives the call; holds no values of x."""

    @property
    def local_ids(self) -> Tensor: ...

    @property
    def max_packed(self) -> int: ...  # (row, local expert) pairs at most


class Sent(NamedTuple):
    """What the first dispatch of a routing brings: the plan for every later move, and the arrived
    rows and gates."""

    plan: Plan
    rows: Tensor  # (A,H)
    gate_weights: Tensor  # (A,K)


class Transport(Protocol):
    """`dispatch` learns the plan, of a type of the transport's own; `replay` makes the same move
    again; `combine` is its adjoint.

    Arrived rows are ordered by (source rank, source token): a recomputation without `ep_moe.replay`
    puts rows of its own plan beside gradients of the first one. combine adds in fp32, in a fixed
    order (of the ranks, but for DeepEP), and rounds once. Gate values move beside the rows: out
    whole, back as the sum over ranks, where slots of other ranks must be 0.
    """

    name: ClassVar[str]

    @property
    def caps(self) -> Caps: ...

    @property
    def sms(self) -> int:
        """Multiprocessors that a move takes. Experts that work beside one leave it so many."""
        ...

    def __init__(self, ep: ExpertParallel, max_tokens_per_rank: int | None = None) -> None: ...

    def dispatch(self, x: Tensor, routing: Routing, num_experts: int, *, keep: bool = True) -> Sent:
        """x (T,H), ids and gate weights (T,K) -> plan, rows (A,H), gates (A,K). May meet every
        other rank. keep: rows outlive the next move of any layer of the group, for a backward; if
        not, they may lie in memory that it writes, and in another order (`caps`)."""
        ...

    def replay(self, plan: Any, x: Tensor, *, keep: bool = True) -> Tensor:
        """(T,H) -> (A,H)"""
        ...

    def replay_gates(self, plan: Any, gates: Tensor) -> Tensor:
        """(T,K) -> (A,K)"""
        ...

    def combine(self, plan: Any, rows: Tensor) -> Tensor:
        """(A,H) -> (T,H): the sum of a token's arrived rows"""
        ...

    def combine_gates(self, plan: Any, gates: Tensor) -> Tensor:
        """(A,K) -> (T,K)"""
        ...
