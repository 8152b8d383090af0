"""What flows through a layer: Routing -> Arrived -> Packed, and the statistics beside them. None of
them compares its tensors: `==` is identity.

T tokens of this rank, H hidden size, E experts in all, K choices per token, E_loc experts of this
rank, A arrived rows (a token goes to a rank once), S packed rows (one per arrived row and local
expert).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ep_moe.errors import InputError


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts each token goes to, and how much each counts.

    ids           (T,K) int32, global expert ids; -1 = this slot goes nowhere.
    gate_weights  (T,K) fp32 (fp64 in a gradcheck), 0 where the id is -1.
    """

    ids: Tensor
    gate_weights: Tensor

    def validate(self, num_tokens: int, num_experts: int, *, values: bool = True) -> None:
        """Refuse a routing that did not come from this package's router. values: the ids too, which
        on a GPU takes a host sync."""
        ids, gate = self.ids, self.gate_weights
        if ids.ndim != 2 or ids.shape[0] != num_tokens:
            raise InputError(
                "routing.ids",
                f"of shape {tuple(ids.shape)}",
                f"({num_tokens}, top_k): a row per token",
            )
        if ids.dtype not in (torch.int32, torch.int64):
            raise InputError("routing.ids", ids.dtype, "torch.int32 or torch.int64")
        if gate.shape != ids.shape:
            raise InputError(
                "routing.gate_weights",
                f"of shape {tuple(gate.shape)}",
                f"{tuple(ids.shape)}, as ids",
            )
        if gate.device != ids.device:
            raise InputError(
                "routing.gate_weights", f"on {gate.device}", f"on {ids.device}, as ids"
            )
        if gate.dtype not in (torch.float32, torch.float64):
            raise InputError(
                "routing.gate_weights", gate.dtype, "torch.float32: cast with .float()"
            )
        if values and ids.numel() and bool(((ids < -1) | (ids >= num_experts)).any()):
            got = f"between {int(ids.min())} and {int(ids.max())}"
            raise InputError(
                "routing.ids",
                got,
                f"-1 (nowhere) or 0 to {num_experts - 1} (num_experts = {num_experts})",
            )


@dataclass(frozen=True, eq=False)
class Arrived:
    """The rows that this rank's experts have to work on, ordered by (source rank, source token).

    rows          (A,H), the dtype of x.
    gate_weights  (A,K) fp32; the value beside a local id of -1 has no meaning.
    local_ids     (A,K) int32, expert ids counted from this rank's first expert; -1 = that choice
                  lives elsewhere.
    plan          what the transport has to remember to bring rows back; opaque.
    max_packed    (row, local expert) pairs here at most; None = a host sync finds out.
    """

    rows: Tensor
    gate_weights: Tensor
    local_ids: Tensor
    plan: Any
    max_packed: int | None = None


@dataclass(frozen=True, eq=False)
class Packed:
    """The order in which experts work: packed rows sorted by local expert, then by arrived row.

    local_ids = [[0,-1],[1,0],[-1,1]], two experts:
        arrived_of_packed = [0,1,1,2]   choice_of_packed = [0,1,0,1]
        packed_of_arrived = [[0,-1],[2,1],[-1,3]]   offsets = [0,2,4]

    arrived_of_packed, choice_of_packed  (S,) int32: packed row s is choice k of arrived row a. S is
                                         offsets[-1], or more where that is on a GPU only.
    packed_of_arrived                    (A,K) int32, -1 = none.
    offsets                              (E_loc+1,) int32, exclusive cumulative: expert e owns
                                         [offsets[e], offsets[e+1]).
    """

    arrived_of_packed: Tensor
    choice_of_packed: Tensor
    packed_of_arrived: Tensor
    offsets: Tensor


class RoutingStats(NamedTuple):
    """What one call of a layer reports, and the losses its caller adds. A named tuple, hence a
    pytree everywhere.

    tokens_per_expert  (E,) int64: choices of each expert on this rank, before any dropping, real
                    tokens only.
    dropped_choices    scalar int64: of them, how many a capacity turned away.
    aux_loss           scalar fp32, already times `aux_loss_coef`; differentiable.
    z_loss             scalar fp32, already times `z_loss_coef`; differentiable.
    """

    tokens_per_expert: Tensor
    dropped_choices: Tensor
    aux_loss: Tensor
    z_loss: Tensor

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__
