"""The gradient of each expert's weight and bias: products and sums over the rows that it owns."""

from typing import Any, Literal

import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.gather import gather
from ep_moe.kernels.launch import bound, cdiv
from ep_moe.kernels.tiles import (
    Tile,
    descriptor,
    load_rows,
    programs,
    ragged_descriptor,
    takes_descriptors,
)

BIAS_ROWS, BIAS_COLUMNS = 32, 128


def grouped_wgrad(
    d_y: Tensor,
    x: Tensor,
    offsets: Tensor,
    *,
    arrived_of_packed: Tensor | None = None,
    gathered: Literal["d_y", "x"] | None = None,
    scale: float = 1.0,
    into: Tensor | None = None,
    precision: str = "ieee",
    tile: Tile,
) -> Tensor:
    """scale * sum_s d_y[s] x[s]^T -> (E,N_out,N_in), added to `into` where given; an expert without
    rows gets zeros. d_y (S,N_out) and x (S,N_in); the one that is `gathered` holds arrived rows.
    """
    d_y, x = d_y.contiguous(), x.contiguous()
    experts, m, n = len(offsets) - 1, d_y.shape[1], x.shape[1]
    d_weight = d_y.new_empty(experts, m, n) if into is None else into.contiguous()
    if gathered and tile.copy:
        rows = gather(x if gathered == "x" else d_y, arrived_of_packed, offsets)
        d_y, x = (d_y, rows) if gathered == "x" else (rows, x)
        arrived_of_packed = gathered = None
    if tile.specialize and into is None:
        from ep_moe.kernels import hopper, hopper_wgrad  # for NVIDIA alone

        if hopper.serves(d_y, x, d_weight):
            index = arrived_of_packed if gathered else None
            hopper_wgrad.grouped_wgrad(
                tile,
                d_y,
                x,
                offsets,
                arrived_of_packed=index,
                gathered=gathered,
                scale=scale,
                d_weight=d_weight,
            )
            return d_weight
    operands: dict[str, Any] = {"d_y": d_y, "x": x, "d_weight": d_weight}
    tma = tile.tma and takes_descriptors(*(t for name, t in operands.items() if name != gathered))
    if tma:
        if gathered != "d_y":
            operands["d_y"] = ragged_descriptor(d_y[:, None], tile.block_k, tile.block_m)
        if gathered != "x":
            operands["x"] = ragged_descriptor(x[:, None], tile.block_k, tile.block_n)
    # A sum into wider numbers would need memory for them that the tile's stages have taken.
    stores = tma and tile.tma_store and into is None
    if stores:
        operands["d_weight"] = descriptor(d_weight, 1, tile.block_m, tile.block_n)
    tiles = experts * cdiv(m, tile.block_m) * cdiv(n, tile.block_n)
    constants = {
        "M": m,
        "N": n,
        "GATHERED": gathered,
        "ADD": into is not None,
        "PRECISION": precision,
        "TMA": tma,
        "TMA_STORE": stores,
        **tile.constants,
    }
    grid = (programs(tile, tiles, x.device), 1, 1)
    tensors = (*operands.values(), offsets, arrived_of_packed)
    _grouped_wgrad(grid, tensors, (float(scale), tiles), constants)
    if into is None or into is d_weight:
        return d_weight
    return into.copy_(d_weight)


def grouped_bias_grad(
    d_y: Tensor,
    offsets: Tensor,
    *,
    arrived_of_packed: Tensor | None = None,
    gate_of_packed: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """scale * sum_s gate[s] d_y[s] -> (E,N). d_y (S,N), or arrived rows with the index that packs
    them; gate_of_packed (S,) fp32, None for ones."""
    d_y = d_y.contiguous()
    experts, columns = len(offsets) - 1, d_y.shape[1]
    d_bias = d_y.new_empty(experts, columns)
    grid = (experts, cdiv(columns, BIAS_COLUMNS), 1)
    tensors = (d_y, offsets, arrived_of_packed, gate_of_packed, d_bias)
    constants = {
        "N": columns,
        "ROWS": BIAS_ROWS,
        "COLUMNS": BIAS_COLUMNS,
        "enable_fp_fusion": False,
    }
    _grouped_bias_grad(grid, tensors, (float(scale),), constants)
    return d_bias


@bound
@triton.jit(do_not_specialize=["scale", "tiles"])
def _grouped_wgrad(
    d_y,
    x,
    d_weight,
    offsets,
    arrived_of_packed,
    scale,
    tiles,
    M: tl.constexpr,
    N: tl.constexpr,
    GATHERED: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """d_y (S,1,M), x (S,1,N), d_weight (E,M,N). Rows beyond an expert's end count as zeros in BOTH
    factors, for what stands there may be NaN."""
    DOWN: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert, of_expert = tile // (DOWN * ACROSS), tile % (DOWN * ACROSS)
        first = of_expert // (GROUP_M * ACROSS) * GROUP_M
        of_expert -= first * ACROSS
        shared_by = tl.minimum(DOWN - first, GROUP_M)
        down = (first + of_expert % shared_by) * BLOCK_M
        across = of_expert // shared_by * BLOCK_N
        start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # Indices are fetched a round ahead: rows that wait for theirs would be late themselves.
        arrived = _arrived(arrived_of_packed, start, end, BLOCK_K)
        for row in range(start, end, BLOCK_K):
            if GATHERED == "d_y":
                a = _gathered(d_y, arrived, row, end, down, M, BLOCK_K, BLOCK_M)
            else:
                a = load_rows(d_y, row, end, 0, down, 1, M, BLOCK_K, BLOCK_M, TMA)
            if GATHERED == "x":
                b = _gathered(x, arrived, row, end, across, N, BLOCK_K, BLOCK_N)
            else:
                b = load_rows(x, row, end, 0, across, 1, N, BLOCK_K, BLOCK_N, TMA)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
            arrived = _arrived(arrived_of_packed, row + BLOCK_K, end, BLOCK_K)
        acc *= scale
        i, j = down + tl.arange(0, BLOCK_M), across + tl.arange(0, BLOCK_N)
        if TMA_STORE:
            block = acc.to(d_weight.dtype).reshape(1, BLOCK_M, BLOCK_N)
            d_weight.store([expert, down, across], block)
        else:
            to = d_weight + (tl.cast(expert, tl.int64) * M + i)[:, None] * N + j[None, :]
            mask = (i < M)[:, None] & (j < N)[None, :]
            if ADD:
                acc += tl.load(to, mask=mask, other=0.0).to(tl.float32)
            tl.store(to, acc.to(d_weight.dtype.element_ty), mask=mask)


@triton.jit
def _arrived(arrived_of_packed, row, end, ROWS: tl.constexpr):
    r = row + tl.arange(0, ROWS)
    if arrived_of_packed is None:
        return r
    else:
        return tl.load(arrived_of_packed + r, mask=r < end, other=0)


@triton.jit
def _gathered(
    rows, arrived, row, end, column, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """As `load_rows`, of the rows `arrived`."""
    r, c = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    from_ = rows + arrived.to(tl.int64)[:, None] * N + c[None, :]
    return tl.load(from_, mask=(r < end)[:, None] & (c < N)[None, :], other=0.0)


@bound
@triton.jit(do_not_specialize=["scale"])
def _grouped_bias_grad(
    d_y,
    offsets,
    arrived_of_packed,
    gate_of_packed,
    d_bias,
    scale,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (E, blocks of columns)."""
    expert, column = tl.program_id(0), tl.program_id(1) * COLUMNS
    start, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for row in range(start, end, ROWS):
        arrived = _arrived(arrived_of_packed, row, end, ROWS)
        block = _gathered(d_y, arrived, row, end, column, N, ROWS, COLUMNS)
        block = block.to(tl.float32)
        if gate_of_packed is not None:
            r = row + tl.arange(0, ROWS)
            gate = tl.load(gate_of_packed + r, mask=r < end, other=0.0).to(tl.float32)
            block *= gate[:, None]
        acc += block
    c = column + tl.arange(0, COLUMNS)
    total = tl.sum(acc, axis=0) * scale
    to = d_bias + expert.to(tl.int64) * N + c
    tl.store(to, total.to(d_bias.dtype.element_ty), mask=c < N)
