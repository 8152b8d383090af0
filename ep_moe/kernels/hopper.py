"""The grouped product on Hopper with its work split among warps.

What `grouped_gemm` computes for 16-bit numbers, bit for bit. There all warps fetch, multiply and
store in turn, and a tile begins with empty buffers. Here some warps only fetch, so that the next
tile's operands arrive while a result is finished, and two groups of four warps multiply one half of
the tile's rows each: while one finishes its result the other has the tensor cores for itself, and
a half without rows is left out. Written in Gluon, for in plain Triton warps cannot be told apart.

Each operand has a ring of buffers of its own, for rows that are gathered take longer to come than
those that a descriptor fetches.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ep_moe.kernels.activation import activate
from ep_moe.kernels.tiles import FAR, Tile, programs, takes_descriptors

# They were renamed after triton 3.6.
async_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
async_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
async_gather = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)

BLOCK_K = 64
WARPS, GATHERING = gl.constexpr(4), gl.constexpr(2)  # of a group that multiplies; that gather
# Registers of a thread that multiplies (the first group has what is left) and of one that fetches.
MANY, FEW = gl.constexpr(208), gl.constexpr(88)
RESOURCES = {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}  # of the launch


def serves(*tensors: Tensor | None, depth: int | None = None) -> bool:
    """Numbers of 16 bits that descriptors can address. depth: of rows that are gathered, which are
    read in whole blocks."""
    half = all(t is None or t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
    return half and takes_descriptors(*tensors) and (depth or 0) % BLOCK_K == 0


def grouped_gemm(
    tile: Tile,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    arrived_of_packed: Tensor | None,
    y: Tensor,
    pre: Tensor | None,
    transposed: bool,
    activation: str | None,
) -> None:
    """x (A or S,K) by weight (E,P N,K), transposed (E,K,N), into y (S,1,N) and, with an activation
    behind the product, pre (S,P,N)."""
    columns, experts = y.shape[2], len(weight)
    halves = 1 if transposed else weight.shape[1] // columns
    depth = weight.shape[1 if transposed else 2]
    m, n, k = tile.block_m, tile.block_n, tile.block_k
    gathered = arrived_of_packed is not None
    if transposed:
        by_depth = descriptor(weight, [1, k, n])
    else:
        by_depth = descriptor(weight.flatten(0, 1), [n, k])
    _grouped_gemm[(programs(tile, 1 << 30, y.device),)](
        x if gathered else descriptor(x, [m, k]),
        by_depth,
        results(y, m),
        None if pre is None else results(pre, m),
        offsets,
        arrived_of_packed,
        experts,
        EXPERTS=triton.next_power_of_2(experts),
        K=depth,
        N=columns,
        P=halves,
        TRANSPOSED=transposed,
        ACTIVATION=activation,
        GATHER=gathered,
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_K=k,
        GROUP_M=tile.group_m,
        **rings(m, n * halves, tile.stages),
        **RESOURCES,
    )


def rings(m: int, n: int, stages: int) -> dict[str, int]:
    """Buffers of the two operands: `stages` of the larger, and of the smaller, of half its size,
    what remains of 192 KiB."""
    both = (stages, 12 - 2 * stages)
    return dict(zip(("STAGES_A", "STAGES_B"), both if m > n else both[::-1], strict=True))


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout(128, 16, len(block)))


def ragged(rows: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """As `tiles.ragged_descriptor`, always with the halves."""
    row, most = rows.stride(0), 2**31 - 2**16
    return TensorDescriptor(
        rows,
        [most, most, FAR, *rows.shape[1:]],
        [2**34 - row, row, *rows.stride()],
        [1, 1, block_rows, 1, block_columns],
        gl.NVMMASharedLayout(128, 16, 5),
    )


def results(rows: Tensor, block_m: int) -> TensorDescriptor:
    """They leave by 64 columns of one half of a tile's rows."""
    return ragged(rows, block_m // 2, 64)


@gluon.jit(do_not_specialize=["experts"])
def _grouped_gemm(
    x,
    weight,
    y,
    pre,
    offsets,
    arrived_of_packed,
    experts,
    EXPERTS: gl.constexpr,
    K: gl.constexpr,
    N: gl.constexpr,
    P: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATHER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES_A: gl.constexpr,
    STAGES_B: gl.constexpr,
):
    dtype: gl.constexpr = weight.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    by_depth: gl.constexpr = [BLOCK_K, BLOCK_N] if TRANSPOSED else [P * BLOCK_N, BLOCK_K]
    a = gl.allocate_shared_memory(dtype, [STAGES_A, BLOCK_M, BLOCK_K], flat)
    b = gl.allocate_shared_memory(dtype, [STAGES_B, by_depth[0], by_depth[1]], flat)
    out = result_buffers(dtype, BLOCK_M)
    full_a, free_a = barriers(STAGES_A, 32 * GATHERING if GATHER else 1)
    full_b, free_b = barriers(STAGES_B, 1)
    COLUMNS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    e = gl.arange(0, EXPERTS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    ends = gl.load(offsets + 1 + e, mask=e < experts, other=0)
    starts = gl.load(offsets + e, mask=e < experts, other=0)
    tiles = gl.sum((ends - starts + BLOCK_M - 1) // BLOCK_M, 0) * COLUMNS
    gl.warp_specialize(
        [
            (
                _upper,
                (
                    a, full_a, free_a, b, full_b, free_b, out, y, pre, offsets, tiles,
                    K, N, P, TRANSPOSED, ACTIVATION,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES_A, STAGES_B,
                ),
            ),
            (
                _lower,
                (
                    a, full_a, free_a, b, full_b, free_b, out, y, pre, offsets, tiles,
                    K, N, P, TRANSPOSED, ACTIVATION,
                    BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES_A, STAGES_B,
                ),
            ),
            (
                _fetch_rows,
                (
                    a, full_a, free_a, x, offsets, arrived_of_packed, tiles,
                    K, N, GATHER, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES_A,
                ),
            ),
            (
                _fetch_weight,
                (
                    b, full_b, free_b, weight, offsets, tiles,
                    K, N, P, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES_B,
                ),
            ),
        ],
        [WARPS, GATHERING, 1],
        [MANY, FEW, FEW],
    )  # fmt: skip


@gluon.jit
def _place(
    tile,
    expert,
    first,
    offsets,
    BLOCK_M: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP_M: gl.constexpr,
):
    """-> (expert, its first tile, its last row + 1, first row of the tile, its block of columns)

    expert and its first tile: of a tile before this one."""
    start, end = gl.load(offsets + expert), gl.load(offsets + expert + 1)
    blocks = (end - start + BLOCK_M - 1) // BLOCK_M
    while tile >= first + blocks * COLUMNS:
        first += blocks * COLUMNS
        expert += 1
        start = end
        end = gl.load(offsets + expert + 1)
        blocks = (end - start + BLOCK_M - 1) // BLOCK_M
    tile -= first
    group = tile // (GROUP_M * COLUMNS) * GROUP_M
    tile -= group * COLUMNS
    shared_by = gl.minimum(blocks - group, GROUP_M)
    return expert, first, end, start + (group + tile % shared_by) * BLOCK_M, tile // shared_by


@gluon.jit
def _fetch_rows(
    a, full, free, x, offsets, arrived_of_packed, tiles,
    K: gl.constexpr, N: gl.constexpr, GATHER: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    threads: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [GATHERING, 1], [1, 0])
    expert = 0
    first = 0
    round = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, end, row, _ = _place(tile, expert, first, offsets, BLOCK_M, COLUMNS, GROUP_M)
        if GATHER:
            # Beyond the expert's end the last row again: it is not stored.
            packed = gl.minimum(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, threads)), end - 1)
            arrived = gl.load(arrived_of_packed + packed).to(gl.int64)
            depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, threads))
            rows = x + (arrived * K)[:, None] + depth[None, :]
        for k in range(0, K, BLOCK_K):
            stage = round % STAGES
            wait_free(free, round, STAGES)
            if GATHER:
                gather(rows, None, a.index(stage), full.index(stage))
                rows += BLOCK_K
            else:
                mbarrier.expect(full.index(stage), 2 * BLOCK_M * BLOCK_K)
                async_load(x, [row, k], full.index(stage), a.index(stage))
            round += 1


@gluon.jit
def _fetch_weight(
    b, full, free, weight, offsets, tiles,
    K: gl.constexpr, N: gl.constexpr, P: gl.constexpr, TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    expert = 0
    first = 0
    round = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, _, _, block = _place(tile, expert, first, offsets, BLOCK_M, COLUMNS, GROUP_M)
        column = block * BLOCK_N
        for k in range(0, K, BLOCK_K):
            columns, bar = b.index(round % STAGES), full.index(round % STAGES)
            wait_free(free, round, STAGES)
            mbarrier.expect(bar, 2 * P * BLOCK_N * BLOCK_K)
            if TRANSPOSED:
                columns = columns.reshape([1, BLOCK_K, BLOCK_N])
                async_load(weight, [expert, k, column], bar, columns)
            else:
                # Beyond column N the next rows of the weight: their results are not stored.
                for half in gl.static_range(P):
                    to = columns.slice(half * BLOCK_N, BLOCK_N, dim=0)
                    async_load(weight, [(expert * P + half) * N + column, k], bar, to)
            round += 1


@gluon.jit
def _upper(
    a, full_a, free_a, b, full_b, free_b, out, y, pre, offsets, tiles,
    K: gl.constexpr, N: gl.constexpr, P: gl.constexpr,
    TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES_A: gl.constexpr, STAGES_B: gl.constexpr,
):  # fmt: skip
    _multiply(
        0, a, full_a, free_a, b, full_b, free_b, out, y, pre, offsets, tiles,
        K, N, P, TRANSPOSED, ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES_A, STAGES_B,
    )  # fmt: skip


@gluon.jit
def _lower(
    a, full_a, free_a, b, full_b, free_b, out, y, pre, offsets, tiles,
    K: gl.constexpr, N: gl.constexpr, P: gl.constexpr,
    TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES_A: gl.constexpr, STAGES_B: gl.constexpr,
):  # fmt: skip
    _multiply(
        1, a, full_a, free_a, b, full_b, free_b, out, y, pre, offsets, tiles,
        K, N, P, TRANSPOSED, ACTIVATION, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES_A, STAGES_B,
    )  # fmt: skip


@gluon.jit
def _multiply(
    HALF: gl.constexpr, a, full_a, free_a, b, full_b, free_b, out, y, pre, offsets, tiles,
    K: gl.constexpr, N: gl.constexpr, P: gl.constexpr,
    TRANSPOSED: gl.constexpr, ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES_A: gl.constexpr, STAGES_B: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    ROWS: gl.constexpr = BLOCK_M // 2
    WIDE: gl.constexpr = P * BLOCK_N
    gl.static_assert(BLOCK_M == 256 or BLOCK_N >= 128, "results alternate between two buffers")
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDE, 16])
    expert = 0
    first = 0
    round = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, end, row, block = _place(
            tile, expert, first, offsets, BLOCK_M, COLUMNS, GROUP_M
        )
        row += HALF * ROWS
        column = block * BLOCK_N
        if row < end:
            acc = gl.zeros([ROWS, WIDE], gl.float32, accumulator)
            for k in range(0, K, BLOCK_K):
                rows = a.index(round % STAGES_A).slice(HALF * ROWS, ROWS, dim=0)
                columns = b.index(round % STAGES_B)
                columns = columns if TRANSPOSED else columns.permute((1, 0))
                wait_full(full_a, full_b, round, STAGES_A, STAGES_B)
                acc = hopper.warpgroup_mma(rows, columns, acc, use_acc=k > 0, is_async=True)
                acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
                release(free_a, free_b, round - 1, k > 0, STAGES_A, STAGES_B)
                round += 1
            acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
            release(free_a, free_b, round - 1, True, STAGES_A, STAGES_B)
            if ACTIVATION is None:
                result_to(y, acc, out, HALF, 0, row, end, 0, column)
            else:
                gate, up = in_two(acc)
                if pre is not None:
                    result_to(pre, gate, out, HALF, 0, row, end, 0, column)
                    result_to(pre, up, out, HALF, 0, row, end, 1, column)
                result_to(y, activate(gate, up, ACTIVATION), out, HALF, 0, row, end, 0, column)
        else:
            for _ in range(0, K, BLOCK_K):
                wait_full(full_a, full_b, round, STAGES_A, STAGES_B)
                release(free_a, free_b, round, True, STAGES_A, STAGES_B)
                round += 1
    tma.store_wait(0)


@gluon.jit
def barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """-> of a ring's buffers: filled by ARRIVALS, and read by both groups"""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(free.index(stage), count=2)
    hopper.fence_async_shared()
    return full, free


@gluon.jit
def wait_free(free, round, STAGES: gl.constexpr):
    mbarrier.wait(free.index(round % STAGES), (round // STAGES & 1) ^ 1)


@gluon.jit
def wait_full(full_a, full_b, round, STAGES_A: gl.constexpr, STAGES_B: gl.constexpr):
    mbarrier.wait(full_a.index(round % STAGES_A), round // STAGES_A & 1)
    mbarrier.wait(full_b.index(round % STAGES_B), round // STAGES_B & 1)


@gluon.jit
def release(free_a, free_b, round, if_, STAGES_A: gl.constexpr, STAGES_B: gl.constexpr):
    """This group has read the buffers of a round."""
    round = gl.maximum(round, 0)
    mbarrier.arrive(free_a.index(round % STAGES_A), pred=if_)
    mbarrier.arrive(free_b.index(round % STAGES_B), pred=if_)


@gluon.jit
def gather(rows, mask, to, bar):
    """Pointers to rows -> shared memory; each thread arrives at the barrier when its copies have.

    Tensor cores then read what threads have written without a fence between the two, as they do in
    the pipelines that Triton makes of loads."""
    async_gather(to, rows, mask=mask)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def result_buffers(dtype: gl.constexpr, BLOCK_M: gl.constexpr):
    """32 KiB: of each half of the rows two, or one of twice the size."""
    number: gl.constexpr = 512 // BLOCK_M
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 5)
    return gl.allocate_shared_memory(dtype, [number, 1, 1, BLOCK_M // 2, 1, 64], layout)


@gluon.jit
def in_two(value):
    """(rows, columns) -> the left and the right half of the columns"""
    rows: gl.constexpr = value.shape[0]
    half: gl.constexpr = value.shape[1] // 2
    return value.reshape([rows, 2, half]).permute((0, 2, 1)).split()


@gluon.jit
def result_to(
    to, value, out, HALF: gl.constexpr, number: gl.constexpr, row, end, half: gl.constexpr, column
):
    """Store 64 columns after another through this half's buffers, nothing from row `end` on."""
    if value.shape[1] > 64:
        left, right = in_two(value)
        result_to(to, left, out, HALF, 0, row, end, half, column)
        result_to(to, right, out, HALF, 1, row, end, half, column + value.shape[1] // 2)
    else:
        BUFFERS: gl.constexpr = out.shape[0] // 2
        far: gl.constexpr = 1 << 30
        buffer = out.index(HALF * BUFFERS + number % BUFFERS)
        tma.store_wait(BUFFERS - 1)
        buffer.reshape([value.shape[0], 64]).store(value.to(to.dtype))
        hopper.fence_async_shared()
        async_store(to, [far, end, far - end + row, half, column], buffer)
