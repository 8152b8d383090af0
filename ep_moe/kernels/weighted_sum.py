"""Sum the packed rows of each arrived row, weighted by its gates; and the small sums beside it.

Products are rounded before they are added, as torch does: the memory is the bound anyway.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.launch import bound, cdiv, next_power_of_2

COLUMNS = 2048
SLOTS = 256


def weighted_sum(y: Tensor, gate_weights: Tensor | None, packed_of_arrived: Tensor) -> Tensor:
    """y (S,H), gate_weights (A,K) or None for ones, packed_of_arrived (A,K) int32, -1 = none ->
    (A,H), added in k order in fp32."""
    y, packed_of_arrived = y.contiguous(), packed_of_arrived.contiguous()
    rows, top_k = packed_of_arrived.shape
    width = y.shape[1]
    out = y.new_empty(rows, width)
    columns = min(COLUMNS, next_power_of_2(width))
    if rows:
        gates = None if gate_weights is None else gate_weights.contiguous()
        warps = max(1, columns * y.element_size() // 512)
        constants = {"H": width, "K": top_k, "COLUMNS": columns}
        options = {"num_warps": warps, "enable_fp_fusion": False}
        grid = (rows, cdiv(width, columns), 1)
        _weighted_sum(grid, (y, gates, packed_of_arrived, out), (), constants | options)
    return out


def sum_parts(parts: Tensor, packed_of_arrived: Tensor) -> Tensor:
    """parts (blocks,S) fp32 -> (A,K) fp32: for each choice the sum over the blocks of its packed
    row, in order; 0 where it has none."""
    packed_of_arrived = packed_of_arrived.contiguous()
    out = torch.empty_like(packed_of_arrived, dtype=torch.float32)
    slots = packed_of_arrived.numel()
    if slots:
        blocks, stride = parts.shape
        tensors, integers = (parts, packed_of_arrived, out), (slots, stride, blocks)
        _sum_parts((cdiv(slots, SLOTS), 1, 1), tensors, integers, {"SLOTS": SLOTS})
    return out


@bound
@triton.jit
def _weighted_sum(
    y,
    gate_weights,
    packed_of_arrived,
    out,
    H: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (A, blocks of columns).

    K=2, packed_of_arrived=[[1,-1]], gate_weights=[[.5,nan]], y=[[10],[20]]  ->  out=[[10]]
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(K):
        packed = tl.load(packed_of_arrived + row * K + k).to(tl.int64)
        here = (c < H) & (tl.zeros_like(c) <= packed)
        value = tl.load(y + packed * H + c, mask=here, other=0.0).to(tl.float32)
        if gate_weights is not None:  # beside an absent choice it is garbage
            gate = tl.load(gate_weights + row * K + k).to(tl.float32)
            value *= tl.where(packed >= 0, gate, 0.0)
        acc += value
    tl.store(out + row * H + c, acc.to(out.dtype.element_ty), mask=c < H)


@bound
@triton.jit(do_not_specialize=["slots", "stride", "blocks"])
def _sum_parts(parts, packed_of_arrived, out, slots, stride, blocks, SLOTS: tl.constexpr):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    packed = tl.load(packed_of_arrived + slot, mask=slot < slots, other=-1).to(tl.int64)
    acc = tl.zeros([SLOTS], tl.float32)
    for block in range(blocks):
        acc += tl.load(parts + block * stride.to(tl.int64) + packed, mask=packed >= 0, other=0.0)
    tl.store(out + slot, acc, mask=slot < slots)
