"""The rules about precision and order that every op follows."""

from typing import Literal

import torch
from torch import Tensor

# fast: whatever order the library's product takes. exact: a row of a product depends on that row
# alone, not on how many others stand beside it.
Numerics = Literal["fast", "exact"]

ROW_BLOCK = 64


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for fp32 and everything narrower; fp64 for fp64, so that finite differences mean
    something."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def matmul(
    a: Tensor, b: Tensor, *, numerics: Numerics, bias: Tensor | None = None, out: Tensor
) -> Tensor:
    """out = a @ b (+ bias, added before the one rounding).  a (M,N), b (N,P), bias (P,), out (M,P)

    A library chooses its order of summation by the shape and the alignment of its operands. So
    exact multiplies blocks of ROW_BLOCK rows, the last one padded with zeros, from one buffer.
    """
    if numerics == "fast":
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    rows, block = a.new_zeros(ROW_BLOCK, a.shape[1]), out.new_empty(ROW_BLOCK, b.shape[1])
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
    out, block = a.new_empty(len(a), dtype=dtype), a.new_zeros(ROW_BLOCK, a.shape[1], dtype=dtype)
    for first in range(0, len(a), ROW_BLOCK):
        rows = slice(first, first + ROW_BLOCK)
        count = len(a[rows])
        block[:count] = a[rows].to(dtype) * b[rows].to(dtype)
        block[count:] = 0.0
        out[rows] = block.sum(dim=1)[:count]
    return out
