"""The weight gradient on Hopper with its work split among warps, as in `kernels.hopper`."""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ep_moe.kernels.hopper import (
    FEW,
    GATHERING,
    MANY,
    RESOURCES,
    WARPS,
    async_load,
    barriers,
    gather,
    ragged,
    release,
    result_buffers,
    result_to,
    results,
    rings,
    wait_free,
    wait_full,
)
from ep_moe.kernels.tiles import Tile, programs


def grouped_wgrad(
    tile: Tile,
    d_y: Tensor,
    x: Tensor,
    offsets: Tensor,
    *,
    arrived_of_packed: Tensor | None,
    gathered: str | None,
    scale: float,
    d_weight: Tensor,
) -> None:
    """scale * sum_s d_y[s] x[s]^T into d_weight (E,M,N)."""
    experts, m, n = d_weight.shape
    tiles = experts * triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n)
    _grouped_wgrad[(programs(tile, tiles, x.device),)](
        d_y if gathered == "d_y" else ragged(d_y[:, None], tile.block_k, tile.block_m),
        x if gathered == "x" else ragged(x[:, None], tile.block_k, tile.block_n),
        results(d_weight.view(experts * m, 1, n), tile.block_m),
        offsets,
        arrived_of_packed,
        scale,
        tiles,
        M=m,
        N=n,
        GATHER_D_Y=gathered == "d_y",
        GATHER_X=gathered == "x",
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        GROUP_M=tile.group_m,
        **rings(tile.block_m, tile.block_n, tile.stages),
        **RESOURCES,
    )


@gluon.jit(do_not_specialize=["scale", "tiles"])
def _grouped_wgrad(
    d_y,
    x,
    d_weight,
    offsets,
    arrived_of_packed,
    scale,
    tiles,
    M: gl.constexpr,
    N: gl.constexpr,
    GATHER_D_Y: gl.constexpr,
    GATHER_X: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES_A: gl.constexpr,
    STAGES_B: gl.constexpr,
):
    dtype: gl.constexpr = d_weight.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 5)
    a = gl.allocate_shared_memory(dtype, [STAGES_A, 1, 1, BLOCK_K, 1, BLOCK_M], layout)
    b = gl.allocate_shared_memory(dtype, [STAGES_B, 1, 1, BLOCK_K, 1, BLOCK_N], layout)
    out = result_buffers(dtype, BLOCK_M)
    full_a, free_a = barriers(STAGES_A, 32 * GATHERING if GATHER_D_Y else 1)
    full_b, free_b = barriers(STAGES_B, 32 * GATHERING if GATHER_X else 1)
    gl.warp_specialize(
        [
            (
                _upper,
                (
                    a, full_a, free_a, b, full_b, free_b, out, d_weight, offsets, scale, tiles,
                    M, N, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES_A, STAGES_B,
                ),
            ),
            (
                _lower,
                (
                    a, full_a, free_a, b, full_b, free_b, out, d_weight, offsets, scale, tiles,
                    M, N, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES_A, STAGES_B,
                ),
            ),
            (
                _fetch_x if GATHER_X else _fetch_d_y,
                (
                    b if GATHER_X else a,
                    full_b if GATHER_X else full_a,
                    free_b if GATHER_X else free_a,
                    x if GATHER_X else d_y,
                    offsets, arrived_of_packed, tiles, GATHER_X or GATHER_D_Y,
                    M, N, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES_B if GATHER_X else STAGES_A,
                ),
            ),
            (
                _fetch_d_y if GATHER_X else _fetch_x,
                (
                    a if GATHER_X else b,
                    full_a if GATHER_X else full_b,
                    free_a if GATHER_X else free_b,
                    d_y if GATHER_X else x,
                    offsets, arrived_of_packed, tiles, False,
                    M, N, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES_A if GATHER_X else STAGES_B,
                ),
            ),
        ],
        [WARPS, GATHERING, 1],
        [MANY, FEW, FEW],
    )  # fmt: skip


@gluon.jit
def _place(
    tile, offsets, M: gl.constexpr, N: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """-> (expert, first row, last row + 1, first row and column of the tile of its weight)"""
    DOWN: gl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    ACROSS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    expert = tile // (DOWN * ACROSS)
    tile -= expert * (DOWN * ACROSS)
    group = tile // (GROUP_M * ACROSS) * GROUP_M
    tile -= group * ACROSS
    shared_by = gl.minimum(DOWN - group, GROUP_M)
    down, across = (group + tile % shared_by) * BLOCK_M, tile // shared_by * BLOCK_N
    return expert, gl.load(offsets + expert), gl.load(offsets + expert + 1), down, across


@gluon.jit
def _fetch_d_y(
    a, full, free, d_y, offsets, arrived_of_packed, tiles, GATHER: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    round = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, first, end, down, _ = _place(tile, offsets, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        round = _fetch(
            a, full, free, d_y, arrived_of_packed, first, end, down, round,
            GATHER, M, BLOCK_M, BLOCK_K, STAGES,
        )  # fmt: skip


@gluon.jit
def _fetch_x(
    b, full, free, x, offsets, arrived_of_packed, tiles, GATHER: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    round = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, first, end, _, across = _place(tile, offsets, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        round = _fetch(
            b, full, free, x, arrived_of_packed, first, end, across, round,
            GATHER, N, BLOCK_N, BLOCK_K, STAGES,
        )  # fmt: skip


@gluon.jit
def _fetch(
    ring, full, free, rows, arrived_of_packed, first, end, column, round,
    GATHER: gl.constexpr, COLUMNS: gl.constexpr, WIDTH: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One tile's rows; zeros beyond the expert's last one.  -> the number of the next round"""
    if GATHER:
        along: gl.constexpr = 32 if WIDTH >= 256 else WIDTH // 8  # threads along a row
        threads: gl.constexpr = gl.BlockedLayout(
            [1, 8], [32 // along, along], [GATHERING, 1], [1, 0]
        )
        c = column + gl.arange(0, WIDTH, gl.SliceLayout(0, threads))
        arrived = _arrived(arrived_of_packed, first, end, BLOCK_K, threads)
    far: gl.constexpr = 1 << 30
    for row in range(first, end, BLOCK_K):
        to, bar = ring.index(round % STAGES), full.index(round % STAGES)
        wait_free(free, round, STAGES)
        if GATHER:
            owned = row + gl.arange(0, BLOCK_K, gl.SliceLayout(1, threads)) < end
            from_ = rows + (arrived.to(gl.int64) * COLUMNS)[:, None] + c[None, :]
            # Indices are fetched a round ahead: rows that wait for theirs would be late.
            arrived = _arrived(arrived_of_packed, row + BLOCK_K, end, BLOCK_K, threads)
            mask = owned[:, None] & (c < COLUMNS)[None, :]
            gather(from_, mask, to.reshape([BLOCK_K, WIDTH]), bar)
        else:
            mbarrier.expect(bar, 2 * BLOCK_K * WIDTH)
            async_load(rows, [far, end, far - end + row, 0, column], bar, to)
        round += 1
    return round


@gluon.jit
def _arrived(arrived_of_packed, row, end, ROWS: gl.constexpr, threads: gl.constexpr):
    r = row + gl.arange(0, ROWS, gl.SliceLayout(1, threads))
    return gl.load(arrived_of_packed + r, mask=r < end, other=0)


@gluon.jit
def _upper(
    a, full_a, free_a, b, full_b, free_b, out, d_weight, offsets, scale, tiles,
    M: gl.constexpr, N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES_A: gl.constexpr, STAGES_B: gl.constexpr,
):  # fmt: skip
    _multiply(
        0, a, full_a, free_a, b, full_b, free_b, out, d_weight, offsets, scale, tiles,
        M, N, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES_A, STAGES_B,
    )  # fmt: skip


@gluon.jit
def _lower(
    a, full_a, free_a, b, full_b, free_b, out, d_weight, offsets, scale, tiles,
    M: gl.constexpr, N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES_A: gl.constexpr, STAGES_B: gl.constexpr,
):  # fmt: skip
    _multiply(
        1, a, full_a, free_a, b, full_b, free_b, out, d_weight, offsets, scale, tiles,
        M, N, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES_A, STAGES_B,
    )  # fmt: skip


@gluon.jit
def _multiply(
    HALF: gl.constexpr, a, full_a, free_a, b, full_b, free_b, out, d_weight, offsets, scale, tiles,
    M: gl.constexpr, N: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES_A: gl.constexpr, STAGES_B: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK_M // 2
    gl.static_assert(BLOCK_M == 256 or BLOCK_N >= 128, "results alternate between two buffers")
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    round = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, end, down, across = _place(tile, offsets, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, accumulator)
        for row in range(first, end, BLOCK_K):
            columns = a.index(round % STAGES_A).reshape([BLOCK_K, BLOCK_M])
            columns = columns.slice(HALF * ROWS, ROWS, dim=1).permute((1, 0))
            rows = b.index(round % STAGES_B).reshape([BLOCK_K, BLOCK_N])
            wait_full(full_a, full_b, round, STAGES_A, STAGES_B)
            acc = hopper.warpgroup_mma(columns, rows, acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
            release(free_a, free_b, round - 1, row > first, STAGES_A, STAGES_B)
            round += 1
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        release(free_a, free_b, round - 1, end > first, STAGES_A, STAGES_B)
        row_of_all = expert * M + down + HALF * ROWS
        result_to(d_weight, acc * scale, out, HALF, 0, row_of_all, (expert + 1) * M, 0, across)
    tma.store_wait(0)
