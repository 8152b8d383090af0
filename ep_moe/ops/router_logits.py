"""The router's product: fp32 logits, whatever the dtype of the tokens.

Near-equal logits decide where a token goes; a bf16 result would tie in a third of all rows. So TF32
and its like, which torch may be told to use for fp32 products, are not for this one. bf16 and fp16
tokens are multiplied as they are on the tensor cores of a GPU, which add in fp32; so are the
gradients of bf16 ones, each fp32 number as the sum of two of bf16. x is kept for the backward as it
came.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ep_moe.ops.numerics import Numerics, accumulation_dtype, full_fp32, matmul


class RouterGrads(NamedTuple):
    x: Tensor | None  # (T,H)
    weight: Tensor | None  # (E,H)


def router_logits(x: Tensor, weight: Tensor, *, numerics: Numerics = "fast") -> Tensor:
    """logits[t,e] = <x[t], weight[e]>.  x (T,H), weight (E,H) -> (T,E) fp32, or fp64 for fp64 x"""
    halves = (torch.bfloat16, torch.float16)
    if x.is_cuda and numerics == "fast" and x.dtype == weight.dtype and x.dtype in halves:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    dtype = accumulation_dtype(x.dtype)
    out = torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    with full_fp32(x.device):
        return matmul(x.to(dtype), weight.to(dtype).t(), numerics=numerics, out=out)


def router_logits_backward(
    d_logits: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    needs_x: bool,
    needs_weight: bool,
    numerics: Numerics = "fast",
) -> RouterGrads:
    """d_x = d_logits @ weight and d_weight = d_logits^T @ x, each only where it is needed."""
    if x.is_cuda and numerics == "fast" and x.dtype == weight.dtype == torch.bfloat16:
        return _backward_bf16(d_logits, x, weight, needs_x=needs_x, needs_weight=needs_weight)
    dtype = d_logits.dtype
    d_x = d_weight = None
    if needs_x:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        with full_fp32(x.device):
            d_x = matmul(d_logits, weight.to(dtype), numerics=numerics, out=out).to(x.dtype)
    if needs_weight:
        with full_fp32(x.device):
            d_weight = torch.mm(d_logits.t(), x.to(dtype)).to(weight.dtype)
    return RouterGrads(d_x, d_weight)


def _backward_bf16(
    d_logits: Tensor, x: Tensor, weight: Tensor, *, needs_x: bool, needs_weight: bool
) -> RouterGrads:
    """d_logits = high + low, to 16 bits of mantissa; one product each takes both."""
    both = x.new_empty(len(x), 2 * len(weight))
    high, low = both.chunk(2, dim=1)
    high.copy_(d_logits)
    torch.sub(d_logits, high, out=low)
    d_x = torch.mm(both, torch.cat([weight, weight])) if needs_x else None
    d_weight = None
    if needs_weight:
        of_high, of_low = torch.mm(both.t(), x, out_dtype=torch.float32).chunk(2)
        d_weight = torch.add(of_high, of_low, out=torch.empty_like(weight))
    return RouterGrads(d_x, d_weight)
