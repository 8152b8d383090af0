"""One matrix product per expert over the packed rows that it owns: forward, input gradient, weight
gradient.

`offsets` are exclusive and cumulative, length E_loc+1: expert e owns rows [offsets[e],
offsets[e+1]), none when the two are equal. Rows past offsets[-1] are never read; what stands there
in an output is zero.
"""

from itertools import pairwise

import torch
from torch import Tensor

from ep_moe import check
from ep_moe.ops.numerics import Numerics, matmul


def grouped_gemm(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    numerics: Numerics = "fast",
) -> Tensor:
    """y[s] = weight[e] @ x[s] (+ bias[e]) for the expert e that owns row s.

    x (S,N_in), weight (E_loc,N_out,N_in), offsets (E_loc+1,) int32, bias (E_loc,N_out) -> (S,N_out)
    """
    y = x.new_zeros(len(x), weight.shape[1])
    for e, rows in _groups(offsets, len(weight), len(x)):
        of_expert = None if bias is None else bias[e]
        matmul(x[rows], weight[e].t(), numerics=numerics, bias=of_expert, out=y[rows])
    return y


def grouped_gemm_dgrad(
    d_y: Tensor, weight: Tensor, offsets: Tensor, *, numerics: Numerics = "fast"
) -> Tensor:
    """d_x[s] = d_y[s] @ weight[e].  (S,N_out), (E_loc,N_out,N_in) -> (S,N_in)"""
    d_x = d_y.new_zeros(len(d_y), weight.shape[2])
    for e, rows in _groups(offsets, len(weight), len(d_y)):
        matmul(d_y[rows], weight[e], numerics=numerics, out=d_x[rows])
    return d_x


def grouped_gemm_wgrad(
    d_y: Tensor,
    x: Tensor,
    offsets: Tensor,
    *,
    scale: float = 1.0,
    numerics: Numerics = "fast",
) -> Tensor:
    """d_weight[e] = scale * sum_s d_y[s] x[s]^T over the rows of e; exactly zero for an empty
    expert.

    d_y (S,N_out), x (S,N_in) -> (E_loc,N_out,N_in). One product per expert, over its rows in packed
    order; exact has copies of them and of its output, so that not even their alignment depends on
    others.
    """
    groups = _groups(offsets, None, len(x))
    d_weight = x.new_zeros(len(offsets) - 1, d_y.shape[1], x.shape[1])
    for e, rows in groups:
        a, b = d_y[rows], x[rows]
        if numerics == "exact":
            d_weight[e] = torch.mm(a.clone().t(), b.clone())
        else:
            torch.mm(a.t(), b, out=d_weight[e])
    return d_weight.mul_(scale) if scale != 1.0 else d_weight


def grouped_bias_grad(d_y: Tensor, offsets: Tensor, *, scale: float = 1.0) -> Tensor:
    """d_bias[e] = scale * sum_s d_y[s] over the rows of e.  (S,N_out) -> (E_loc,N_out)"""
    groups = _groups(offsets, None, len(d_y))
    d_bias = d_y.new_zeros(len(offsets) - 1, d_y.shape[1])
    for e, rows in groups:
        d_bias[e] = d_y[rows].sum(0)
    return d_bias.mul_(scale) if scale != 1.0 else d_bias


def _groups(offsets: Tensor, num_experts: int | None, num_rows: int) -> list[tuple[int, slice]]:
    """The non-empty experts and their rows."""
    ends = check.offsets(offsets, num_experts, num_rows)
    return [(e, slice(a, b)) for e, (a, b) in enumerate(pairwise(ends)) if a < b]
