"""One matrix product per expert over the packed rows that it owns: forward, input gradient, weight
gradient. On a GPU persistent Triton kernels, elsewhere a loop over the experts.

`offsets` are exclusive and cumulative, length E_loc+1: expert e owns rows [offsets[e],
offsets[e+1]), none when the two are equal. Rows past offsets[-1] are never read; what stands there
in an output means nothing.
"""

from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from ep_moe import check
from ep_moe.ops.gather import gather
from ep_moe.ops.numerics import Numerics, fp32_precision, gated, matmul, served_by_kernel

Gathered = Literal["d_y", "x"]


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
    if not served_by_kernel(x):
        return grouped_gemm_ref(x, weight, offsets, bias, numerics=numerics)
    from ep_moe.kernels import grouped_gemm as kernels

    experts, columns, depth = weight.shape
    offsets = _for_kernel(offsets, experts, len(x), x.device)
    how = kernel_options("product", x, len(x) // experts, depth, columns, numerics)
    return kernels.grouped_gemm(x, weight, offsets, bias, **how)


def grouped_gemm_ref(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    numerics: Numerics = "fast",
) -> Tensor:
    y = x.new_zeros(len(x), weight.shape[1])
    for e, rows in _groups(offsets, len(weight), len(x)):
        of_expert = None if bias is None else bias[e]
        matmul(x[rows], weight[e].t(), numerics=numerics, bias=of_expert, out=y[rows])
    return y


def grouped_gemm_dgrad(
    d_y: Tensor, weight: Tensor, offsets: Tensor, *, numerics: Numerics = "fast"
) -> Tensor:
    """d_x[s] = d_y[s] @ weight[e].  (S,N_out), (E_loc,N_out,N_in) -> (S,N_in)"""
    if not served_by_kernel(d_y):
        return grouped_gemm_dgrad_ref(d_y, weight, offsets, numerics=numerics)
    from ep_moe.kernels import grouped_gemm as kernels

    experts, depth, columns = weight.shape
    offsets = _for_kernel(offsets, experts, len(d_y), d_y.device)
    how = kernel_options("dgrad", d_y, len(d_y) // experts, depth, columns, numerics)
    return kernels.grouped_gemm(d_y, weight, offsets, transposed=True, **how)


def grouped_gemm_dgrad_ref(
    d_y: Tensor, weight: Tensor, offsets: Tensor, *, numerics: Numerics = "fast"
) -> Tensor:
    d_x = d_y.new_zeros(len(d_y), weight.shape[2])
    for e, rows in _groups(offsets, len(weight), len(d_y)):
        matmul(d_y[rows], weight[e], numerics=numerics, out=d_x[rows])
    return d_x


def grouped_gemm_wgrad(
    d_y: Tensor,
    x: Tensor,
    offsets: Tensor,
    *,
    arrived_of_packed: Tensor | None = None,
    gathered: Gathered | None = None,
    scale: float = 1.0,
    into: Tensor | None = None,
    numerics: Numerics = "fast",
) -> Tensor:
    """d_weight[e] = scale * sum_s d_y[s] x[s]^T over the rows of e; exactly zero for an empty
    expert.

    d_y (S,N_out), x (S,N_in) -> (E_loc,N_out,N_in); the one that is `gathered` holds arrived rows,
    read through arrived_of_packed (S,). The result is added to `into` (fp32, say, for gradients
    that accumulate) where given, and rounded once.
    """
    if not served_by_kernel(x):
        return grouped_gemm_wgrad_ref(
            d_y,
            x,
            offsets,
            arrived_of_packed=arrived_of_packed,
            gathered=gathered,
            scale=scale,
            into=into,
            numerics=numerics,
        )
    from ep_moe.kernels import grouped_wgrad as kernels

    slots = len(d_y if gathered == "x" else x)
    offsets = _for_kernel(offsets, None, slots, x.device)
    rows, depth, columns = slots // (len(offsets) - 1), d_y.shape[1], x.shape[1]
    return kernels.grouped_wgrad(
        d_y,
        x,
        offsets,
        arrived_of_packed=arrived_of_packed,
        gathered=gathered,
        scale=scale,
        into=into,
        **kernel_options("wgrad", x, rows, depth, columns, numerics),
    )


def grouped_gemm_wgrad_ref(
    d_y: Tensor,
    x: Tensor,
    offsets: Tensor,
    *,
    arrived_of_packed: Tensor | None = None,
    gathered: Gathered | None = None,
    scale: float = 1.0,
    into: Tensor | None = None,
    numerics: Numerics = "fast",
) -> Tensor:
    """One product per expert, over its rows in packed order; exact has copies of them and of its
    output, so that not even their alignment depends on others."""
    if gathered is not None:
        assert arrived_of_packed is not None
        x = gather(x, arrived_of_packed, offsets) if gathered == "x" else x
        d_y = gather(d_y, arrived_of_packed, offsets) if gathered == "d_y" else d_y
    if into is not None:  # what is added to it is not rounded to the rows' dtype before
        x, d_y = x.to(into.dtype), d_y.to(into.dtype)
    groups = _groups(offsets, None, len(x))
    d_weight = x.new_zeros(len(offsets) - 1, d_y.shape[1], x.shape[1])
    for e, rows in groups:
        a, b = d_y[rows], x[rows]
        if numerics == "exact":
            d_weight[e] = torch.mm(a.clone().t(), b.clone())
        else:
            torch.mm(a.t(), b, out=d_weight[e])
    if scale != 1.0:
        d_weight.mul_(scale)
    return d_weight if into is None else into.add_(d_weight)


def grouped_bias_grad(
    d_y: Tensor,
    offsets: Tensor,
    *,
    arrived_of_packed: Tensor | None = None,
    gate_of_packed: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """d_bias[e] = scale * sum_s gate[s] d_y[s] over the rows of e.

    d_y (S,N_out), or arrived rows read through arrived_of_packed (S,); gate_of_packed (S,1), None
    for ones -> (E_loc,N_out)
    """
    if not served_by_kernel(d_y):
        if arrived_of_packed is not None:
            d_y = gather(d_y, arrived_of_packed, offsets)
        if gate_of_packed is not None:
            d_y = gated(d_y, gate_of_packed)
        return _bias_grad_ref(d_y, offsets, scale)
    from ep_moe.kernels import grouped_wgrad as kernels

    slots = len(d_y if arrived_of_packed is None else arrived_of_packed)
    return kernels.grouped_bias_grad(
        d_y,
        _for_kernel(offsets, None, slots, d_y.device),
        arrived_of_packed=arrived_of_packed,
        gate_of_packed=gate_of_packed,
        scale=scale,
    )


def _bias_grad_ref(d_y: Tensor, offsets: Tensor, scale: float) -> Tensor:
    groups = _groups(offsets, None, len(d_y))
    d_bias = d_y.new_zeros(len(offsets) - 1, d_y.shape[1])
    for e, rows in groups:
        d_bias[e] = d_y[rows].sum(0)
    return d_bias.mul_(scale) if scale != 1.0 else d_bias


def kernel_options(
    form: str, like: Tensor, rows: int, depth: int, columns: int, numerics: Numerics
) -> dict[str, Any]:
    """The tile of a grouped kernel, and how it multiplies fp32. rows: of an expert, the mean;
    depth and columns: of the product, of a weight's gradient the weight's own."""
    from ep_moe.kernels.choice import Product, tile_for
    from ep_moe.kernels.device import architecture

    product = Product(form, like.itemsize, rows, depth, columns)
    tile = tile_for(product, architecture(like.device), exact=numerics == "exact")
    return {"tile": tile, "precision": fp32_precision(like.device, numerics)}


def _for_kernel(
    offsets: Tensor, num_experts: int | None, num_rows: int, device: torch.device
) -> Tensor:
    """Kernels take them as they are; looking at them is a host sync."""
    if check.wanted():
        check.offsets(offsets, num_experts, num_rows)
    return offsets.to(device, torch.int32)


def _groups(offsets: Tensor, num_experts: int | None, num_rows: int) -> list[tuple[int, slice]]:
    """The non-empty experts and their rows."""
    ends = check.offsets(offsets, num_experts, num_rows)
    return [(e, slice(a, b)) for e, (a, b) in enumerate(pairwise(ends)) if a < b]
