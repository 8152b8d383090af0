"""Order slots by expert: a stable counting sort in three launches, without atomics.

Blocks of BLOCK slots are counted, the counts are summed over the blocks before, and each slot finds
its place: where its expert starts, plus its equals in earlier blocks, plus those before it in its
own, found by comparing all pairs of a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.launch import bound, cdiv, next_power_of_2

BLOCK = 128
SCANNED = 512  # blocks at a time
COLUMNS = 8  # experts: 32 bytes of a row, the least that a GPU reads


def count(ids: Tensor, num_experts: int) -> Tensor:
    """(blocks, E) int32: how often each expert stands in each block of the flat (T,K) int32 ids; -1
    counts nowhere."""
    slots = ids.numel()
    blocks = cdiv(slots, BLOCK)
    counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=ids.device)
    if blocks:
        bins = max(next_power_of_2(num_experts), 32)
        sizes = {"E": num_experts, "BINS": bins, "BLOCK": BLOCK, "sanitize_overflow": False}
        _count((blocks, 1, 1), (ids, counts), (slots,), sizes)
    return counts


def pack(local_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(A,K) int32, -1 = none -> arrived_of_packed and choice_of_packed, (A K,) and 0 from
    offsets[-1] on, packed_of_arrived (A,K) and offsets (E+1,), all int32."""
    local_ids = local_ids.contiguous()
    rows, top_k = local_ids.shape
    slots = rows * top_k
    arrived, choice = local_ids.new_empty(2, slots)
    packed = torch.empty_like(local_ids)
    if not slots:
        return arrived, choice, packed, local_ids.new_zeros(num_experts + 1)
    before, totals = count(local_ids, num_experts), local_ids.new_empty(num_experts)
    offsets = local_ids.new_empty(num_experts + 1)
    blocks, sizes = before.shape[0], {"E": num_experts, "SCANNED": SCANNED, "COLUMNS": COLUMNS}
    _sum_blocks((cdiv(num_experts, COLUMNS), 1, 1), (before, totals), (blocks,), sizes)
    experts = next_power_of_2(num_experts)
    sizes = {"E": num_experts, "K": top_k, "EXPERTS": experts, "BLOCK": BLOCK}
    tensors = (local_ids, before, totals, arrived, choice, packed, offsets)
    _place((blocks, 1, 1), tensors, (slots,), sizes)
    return arrived, choice, packed, offsets


@bound
@triton.jit(do_not_specialize=["slots"], debug=True)
def _count(ids, counts, slots, E: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Stops at an id that is no expert: `_place` would write where it points, and the host does not
    look at ids."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + slot, mask=slot < slots, other=-1)
    tl.device_assert((id >= -1) & (id < E), "ep_moe: an id that is neither -1 nor an expert")
    expert = id.to(tl.int32)
    bins = tl.histogram(expert, BINS, mask=expert >= 0)
    of_bin = tl.arange(0, BINS)
    tl.store(counts + block.to(tl.int64) * E + of_bin, bins, mask=of_bin < E)


@bound
@triton.jit(do_not_specialize=["blocks"])
def _sum_blocks(
    counts, totals, blocks, E: tl.constexpr, SCANNED: tl.constexpr, COLUMNS: tl.constexpr
):
    """In place: each block's counts become those of all blocks before it."""
    expert = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, blocks, SCANNED):
        block = first + tl.arange(0, SCANNED)
        at = counts + block[:, None].to(tl.int64) * E + expert[None, :]
        inside = (block[:, None] < blocks) & (expert[None, :] < E)
        n = tl.load(at, mask=inside, other=0)
        tl.store(at, total[None, :] + tl.cumsum(n, 0) - n, mask=inside)
        total += tl.sum(n, 0)
    tl.store(totals + expert, total, mask=expert < E)


@bound
@triton.jit(do_not_specialize=["slots"])
def _place(
    ids,
    before,
    totals,
    arrived_of_packed,
    choice_of_packed,
    packed_of_arrived,
    offsets,
    slots,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    n = tl.load(totals + expert, mask=expert < E, other=0)
    ends = tl.cumsum(n, 0)
    if block == 0:
        tl.store(offsets, 0)
        tl.store(offsets + 1 + expert, ends, mask=expert < E)

    place = tl.arange(0, BLOCK)
    slot = block * BLOCK + place
    id = tl.load(ids + slot, mask=slot < slots, other=-1)
    here = id >= 0
    packed = tl.gather(ends - n, tl.maximum(id, 0), 0)
    packed += tl.load(before + block.to(tl.int64) * E + id, mask=here, other=0)
    earlier = (id[:, None] == id[None, :]) & (place[:, None] < place[None, :])
    packed += tl.sum(earlier.to(tl.int32), 0)  # threads stand along dimension 1: no exchange
    tl.store(packed_of_arrived + slot, tl.where(here, packed, -1), mask=slot < slots)
    tl.store(arrived_of_packed + packed, slot // K, mask=here)
    tl.store(choice_of_packed + packed, slot % K, mask=here)
    nobodys = (slot >= tl.max(ends)) & (slot < slots)  # packed rows behind the last expert's
    tl.store(arrived_of_packed + slot, 0, mask=nobodys)
    tl.store(choice_of_packed + slot, 0, mask=nobodys)
