"""What stands between the two matrices of an expert. The gate half comes first, the up half second.

Each is a forward and a backward from the pre-activation, so that only the pre-activation is kept. A
new activation is a pair of functions and a line in ACTIVATIONS.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ep_moe.ops.numerics import accumulation_dtype, sigmoid, silu

# GPT-OSS: sigmoid slope, and the bound on the gate (above only) and on the up half (both sides).
_CLAMPED_SLOPE, _CLAMPED_LIMIT = 1.702, 7.0


class Activation(NamedTuple):
    """forward: (S,P) -> (S,I), differentiable by autograd too; backward: (d_h (S,I), pre (S,P)) ->
    (S,P). P = 2I, or I for one without a gate half (`MoEConfig.pre_activation_size`)."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def swiglu(pre: Tensor) -> Tensor:
    """silu(gate) * up, https://arxiv.org/abs/2002.05202.  (S,2I) -> (S,I)"""
    gate, up = _halves(pre)
    return (silu(gate) * up).to(pre.dtype)


def swiglu_backward(d_h: Tensor, pre: Tensor) -> Tensor:
    gate, up = _halves(pre)
    d_h = d_h.to(gate.dtype)
    sigma = sigmoid(gate)
    h_gate = gate * sigma
    d_gate = d_h * up * (sigma + h_gate * (1 - sigma))
    return torch.cat([d_gate, d_h * h_gate], dim=1).to(pre.dtype)


def geglu(pre: Tensor) -> Tensor:
    """gelu(gate) * up with the exact (erf) gelu, https://arxiv.org/abs/2002.05202. (S,2I) ->
    (S,I)"""
    gate, up = _halves(pre)
    return (gate * _normal_cdf(gate) * up).to(pre.dtype)


def geglu_backward(d_h: Tensor, pre: Tensor) -> Tensor:
    gate, up = _halves(pre)
    d_h = d_h.to(gate.dtype)
    cdf = _normal_cdf(gate)
    pdf = torch.exp(-0.5 * gate.square()) * (2 * torch.pi) ** -0.5
    return torch.cat([d_h * up * (cdf + gate * pdf), d_h * gate * cdf], dim=1).to(pre.dtype)


def relu2(pre: Tensor) -> Tensor:
    """relu(up)^2, no gate half, https://arxiv.org/abs/2109.08668.  (S,I) -> (S,I)"""
    return pre.to(accumulation_dtype(pre.dtype)).relu().square().to(pre.dtype)


def relu2_backward(d_h: Tensor, pre: Tensor) -> Tensor:
    up = pre.to(accumulation_dtype(pre.dtype))
    return (2 * d_h.to(up.dtype) * up.relu()).to(pre.dtype)


def swiglu_clamped(pre: Tensor) -> Tensor:
    """GPT-OSS: g * sigmoid(1.702 g) * (u + 1) with g = min(gate, 7), u = clamp(up, -7, 7).  (S,2I)
    -> (S,I)"""
    gate, up = _halves(pre)
    g = gate.clamp(max=_CLAMPED_LIMIT)
    u = up.clamp(-_CLAMPED_LIMIT, _CLAMPED_LIMIT)
    return (g * sigmoid(_CLAMPED_SLOPE * g) * (u + 1)).to(pre.dtype)


def swiglu_clamped_backward(d_h: Tensor, pre: Tensor) -> Tensor:
    gate, up = _halves(pre)
    d_h = d_h.to(gate.dtype)
    g = gate.clamp(max=_CLAMPED_LIMIT)
    u = up.clamp(-_CLAMPED_LIMIT, _CLAMPED_LIMIT)
    sigma = sigmoid(_CLAMPED_SLOPE * g)
    d_g = d_h * (u + 1) * sigma * (1 + _CLAMPED_SLOPE * g * (1 - sigma))
    d_gate = d_g.masked_fill(gate > _CLAMPED_LIMIT, 0.0)
    d_up = (d_h * g * sigma).masked_fill(up.abs() > _CLAMPED_LIMIT, 0.0)
    return torch.cat([d_gate, d_up], dim=1).to(pre.dtype)


ACTIVATIONS = {
    "swiglu": Activation(swiglu, swiglu_backward),
    "geglu": Activation(geglu, geglu_backward),
    "relu2": Activation(relu2, relu2_backward),
    "swiglu_clamped": Activation(swiglu_clamped, swiglu_clamped_backward),
}


def _halves(pre: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = pre.to(accumulation_dtype(pre.dtype)).chunk(2, dim=1)
    return gate, up


def _normal_cdf(x: Tensor) -> Tensor:
    """(1 + erf(x / sqrt(2))) / 2, which cancels for x below -3, by the complement of erf"""
    return torch.erfc(x * -(0.5**0.5)) / 2
