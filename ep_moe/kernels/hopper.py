"""The grouped product on Hopper with its work split among warps: four fetch, eight multiply.

What `grouped_gemm` computes for 16-bit numbers, bit for bit. There every warp fetches, multiplies
and stores in turn, and a tile begins with empty buffers; here the next tile's operands arrive while
a result is finished. Written in Gluon, for in plain Triton rows that are gathered cannot be fetched
by warps of their own.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ep_moe.kernels.activation import activate
from ep_moe.kernels.device import architecture
from ep_moe.kernels.launch import bound, next_power_of_2
from ep_moe.kernels.tiles import FAR, Tile, programs, takes_descriptors

# They were renamed after triton 3.6.
async_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
async_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_gather = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)

FETCHING, MULTIPLYING = gl.constexpr(4), gl.constexpr(8)  # warps
BLOCK_K = 64  # of a stage
ARCHITECTURES = ("sm_90", "interpreter")  # the latter where kernels are compiled without a GPU
OPTIONS = {"num_warps": 8, "maxnreg": 168, "enable_fp_fusion": True}
REGISTERS = gl.constexpr(56)  # of a thread that fetches


def serves(*tensors: Tensor | None, depth: int | None = None) -> bool:
    """Numbers of 16 bits that descriptors can address, on Hopper: elsewhere the compiler ends the
    process. depth: of rows that are gathered, which are read in whole blocks."""
    if any(t is not None and architecture(t.device) not in ARCHITECTURES for t in tensors):
        return False
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
    m, n, k, width = tile.block_m, tile.block_n, tile.block_k, result_columns(tile)
    gathered = arrived_of_packed is not None
    if transposed:
        by_depth = descriptor(weight, [1, k, n])
    else:
        by_depth = descriptor(weight.flatten(0, 1), [n, k])
    tensors = (
        x if gathered else descriptor(x, [m, k]),
        by_depth,
        ragged(y, m, width),
        None if pre is None else ragged(pre, m, width),
        offsets,
        arrived_of_packed,
    )
    constants = {
        "EXPERTS": next_power_of_2(experts),
        "K": depth,
        "N": columns,
        "P": halves,
        "TRANSPOSED": transposed,
        "ACTIVATION": activation,
        "GATHER": gathered,
        **tile.blocks,
        "STAGES": tile.stages,
        "WIDTH": width,
        **OPTIONS,
    }
    _grouped_gemm((programs(tile, 1 << 30, y.device), 1, 1), tensors, (experts,), constants)


def result_columns(tile: Tile) -> int:
    """That leave together, through one of two buffers: a fourth stage takes the memory of half."""
    return 128 if tile.stages <= 3 and tile.block_m == 128 else 64


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, block, _layout(len(block)))


def ragged(rows: Tensor, block_rows: int, block_columns: int) -> TensorDescriptor:
    """As `tiles.ragged_descriptor`, always with the halves."""
    row, most = rows.stride(0), 2**31 - 2**16
    return TensorDescriptor(
        rows,
        [most, most, FAR, *rows.shape[1:]],
        [2**34 - row, row, *rows.stride()],
        [1, 1, block_rows, 1, block_columns],
        _layout(5),
    )


@cache  # to make one takes the host as long as the rest of a descriptor
def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, 16, rank)


@bound
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
    STAGES: gl.constexpr,
    WIDTH: gl.constexpr,
):
    dtype: gl.constexpr = weight.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    by_depth: gl.constexpr = [BLOCK_K, BLOCK_N] if TRANSPOSED else [P * BLOCK_N, BLOCK_K]
    a = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], flat)
    b = gl.allocate_shared_memory(dtype, [STAGES, by_depth[0], by_depth[1]], flat)
    out = gl.allocate_shared_memory(
        dtype, [2, 1, 1, BLOCK_M, 1, WIDTH], gl.NVMMASharedLayout(128, 16, 5)
    )
    full, free = start(STAGES, 1 + (32 * FETCHING if GATHER else 0))
    COLUMNS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    e = gl.arange(0, EXPERTS, gl.BlockedLayout([1], [32], [MULTIPLYING], [0]))
    ends = gl.load(offsets + 1 + e, mask=e < experts, other=0)
    starts = gl.load(offsets + e, mask=e < experts, other=0)
    tiles = gl.sum((ends - starts + BLOCK_M - 1) // BLOCK_M, 0) * COLUMNS
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    a, b, out, full, free, y, pre, offsets, tiles, K, N, P, TRANSPOSED, ACTIVATION,
                    GATHER, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
                ),
            ),
            (
                fetch,
                (
                    a, b, full, free, x, weight, offsets, arrived_of_packed, tiles, K, N, P,
                    TRANSPOSED, GATHER, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
                ),
            ),
        ],
        [FETCHING],
        [REGISTERS],
    )  # fmt: skip


@gluon.jit
def place(
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
def fetch(
    a, b, full, free, x, weight, offsets, arrived_of_packed, tiles,
    K: gl.constexpr, N: gl.constexpr, P: gl.constexpr, TRANSPOSED: gl.constexpr,
    GATHER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    BYTES: gl.constexpr = 2 * BLOCK_K * (P * BLOCK_N + (0 if GATHER else BLOCK_M))
    threads: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [FETCHING, 1], [1, 0])
    expert = 0
    first = 0
    round = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, end, row, block = place(
            tile, expert, first, offsets, BLOCK_M, COLUMNS, GROUP_M
        )
        column = block * BLOCK_N
        if GATHER:
            # Beyond the expert's end the last row again: it is not stored.
            packed = gl.minimum(row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, threads)), end - 1)
            arrived = gl.load(arrived_of_packed + packed).to(gl.int64)
            depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, threads))
            rows = x + (arrived * K)[:, None] + depth[None, :]
        for k in range(0, K, BLOCK_K):
            stage = round % STAGES
            bar = full.index(stage)
            mbarrier.wait(free.index(stage), (round // STAGES & 1) ^ 1)
            mbarrier.expect(bar, BYTES)
            columns = b.index(stage)
            if TRANSPOSED:
                columns = columns.reshape([1, BLOCK_K, BLOCK_N])
                async_load(weight, [expert, k, column], bar, columns)
            else:
                # Beyond column N the next rows of the weight: their results are not stored.
                for half in gl.static_range(P):
                    to = columns.slice(half * BLOCK_N, BLOCK_N, dim=0)
                    async_load(weight, [(expert * P + half) * N + column, k], bar, to)
            if GATHER:
                async_gather(a.index(stage), rows)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                rows += BLOCK_K
            else:
                async_load(x, [row, k], bar, a.index(stage))
            round += 1


@gluon.jit
def _multiply(
    a, b, out, full, free, y, pre, offsets, tiles,
    K: gl.constexpr, N: gl.constexpr, P: gl.constexpr, TRANSPOSED: gl.constexpr,
    ACTIVATION: gl.constexpr, GATHER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    WIDE: gl.constexpr = P * BLOCK_N
    HALF: gl.constexpr = WIDE // 2
    accumulator: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [MULTIPLYING, 1], [16, WIDE, 16])
    expert = 0
    first = 0
    round = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, end, row, block = place(
            tile, expert, first, offsets, BLOCK_M, COLUMNS, GROUP_M
        )
        column = block * BLOCK_N
        acc = gl.zeros([BLOCK_M, WIDE], gl.float32, accumulator)
        for k in range(0, K, BLOCK_K):
            stage = round % STAGES
            mbarrier.wait(full.index(stage), round // STAGES & 1)
            if GATHER:  # written by threads, read by the tensor cores
                hopper.fence_async_shared()
            columns = b.index(stage) if TRANSPOSED else b.index(stage).permute((1, 0))
            acc = hopper.warpgroup_mma(a.index(stage), columns, acc, use_acc=k > 0, is_async=True)
            acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(free.index((round + STAGES - 1) % STAGES), pred=k > 0)
            round += 1
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((round + STAGES - 1) % STAGES))
        if ACTIVATION is None:
            result_to(y, acc, out, 0, row, end, 0, column)
        else:
            gate, up = in_two(acc)
            PARTS: gl.constexpr = HALF // out.shape[5]
            if pre is not None:
                result_to(pre, gate, out, 0, row, end, 0, column)
                result_to(pre, up, out, PARTS, row, end, 1, column)
            # A tile counts from 0: only that waits for what the tile before has stored.
            before: gl.constexpr = 0 if pre is None else 2 * PARTS
            h = activate(gate, up, ACTIVATION)
            result_to(y, h, out, before, row, end, 0, column)
    tma.store_wait(0)


@gluon.jit
def start(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """-> barriers of the stages: filled by ARRIVALS, and free again"""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=ARRIVALS)
        mbarrier.init(free.index(stage), count=1)
    hopper.fence_async_shared()
    return full, free


@gluon.jit
def in_two(value):
    """(rows, columns) -> the left and the right half of the columns"""
    rows: gl.constexpr = value.shape[0]
    half: gl.constexpr = value.shape[1] // 2
    return value.reshape([rows, 2, half]).permute((0, 2, 1)).split()


@gluon.jit
def result_to(to, value, out, number: gl.constexpr, row, end, half: gl.constexpr, column):
    """Store as many columns after another as a buffer holds, the first as the tile's result
    `number`, through the two buffers in turn; nothing from row `end` on."""
    COLUMNS: gl.constexpr = out.shape[5]
    if value.shape[1] > COLUMNS:
        left, right = in_two(value)
        PARTS: gl.constexpr = value.shape[1] // (2 * COLUMNS)
        middle = column + value.shape[1] // 2
        result_to(to, left, out, number, row, end, half, column)
        result_to(to, right, out, number + PARTS, row, end, half, middle)
    else:
        far: gl.constexpr = 1 << 30
        buffer = out.index(number % 2)
        tma.store_wait(0 if number == 0 else 1)  # the tile before may have ended with either
        buffer.reshape([value.shape[0], COLUMNS]).store(value.to(to.dtype))
        hopper.fence_async_shared()
        async_store(to, [far, end, far - end + row, half, column], buffer)
