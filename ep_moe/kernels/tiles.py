"""What the grouped products share: the shape of a tile, who works on which, how rows are addressed.

A product is cut into tiles of BLOCK_M packed rows of ONE expert by BLOCK_N columns. A fixed number
of programs takes them in turn, and each finds its tile from `offsets`, on the device. Packed rows
are seen as (S, halves, N): 2 halves where gate and up stand side by side, else 1.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_moe.kernels.device import left, multiprocessors

FAR = 1 << 30  # more rows than any buffer


class Tile(NamedTuple):
    """The shape of a tile and how it is run. A gated product reads two columns of the weight for
    each of the `block_n` that it writes. `per_sm`: programs for one multiprocessor; where these are
    more than run at once, the GPU starts one when another ends."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 16  # row blocks that take turns on the same columns of the weight
    per_sm: int = 1
    tma: bool = False  # tensor descriptors: Hopper and later, rows of a multiple of 16 bytes
    tma_store: bool = True  # results too: no wait for them, but memory that a stage could have
    copy: bool = False  # gather rows into a packed copy first, for descriptors to read
    flatten: bool = False  # fetch the next tile's operands before this one is stored
    step: int = 32  # columns that pass through the activation's gradient at a time; 0: afterwards
    swap: bool = False  # multiply the transposes: for fewer rows than a tensor core wants
    specialize: bool = False  # warps of their own fetch (`kernels.hopper`), where that can be had

    @property
    def blocks(self) -> dict[str, int]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP_M": self.group_m,
        }

    @property
    def constants(self) -> dict[str, int | bool]:
        warps = {"num_warps": self.warps, "num_stages": self.stages}
        return {**self.blocks, **warps, "enable_fp_fusion": True}


def programs(tile: Tile, tiles: int, device: torch.device) -> int:
    """At most one a tile, at least one, and none on multiprocessors that are left to others."""
    mine = max(1, multiprocessors(device) - left())
    return min(tiles, tile.per_sm * mine)


def takes_descriptors(*tensors: Tensor | None) -> bool:
    """A tensor descriptor can address them: aligned, rows of a multiple of 16 bytes, not empty."""
    return all(
        t is None
        or (t.numel() > 0 and t.data_ptr() % 16 == 0 and t.shape[-1] * t.element_size() % 16 == 0)
        for t in tensors
    )


def descriptor(tensor: Tensor, *block: int) -> Any:
    """Of a contiguous tensor: reads beyond a dimension give zeros, writes there are left out."""
    return TensorDescriptor.from_tensor(tensor, list(block))


def ragged_descriptor(rows: Tensor, block_rows: int, block_columns: int) -> Any:
    """Of contiguous (S,P,N), for `load_rows` and `store_rows`, which may end at any row.

    Row r of the rows up to `end` is addressed as (FAR, end, FAR - end + r): in 64-bit arithmetic
    that wraps around, the first stride takes FAR rows back, and the third index leaves its bound
    FAR just where r = end. The trick is that of triton.tools.ragged_tma.
    """
    if rows.shape[1] == 1:
        rows = rows[:, 0]
    row, most = rows.stride(0), 2**31 - 2**16
    shape = [most, most, FAR, *rows.shape[1:]]
    strides = [2**34 - row, row, *rows.stride()]
    block = [1, 1, block_rows, *[1] * (rows.ndim - 2), block_columns]
    return TensorDescriptor(rows, shape, strides, block)


@triton.jit
def tile_ends(offsets, experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS):
    """(EXPERTS,): how many tiles the experts up to each one have, COLUMNS for BLOCK_M rows."""
    expert = tl.arange(0, EXPERTS)
    start = tl.load(offsets + expert, mask=expert < experts, other=0)
    end = tl.load(offsets + expert + 1, mask=expert < experts, other=0)
    return tl.cumsum((end - start + BLOCK_M - 1) // BLOCK_M * COLUMNS)


@triton.jit
def place_of(tile, ends, offsets, BLOCK_M: tl.constexpr, COLUMNS, GROUP_M: tl.constexpr):
    """-> (expert, its last row + 1, first row, number of the column block)"""
    expert = tl.sum((ends <= tile).to(tl.int32))
    tile -= tl.max(tl.where(ends <= tile, ends, 0))
    start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    row_blocks = (end - start + BLOCK_M - 1) // BLOCK_M
    first = tile // (GROUP_M * COLUMNS) * GROUP_M
    tile -= first * COLUMNS
    shared_by = tl.minimum(row_blocks - first, GROUP_M)
    return expert, end, start + (first + tile % shared_by) * BLOCK_M, tile // shared_by


@triton.jit
def load_rows(
    rows,
    row,
    end,
    half: tl.constexpr,
    column,
    P: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """(ROWS, COLUMNS) of one half of (S,P,N); zeros from row `end` and column N on."""
    if TMA:
        far: tl.constexpr = 1 << 30
        if P == 1:
            return rows.load([far, end, far - end + row, column]).reshape(ROWS, COLUMNS)
        else:
            return rows.load([far, end, far - end + row, half, column]).reshape(ROWS, COLUMNS)
    else:
        r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        from_ = rows + r.to(tl.int64)[:, None] * (P * N) + (half * N + c)[None, :]
        return tl.load(from_, mask=(r < end)[:, None] & (c < N)[None, :], other=0.0)


@triton.jit
def store_rows(
    rows,
    value,
    row,
    end,
    half: tl.constexpr,
    column,
    P: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TMA: tl.constexpr,
):
    """The adjoint of `load_rows`, in the dtype of `rows`; nothing beyond row `end` and column N."""
    if TMA:
        far: tl.constexpr = 1 << 30
        if P == 1:
            block = value.to(rows.dtype).reshape(1, 1, ROWS, COLUMNS)
            rows.store([far, end, far - end + row, column], block)
        else:
            block = value.to(rows.dtype).reshape(1, 1, ROWS, 1, COLUMNS)
            rows.store([far, end, far - end + row, half, column], block)
    else:
        r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        to = rows + r.to(tl.int64)[:, None] * (P * N) + (half * N + c)[None, :]
        mask = (r < end)[:, None] & (c < N)[None, :]
        tl.store(to, value.to(rows.dtype.element_ty), mask=mask)
