"""Activations of an expert inside a kernel, by the names of `ops.ACTIVATIONS`, in fp32.

`up` is all there is where an activation has no gate half; it then ignores `gate`.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

GATED = {"swiglu": True, "geglu": True, "relu2": False, "swiglu_clamped": True}

_LOG2_E = tl.constexpr(1.4426950408889634)
_SLOPE, _LIMIT = tl.constexpr(1.702), tl.constexpr(7.0)
_ROOT_HALF, _PDF_AT_0 = tl.constexpr(0.5**0.5), tl.constexpr(0.3989422804014327)


@triton.jit
def activate(gate, up, NAME: tl.constexpr):
    """-> h"""
    if NAME == "swiglu":
        return gate * _sigmoid(gate) * up
    elif NAME == "geglu":
        return gate * _normal_cdf(gate) * up
    elif NAME == "swiglu_clamped":
        g, u = _at_most(gate), -_at_most(-_at_most(up))
        return g * _sigmoid(g * _SLOPE) * (u + 1)
    else:
        tl.static_assert(NAME == "relu2")
        return tl.where(up < 0, 0.0, up * up)


@triton.jit
def slopes(gate, up, NAME: tl.constexpr):
    """-> d_h/d_gate, d_h/d_up"""
    if NAME == "swiglu":
        sigma = _sigmoid(gate)
        h_gate = gate * sigma
        return up * (sigma + h_gate * (1 - sigma)), h_gate
    elif NAME == "geglu":
        cdf = _normal_cdf(gate)
        pdf = tl.exp(-0.5 * gate * gate) * _PDF_AT_0
        return up * (cdf + gate * pdf), gate * cdf
    elif NAME == "swiglu_clamped":
        g, u = _at_most(gate), -_at_most(-_at_most(up))
        sigma = _sigmoid(g * _SLOPE)
        by_gate = (u + 1) * sigma * (1 + g * _SLOPE * (1 - sigma))
        return (
            tl.where(gate > _LIMIT, 0.0, by_gate),
            tl.where(tl.abs(up) > _LIMIT, 0.0, g * sigma),
        )
    else:
        tl.static_assert(NAME == "relu2")
        return 0 * up, tl.where(up < 0, 0.0, 2 * up)


@triton.jit
def _sigmoid(x):
    """Without the steps by which exp and / keep denormal numbers: on NVIDIA 4 instructions for 11,
    of a third of those behind a gated product. Below x = -88 it is 0."""
    if is_cuda():
        z = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -_LOG2_E], tl.float32, True, 1
        )
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + z], tl.float32, True, 1
        )
    else:
        return tl.sigmoid(x)


@triton.jit
def _at_most(x):
    return tl.where(x > _LIMIT, _LIMIT, x)  # NaN stays, as it would not in tl.minimum


@triton.jit
def _normal_cdf(x):
    return 0.5 + 0.5 * tl.erf(x * _ROOT_HALF)
