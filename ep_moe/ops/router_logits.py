"""The router's product: fp32 logits, whatever the dtype of the tokens.

Near-equal logits decide where a token goes; a bf16 result would tie in a third of all rows. x is
kept for the backward as it came, not as an fp32 copy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ep_moe.ops.numerics import accumulation_dtype


class RouterGrads(NamedTuple):
    x: Tensor | None  # (T,H)
    weight: Tensor | None  # (E,H)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """logits[t,e] = <x[t], weight[e]>.  x (T,H), weight (E,H) -> (T,E) fp32, or fp64 for fp64 x"""
    dtype = accumulation_dtype(x.dtype)
    return torch.mm(x.to(dtype), weight.to(dtype).t())


def router_logits_backward(
    d_logits: Tensor, x: Tensor, weight: Tensor, *, needs_x: bool, needs_weight: bool
) -> RouterGrads:
    """d_x = d_logits @ weight and d_weight = d_logits^T @ x, each only where it is needed."""
    dtype = d_logits.dtype
    d_x = torch.mm(d_logits, weight.to(dtype)).to(x.dtype) if needs_x else None
    d_weight = torch.mm(d_logits.t(), x.to(dtype)).to(weight.dtype) if needs_weight else None
    return RouterGrads(d_x, d_weight)
