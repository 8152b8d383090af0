"""What `numerics: exact` does differently, above every transport.

Each slot travels as a token of its own with one choice and gate 1, comes back unweighted, and its
origin sums gate * y in slot order in fp32. No sum then depends on which ranks hold a token's
experts. With products in fixed row blocks (`ops.numerics`) y and dX depend neither on the number of
ranks nor on the other tokens, and the expert weight gradients do not depend on the number of ranks
when rank r holds the r-th contiguous chunk of the batch. The origin keeps y of all slots (N,H).

All of it is for one number of threads, the same in every process of every run that is compared: a
library shares out a product, even one block of it, by how many there are. torchrun gives each of
several ranks one thread unless OMP_NUM_THREADS is set; a process started by hand takes all cores.
And on a GPU for one table of tiles (`kernels.choice`), whose depth is the order of a sum.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_moe import ops
from ep_moe.types import Routing


def split_slots(x: Tensor, routing: Routing, *, gate_on: str) -> tuple[Tensor, Routing]:
    """x (T,H), K choices each -> (N,H), one choice each; N = T*K, slot = t*K + k. Their gates are
    1, or the token's own where the gate belongs on the input of the expert."""
    gates = routing.gate_weights
    gates = gates if gate_on == "input" else torch.ones_like(gates)
    slot_routing = Routing(routing.ids.reshape(-1, 1), gates.reshape(-1, 1))
    return _SplitSlots.apply(x, routing.ids.shape[1]), slot_routing


def sum_slots(y: Tensor, routing: Routing, *, gate_on: str) -> Tensor:
    """y (N,H) of the slots -> (T,H): the sum of a token's slots, in slot order, times their gates
    unless the experts' inputs had them."""
    gates = routing.gate_weights
    gates = torch.ones_like(gates) if gate_on == "input" else gates
    return _SumSlots.apply(y, gates, slots_of(routing.ids))


def exact_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T whose rows, and those of d_x, depend on that row alone. (T,N), (P,N) -> (T,P)"""
    return _ExactLinear.apply(x, weight.to(x.dtype))


def exact_gated(y: Tensor, gate: Tensor) -> Tensor:
    """y * gate, where a row of d_gate depends on that row alone. (T,H), (T,1) -> (T,H)"""
    rows = torch.arange(len(y), dtype=torch.int32, device=y.device)
    return _SumSlots.apply(y, gate, rows[:, None])


def slots_of(ids: Tensor) -> Tensor:
    """[[3,-1],[0,2]] -> [[0,-1],[2,3]]: the slots of each token, -1 where it goes nowhere."""
    slots = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view(ids.shape)
    return slots.masked_fill(ids < 0, -1)


class _SplitSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, top_k: int) -> Tensor:
        ctx.top_k = top_k
        return x.repeat_interleave(top_k, dim=0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_slots: Tensor) -> tuple[Tensor, None]:
        slots = torch.arange(len(d_slots), dtype=torch.int32, device=d_slots.device)
        tokens = len(d_slots) // ctx.top_k
        return ops.weighted_sum(d_slots, None, slots.view(tokens, ctx.top_k)), None


class _SumSlots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, gate_weights: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(y, gate_weights, slots)
        return ops.weighted_sum(y, gate_weights, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        grads = ops.weighted_sum_backward(d_out, *ctx.saved_tensors, numerics="exact")
        return grads.y, grads.gate_weights, None


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return ops.matmul(x, weight.t(), numerics="exact", out=x.new_empty(len(x), len(weight)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        d_x = (
            ops.matmul(d_y, weight, numerics="exact", out=torch.empty_like(x)) if needs_x else None
        )
        return d_x, torch.mm(d_y.t(), x) if needs_weight else None
