"""Reduce the rows that belong together: a row's experts on the expert side, a token's ranks at its
origin.

A gather and a sum in a fixed order instead of a scatter-add: no atomics, so two runs agree bit for
bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ep_moe.ops.numerics import Numerics, accumulation_dtype, row_dot, served_by_kernel


class WeightedSumGrads(NamedTuple):
    y: Tensor  # (S,H)
    gate_weights: Tensor  # (A,K)


def weighted_sum(y: Tensor, gate_weights: Tensor | None, packed_of_arrived: Tensor) -> Tensor:
    """out[a] = sum_k gate_weights[a,k] * y[packed_of_arrived[a,k]]; -1 adds nothing.

    y (S,H), gate_weights (A,K) or None for ones, packed_of_arrived (A,K) int32 -> (A,H) in y's
    dtype. The gate multiplies the expert's OUTPUT: with a bias or a non-linearity it cannot move
    to the input.

    K=2, packed_of_arrived=[[1,-1]], gate=[[.5,nan]], y=[[10],[20]]  ->  out=[[10]]
    """
    if not served_by_kernel(y):
        return weighted_sum_ref(y, gate_weights, packed_of_arrived)
    from ep_moe.kernels.weighted_sum import weighted_sum as kernel

    return kernel(y, gate_weights, packed_of_arrived)


def weighted_sum_ref(y: Tensor, gate_weights: Tensor | None, packed_of_arrived: Tensor) -> Tensor:
    out = y.new_zeros(len(packed_of_arrived), y.shape[1], dtype=accumulation_dtype(y.dtype))
    if not len(y):  # a rank that received nothing has no row 0 to stand in for an absent one
        return out.to(y.dtype)
    for k in range(packed_of_arrived.shape[1]):  # one (A,H) temporary at a time, summed in k order
        index = packed_of_arrived[:, k]
        absent = (index < 0)[:, None]
        rows = y.index_select(0, index.clamp_min(0)).to(out.dtype)
        if gate_weights is not None:
            rows *= gate_weights[:, k, None]
        out += rows.masked_fill_(absent, 0.0)  # an absent slot's gate and stand-in row are garbage
    return out.to(y.dtype)


def weighted_sum_backward(
    d_out: Tensor,
    y: Tensor,
    gate_weights: Tensor,
    packed_of_arrived: Tensor,
    *,
    numerics: Numerics = "fast",
) -> WeightedSumGrads:
    """d_y[s] = gate[a,k] * d_out[a] and d_gate[a,k] = <d_out[a], y[s]>, where s =
    packed_of_arrived[a,k] >= 0.

    The expert MLP does not call it: it never keeps y, and has the gate gradient from the activation
    (`expert_mlp.py`).
    """
    dtype, rows = accumulation_dtype(y.dtype), len(y)
    if not rows:
        return WeightedSumGrads(torch.zeros_like(y), torch.zeros_like(gate_weights))
    absent, top_k = packed_of_arrived < 0, packed_of_arrived.shape[1]
    d_rows = d_out.repeat_interleave(top_k, dim=0)  # of the choices, absent ones too: no host sync
    d_weighted = (d_rows.to(dtype) * gate_weights.reshape(-1, 1)).to(y.dtype)
    d_y = y.new_zeros(rows + 1, y.shape[1])  # absent choices write a row that nobody reads
    d_y[packed_of_arrived.masked_fill(absent, rows).flatten()] = d_weighted
    there = y[packed_of_arrived.clamp_min(0).flatten()]
    d_gate = row_dot(d_rows, there, numerics=numerics).to(gate_weights.dtype)
    return WeightedSumGrads(d_y[:rows], d_gate.view_as(gate_weights).masked_fill(absent, 0.0))
