"""The weight gradient on Hopper with its work split among warps, as in `kernels.hopper`."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ep_moe.kernels.hopper import (
    FETCHING,
    MULTIPLYING,
    OPTIONS,
    async_gather,
    async_load,
    ragged,
    result_columns,
    result_to,
    start,
)
from ep_moe.kernels.launch import bound, cdiv
from ep_moe.kernels.tiles import Tile, programs

REGISTERS = gl.constexpr(88)  # of a thread that fetches: indices, and as many addresses


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
    tiles = experts * cdiv(m, tile.block_m) * cdiv(n, tile.block_n)
    tensors = (
        d_y if gathered == "d_y" else ragged(d_y[:, None], tile.block_k, tile.block_m),
        x if gathered == "x" else ragged(x[:, None], tile.block_k, tile.block_n),
        ragged(d_weight.view(experts * m, 1, n), tile.block_m, result_columns(tile)),
        offsets,
        arrived_of_packed,
    )
    constants = {
        "M": m,
        "N": n,
        "GATHERED": gathered,
        **tile.blocks,
        "STAGES": tile.stages,
        "WIDTH": result_columns(tile),
        **OPTIONS,
    }
    grid = (programs(tile, tiles, x.device), 1, 1)
    _grouped_wgrad(grid, tensors, (float(scale), tiles), constants)


@bound
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
    GATHERED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
    WIDTH: gl.constexpr,
):
    dtype: gl.constexpr = d_weight.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 5)
    a = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, 1, BLOCK_M], layout)
    b = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, 1, BLOCK_N], layout)
    out = gl.allocate_shared_memory(
        dtype, [2, 1, 1, BLOCK_M, 1, WIDTH], gl.NVMMASharedLayout(128, 16, 5)
    )
    full, free = start(STAGES, 1 if GATHERED is None else 1 + 32 * FETCHING)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    a, b, out, full, free, d_weight, offsets, scale, tiles, M, N, GATHERED,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
                ),
            ),
            (
                _fetch,
                (
                    a, b, full, free, d_y, x, offsets, arrived_of_packed, tiles, M, N, GATHERED,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
                ),
            ),
        ],
        [FETCHING],
        [REGISTERS],
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
def _fetch(
    a, b, full, free, d_y, x, offsets, arrived_of_packed, tiles,
    M: gl.constexpr, N: gl.constexpr, GATHERED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Zeros beyond an expert's last row."""
    PACKED_M: gl.constexpr = 0 if GATHERED == "d_y" else BLOCK_M
    PACKED_N: gl.constexpr = 0 if GATHERED == "x" else BLOCK_N
    WIDTH: gl.constexpr = BLOCK_M if GATHERED == "d_y" else BLOCK_N
    COLUMNS: gl.constexpr = M if GATHERED == "d_y" else N
    ALONG: gl.constexpr = 32 if WIDTH >= 256 else WIDTH // 8  # threads along a row
    threads: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ALONG, ALONG], [FETCHING, 1], [1, 0])
    far: gl.constexpr = 1 << 30
    round = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _, first, end, down, across = _place(tile, offsets, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        if GATHERED is not None:
            source = d_y if GATHERED == "d_y" else x
            column = down if GATHERED == "d_y" else across
            c = column + gl.arange(0, WIDTH, gl.SliceLayout(0, threads))
            arrived = _arrived(arrived_of_packed, first, end, BLOCK_K, threads)
        for row in range(first, end, BLOCK_K):
            stage = round % STAGES
            bar = full.index(stage)
            if GATHERED is not None:
                rows = source + (arrived.to(gl.int64) * COLUMNS)[:, None] + c[None, :]
                owned = row + gl.arange(0, BLOCK_K, gl.SliceLayout(1, threads)) < end
                # Indices are fetched a round ahead: rows that wait for theirs would be late.
                arrived = _arrived(arrived_of_packed, row + BLOCK_K, end, BLOCK_K, threads)
            mbarrier.wait(free.index(stage), (round // STAGES & 1) ^ 1)
            mbarrier.expect(bar, 2 * BLOCK_K * (PACKED_M + PACKED_N))
            if GATHERED != "d_y":
                async_load(d_y, [far, end, far - end + row, 0, down], bar, a.index(stage))
            if GATHERED != "x":
                async_load(x, [far, end, far - end + row, 0, across], bar, b.index(stage))
            if GATHERED is not None:
                to = a.index(stage) if GATHERED == "d_y" else b.index(stage)
                mask = owned[:, None] & (c < COLUMNS)[None, :]
                async_gather(to.reshape([BLOCK_K, WIDTH]), rows, mask=mask)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            round += 1


@gluon.jit
def _arrived(arrived_of_packed, row, end, ROWS: gl.constexpr, threads: gl.constexpr):
    r = row + gl.arange(0, ROWS, gl.SliceLayout(1, threads))
    return gl.load(arrived_of_packed + r, mask=r < end, other=0)


@gluon.jit
def _multiply(
    a, b, out, full, free, d_weight, offsets, scale, tiles,
    M: gl.constexpr, N: gl.constexpr, GATHERED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    accumulator: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [MULTIPLYING, 1], [16, BLOCK_N, 16]
    )
    round = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, end, down, across = _place(tile, offsets, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, accumulator)
        for row in range(first, end, BLOCK_K):
            stage = round % STAGES
            mbarrier.wait(full.index(stage), round // STAGES & 1)
            if GATHERED is not None:  # written by threads, read by the tensor cores
                hopper.fence_async_shared()
            columns = a.index(stage).reshape([BLOCK_K, BLOCK_M]).permute((1, 0))
            rows = b.index(stage).reshape([BLOCK_K, BLOCK_N])
            acc = hopper.warpgroup_mma(columns, rows, acc, is_async=True)
            acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(free.index((round + STAGES - 1) % STAGES), pred=row > first)
            round += 1
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((round + STAGES - 1) % STAGES), pred=end > first)
        row, end = expert * M + down, (expert + 1) * M
        result_to(d_weight, acc * scale, out, 0, row, end, 0, across)
    tma.store_wait(0)
