"""The gradient through the activation behind its product, on Hopper: warps that fetch and warps
that multiply, as in `kernels.hopper`. The pre-activation comes 64 columns at a time, each part
while the one before is worked on."""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ep_moe.kernels.activation import activate, slopes
from ep_moe.kernels.hopper import (
    FETCHING,
    MULTIPLYING,
    OPTIONS,
    async_load,
    async_store,
    barrier,
    descriptor,
    fetch,
    in_two,
    place,
    ragged,
    start,
)
from ep_moe.kernels.launch import bound, next_power_of_2
from ep_moe.kernels.tiles import Tile, programs

STAGES = 3  # beside two buffers of the pre-activation and three of results
REGISTERS = gl.constexpr(40)  # of a thread that fetches: the others need what it leaves


def hidden_backward(
    tile: Tile,
    d_out: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    gathered: bool,
    arrived_of_packed: Tensor,
    choice_of_packed: Tensor,
    gates: Tensor | None,
    pre: Tensor,
    d_pre: Tensor,
    weighted_h: Tensor,
    d_gate: Tensor | None,
    activation: str,
) -> None:
    """d_out (A or S,H), weight (E,H,I), pre (S,2,I) -> d_pre (S,2,I), weighted_h (S,1,I) and d_gate
    (blocks,S) fp32. There are STAGES stages, whatever the tile has."""
    experts, depth, columns = weight.shape
    m, n, k = tile.block_m, tile.block_n, tile.block_k
    tensors = (
        d_out if gathered else descriptor(d_out, [m, k]),
        descriptor(weight, [1, k, n]),
        ragged(pre, m, 64),
        ragged(d_pre, m, 64),
        ragged(weighted_h, m, 64),
        d_gate,
        offsets,
        arrived_of_packed,
        choice_of_packed,
        gates,
    )
    constants = {
        "EXPERTS": next_power_of_2(experts),
        "K": depth,
        "N": columns,
        "TOP_K": 1 if gates is None else gates.shape[1],
        "ACTIVATION": activation,
        "GATHER": gathered,
        **tile.blocks,
        "STAGES": STAGES,
        **OPTIONS,
    }
    grid = (programs(tile, 1 << 30, pre.device), 1, 1)
    _hidden_backward(grid, tensors, (len(pre), experts), constants)


@bound
@gluon.jit(do_not_specialize=["slots", "experts"])
def _hidden_backward(
    d_out,
    weight,
    pre,
    d_pre,
    weighted_h,
    d_gate,
    offsets,
    arrived_of_packed,
    choice_of_packed,
    gates,
    slots,
    experts,
    EXPERTS: gl.constexpr,
    K: gl.constexpr,
    N: gl.constexpr,
    TOP_K: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATHER: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = weight.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ragged_part: gl.constexpr = gl.NVMMASharedLayout(128, 16, 5)
    a = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_K], flat)
    b = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, BLOCK_N], flat)
    kept = gl.allocate_shared_memory(dtype, [2, 1, 1, BLOCK_M, 1, 64], ragged_part)
    out = gl.allocate_shared_memory(dtype, [3, 1, 1, BLOCK_M, 1, 64], ragged_part)
    here = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(here.index(0), count=1)
    full, free = start(STAGES, 1 + (32 * FETCHING if GATHER else 0))
    BLOCKS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    e = gl.arange(0, EXPERTS, gl.BlockedLayout([1], [32], [MULTIPLYING], [0]))
    ends = gl.load(offsets + 1 + e, mask=e < experts, other=0)
    starts = gl.load(offsets + e, mask=e < experts, other=0)
    tiles = gl.sum((ends - starts + BLOCK_M - 1) // BLOCK_M, 0) * BLOCKS
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    a, b, kept, here, out, full, free, pre, d_pre, weighted_h, d_gate, offsets,
                    arrived_of_packed, choice_of_packed, gates, slots, tiles, K, N, TOP_K,
                    ACTIVATION, GATHER, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
                ),
            ),
            (
                fetch,
                (
                    a, b, full, free, d_out, weight, offsets, arrived_of_packed, tiles, K, N, 1,
                    True, GATHER, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES,
                ),
            ),
        ],
        [FETCHING],
        [REGISTERS],
    )  # fmt: skip


@gluon.jit
def _multiply(
    a, b, kept, here, out, full, free, pre, d_pre, weighted_h, d_gate, offsets,
    arrived_of_packed, choice_of_packed, gates, slots, tiles,
    K: gl.constexpr, N: gl.constexpr, TOP_K: gl.constexpr, ACTIVATION: gl.constexpr,
    GATHER: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    accumulator: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [MULTIPLYING, 1], [16, BLOCK_N, 16]
    )
    by_row: gl.constexpr = gl.SliceLayout(1, accumulator)
    expert = 0
    first = 0
    round = 0
    parts = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, end, row, block = place(
            tile, expert, first, offsets, BLOCK_M, BLOCKS, GROUP_M
        )
        column = block * BLOCK_N
        _fetch_part(pre, kept, here, row, end, column, BLOCK_M)
        r = row + gl.arange(0, BLOCK_M, by_row)
        scale = gl.full([BLOCK_M], 1.0, gl.float32, by_row)
        if gates is not None:
            slot = gl.minimum(r, end - 1)
            arrived = gl.load(arrived_of_packed + slot).to(gl.int64)
            choice = gl.load(choice_of_packed + slot)
            scale = gl.load(gates + arrived * TOP_K + choice).to(gl.float32)
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, accumulator)
        for k in range(0, K, BLOCK_K):
            stage = round % STAGES
            mbarrier.wait(full.index(stage), round // STAGES & 1)
            if GATHER:  # written by threads, read by the tensor cores
                hopper.fence_async_shared()
            acc = hopper.warpgroup_mma(
                a.index(stage), b.index(stage), acc, use_acc=k > 0, is_async=True
            )
            acc = hopper.warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(free.index((round + STAGES - 1) % STAGES), pred=k > 0)
            round += 1
        acc = hopper.warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((round + STAGES - 1) % STAGES))
        dot, parts = _through_activation(
            acc, scale, kept, here, parts, out, pre, d_pre, weighted_h, row, end, column,
            column + BLOCK_N, by_row, ACTIVATION, BLOCK_M,
        )  # fmt: skip
        if d_gate is not None:
            gl.store(d_gate + block.to(gl.int64) * slots + r, dot, mask=r < end)
    tma.store_wait(0)


@gluon.jit
def _fetch_part(pre, kept, here, row, end, column, BLOCK_M: gl.constexpr):
    """64 columns of gate and up, once every thread has read those before."""
    far: gl.constexpr = 1 << 30
    barrier()
    hopper.fence_async_shared()
    mbarrier.expect(here.index(0), 2 * 2 * BLOCK_M * 64)
    for half in gl.static_range(2):
        at = [far, end, far - end + row, half, column]
        async_load(pre, at, here.index(0), kept.index(half))


@gluon.jit
def _through_activation(
    d_h, scale, kept, here, parts, out, pre, d_pre, weighted_h, row, end, column, stop,
    by_row: gl.constexpr, ACTIVATION: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Store scale * h and d_pre; -> <d_h, h> of each row, and how many parts have come. Columns up
    to `stop` belong to this tile."""
    far: gl.constexpr = 1 << 30
    if d_h.shape[1] > 64:
        left, right = in_two(d_h)
        dot, parts = _through_activation(
            left, scale, kept, here, parts, out, pre, d_pre, weighted_h, row, end, column, stop,
            by_row, ACTIVATION, BLOCK_M,
        )  # fmt: skip
        more, parts = _through_activation(
            right, scale, kept, here, parts, out, pre, d_pre, weighted_h, row, end,
            column + d_h.shape[1] // 2, stop, by_row, ACTIVATION, BLOCK_M,
        )  # fmt: skip
        return dot + more, parts
    else:
        mbarrier.wait(here.index(0), parts & 1)
        gate = kept.index(0).reshape([BLOCK_M, 64]).load(d_h.type.layout).to(gl.float32)
        up = kept.index(1).reshape([BLOCK_M, 64]).load(d_h.type.layout).to(gl.float32)
        if column + 64 < stop:
            _fetch_part(pre, kept, here, row, end, column + 64, BLOCK_M)
        h = activate(gate, up, ACTIVATION)
        dot = gl.convert_layout(gl.sum(d_h * h, 1), by_row)
        weight = gl.convert_layout(scale, gl.SliceLayout(1, d_h.type.layout))[:, None]
        by_gate, by_up = slopes(gate, up, ACTIVATION)
        d_h *= weight
        _store(
            out,
            (weight * h).to(pre.dtype),
            (d_h * by_gate).to(pre.dtype),
            (d_h * by_up).to(pre.dtype),
        )
        at = far - end + row
        async_store(weighted_h, [far, end, at, 0, column], out.index(0))
        async_store(d_pre, [far, end, at, 0, column], out.index(1))
        async_store(d_pre, [far, end, at, 1, column], out.index(2))
        return dot, parts + 1


@gluon.jit
def _store(out, h, d_gate, d_up):
    """Into the three buffers, all at once, when what was there has left."""
    shape: gl.constexpr = [h.shape[0], h.shape[1]]
    tma.store_wait(0)
    out.index(0).reshape(shape).store(h)
    out.index(1).reshape(shape).store(d_gate)
    out.index(2).reshape(shape).store(d_up)
    hopper.fence_async_shared()
