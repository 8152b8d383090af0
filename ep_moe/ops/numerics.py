"""The rules about precision and order that every op follows."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

# fast: whatever order the library's product takes. exact: a row of a product depends on that row
# alone, not on how many others stand beside it.
Numerics = Literal["fast", "exact"]

ROW_BLOCK = 64


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for fp32 and everything narrower; fp64 for fp64, so that finite differences mean
    something."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def served_by_kernel(x: Tensor) -> bool:
    """Whether the Triton kernels work on such rows; what they do not, torch does."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def fp32_precision(device: torch.device, numerics: Numerics) -> Literal["ieee", "tf32"]:
    """How kernels multiply fp32: in TF32 only where torch was told so
    (`torch.set_float32_matmul_precision`), and never in exact."""
    asked = torch.backends.cuda.matmul.fp32_precision if device.type == "cuda" else "ieee"
    return "tf32" if numerics == "fast" and asked == "tf32" else "ieee"


def gated(rows: Tensor, gate: Tensor) -> Tensor:
    """The product in the gate's precision, rounded once.  (S,H), (S,1) -> (S,H)"""
    return (gate * rows).to(rows.dtype)


def matmul(
    a: Tensor, b: Tensor, *, numerics: Numerics, bias: Tensor | None = None, out: Tensor
) -> Tensor:
    """out = a @ b (+ bias, added before the one rounding).  a (M,N), b (N,P), bias (P,), out (M,P)

    A library chooses its order of summation by the shape and the alignment of its operands, and of
    each of their rows. So exact multiplies blocks of ROW_BLOCK rows, the last one padded with
    zeros, from one buffer of aligned rows into another.
    """
    if numerics == "fast":
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    rows, block = _row_block(a, a.shape[1]), _row_block(out, b.shape[1])
    for first in range(0, len(a), ROW_BLOCK):
        part = a[first : first + ROW_BLOCK]
        rows[: len(part)] = part
        rows[len(part) :] = 0.0
        matmul(rows, b, numerics="fast", bias=bias, out=block)
        out[first : first + ROW_BLOCK] = block[: len(part)]
    return out


def row_dot(a: Tensor, b: Tensor, *, numerics: Numerics = "fast") -> Tensor:
    """out[s] = <a[s], b[s]>.  (S,H), (S,H) -> (S,) in the accumulation dtype

    Exact for the reason that `matmul` is: a GPU shares a sum among threads by how many there are.
    """
    dtype = accumulation_dtype(a.dtype)
    if numerics == "fast":
        return (a.to(dtype) * b.to(dtype)).sum(dim=1)
    out = a.new_empty(len(a), dtype=dtype)
    block = _row_block(out, a.shape[1])
    for first in range(0, len(a), ROW_BLOCK):
        rows = slice(first, first + ROW_BLOCK)
        count = len(a[rows])
        block[:count] = a[rows].to(dtype) * b[rows].to(dtype)
        block[count:] = 0.0
        out[rows] = block.sum(dim=1)[:count]
    return out


@contextmanager
def full_fp32(device: torch.device) -> Iterator[None]:
    """Products of fp32 in here are in fp32, not in the TF32 or bf16 that
    `torch.set_float32_matmul_precision`, `allow_tf32` or `torch.backends` ask for.

    The setting is the process's: put nothing but the product in here.
    """
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    asked = backend.matmul.fp32_precision
    if asked not in ("tf32", "bf16"):
        yield
        return
    backend.matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        # "none" follows the wider settings, which may be where it came from.
        backend.matmul.fp32_precision = "none"
        if backend.matmul.fp32_precision != asked:
            backend.matmul.fp32_precision = asked


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), without overflow; rounded once to x's dtype.

    On a CPU torch computes the last elements of a run by other instructions than the rest, and then
    its sigmoid, silu and softplus (and their gradients) differ in the last bit. exp, log1p, erfc
    and logsigmoid do not: what must not depend on where an element stands is made of those.
    """
    if x.is_cuda:
        return torch.sigmoid(x)
    wide = x.to(accumulation_dtype(x.dtype))
    low = wide < 0
    z = torch.where(low, wide, -wide).exp()
    return (torch.where(low, z, 1.0) / (1 + z)).to(x.dtype)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x); fp32 or fp64"""
    return F.silu(x) if x.is_cuda else x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow; fp32 or fp64"""
    return -F.logsigmoid(-x)


def softmax(x: Tensor) -> Tensor:
    """exp(x) / its sum over the last dimension, without overflow; fp32 or fp64

    With more than one thread torch's own, on a CPU, has another order of summation for few rows
    than for many.
    """
    if x.is_cuda:
        return x.softmax(dim=-1)
    z = (x - x.detach().amax(dim=-1, keepdim=True)).exp()
    return z / z.sum(dim=-1, keepdim=True)


def _row_block(like: Tensor, width: int) -> Tensor:
    """(ROW_BLOCK, width) zeros whose rows all start at a multiple of 64 elements"""
    stride = -(-width // 64) * 64
    return like.new_zeros(ROW_BLOCK, stride)[:, :width]
