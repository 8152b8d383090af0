"""One-sided moves between ranks whose memory each of them can write: rows are put where their
receiver looks for them, and a flag says that they are there.

Each rank has a window of the same form: flags, then an area for what arrives (`Layout`). The i-th
row that source s sends to a rank arrives at row `s * most + i` of it, where `most` is the most
tokens of a rank: nobody needs another's counts. On the way back the i-th row from expert rank r
lies at row `r * most + i` of its home. Rows behind the last one of a source are garbage.

A move writes to a peer only once that has begun the same move. What runs on one stream runs in
order, so all that the peer launched before, everybody who reads what arrived there earlier
included, has ended by then: rows may be read where they arrived until this rank's next move. There
is one area, always at the same addresses, which a CUDA graph can hold. A rank's own rows go where
its caller wants them, in that area or elsewhere.

Program p of a rank waits for programs p of its peers, or for some before p, never for later ones:
they need not all run at once. Each counts its moves on the device, so that a graph counts on when
it is replayed, and counts for the programs that a larger launch would have.

Waits are bounded: a program that waits too long says for whom in `failure`, takes nothing from that
peer and goes on. From the next move on its rank neither waits nor writes to others: a peer that is
late may still read what stands in its window, and those that are not shall notice.

All moves of a rank are in one order: on one stream, or on streams that wait for each other.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.device import registers
from ep_moe.kernels.flags import GROUPS, release, words
from ep_moe.kernels.launch import bound, cdiv, next_power_of_2
from ep_moe.kernels.window import (
    SLOTS,
    VARYING,
    Link,
    Order,
    await_arrival,
    await_ready,
    begin_move,
    copy_rows,
    end_move,
    flag_of,
    layout,
    progress,
    records_at,
    rows_of,
    sent_of_token,
    tell_begun,
    tile_sizes,
    token_of_sent,
    typed,
)

SCANNED = 16384  # ids at a time
TAKEN = 16384  # bytes of rows that a program copies at a time


def dispatch(
    x: Tensor, ids: Tensor, gates: Tensor, own: Tensor, link: Link, *, num_experts: int
) -> tuple[Order, Tensor, Tensor]:
    """x (T,H) into the windows of other ranks and into `own` (A,H); ids (T,K), -1 = nowhere, gates
    (T,K) -> the order, local ids (A,K) int32, -1 where no row arrived, and their gates (A,K).
    A = W * most."""
    ranks, (tokens, width), top_k = link.ranks, x.shape, ids.shape[1]
    order = torch.empty(2 * ranks * (1 + tokens), dtype=torch.int32, device=x.device)
    local_ids = torch.empty(ranks * link.most, top_k, dtype=torch.int32, device=x.device)
    arrived = torch.empty(ranks * link.most, top_k, dtype=gates.dtype, device=x.device)
    places = layout(ranks, link.most, width * x.element_size(), top_k, gates.element_size())
    constants = _constants(ranks, width, x.element_size(), link.programs)
    x, ids, gates = x.contiguous(), ids.contiguous(), gates.contiguous()
    _dispatch(
        (ranks * constants["LANES"], 1, 1),
        (x, ids, gates, own, order, local_ids, arrived, *link.tensors),
        (*link.integers(tokens), places.ids // 128, places.gates // 128),
        {**constants, **_constants_of_choices(num_experts // ranks, top_k)},
    )
    return Order(order, tokens), local_ids, arrived


def replay(x: Tensor, own: Tensor, order: Order, link: Link) -> None:
    """x (T,H) into the windows of other ranks and into `own` (A,H), in that order."""
    constants = _constants(link.ranks, x.shape[1], x.element_size(), link.programs)
    tensors = (x.contiguous(), own, order.words, *link.tensors)
    _replay(
        (link.ranks * constants["LANES"], 1, 1), tensors, link.integers(order.tokens), constants
    )


def take(window: Tensor, out: Tensor, order: Order, link: Link) -> None:
    """The rows that arrived from others, of a window's (A,H), copied to `out` (A,H)."""
    width = out.shape[1]
    sizes = tile_sizes(link.ranks, width, out.element_size(), size=TAKEN)
    grid = (cdiv(link.most, sizes["ROWS"]), link.ranks - 1, 1)
    if grid[1]:
        _take(grid, (window, out, order.words), (link.rank, link.most), sizes)


@cache
def _constants(ranks: int, width: int, item: int, programs: int) -> dict[str, int]:
    lanes = max(programs // ranks, 1)
    sizes = tile_sizes(ranks, width, item)
    return {**sizes, "LANES": lanes, "num_warps": 16, **registers(128)}


@cache
def _constants_of_choices(each: int, top_k: int) -> dict[str, int]:
    choices = next_power_of_2(top_k)
    scan, block = max(SCANNED // choices, 1), max(SCANNED // 4 // choices, 1)
    sizes = {"EACH": each, "K": top_k, "CHOICES": choices, "SCAN": scan, "BLOCK": block}
    return {**sizes, "sanitize_overflow": False}


@bound
@triton.jit(do_not_specialize=[*VARYING, "ids_at", "gates_at"], debug=True)
def _dispatch(
    x,
    ids,
    gates,
    own,
    order,
    local_ids,
    arrived_gates,
    peers,
    epochs,
    failure,
    rank,
    tokens,
    most,
    timeout_ns: tl.int64,
    ids_at,
    gates_at,
    EACH: tl.constexpr,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK: tl.constexpr,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Program lane * W + step sends to rank + step, and waits for rank - step, what the lane's part
    of the tokens has for it. Stops at an id that is no expert: the host does not look at ids."""
    p = tl.program_id(0)
    to, source = (rank + p % W) % W, (rank + W - p % W) % W
    here = tl.load(peers + rank)
    now, sound, patience = begin_move(p, epochs, failure, timeout_ns)
    tell_begun(peers, source, rank, sound, p, now, W)

    lane = p // W
    part = (tokens + LANES - 1) // LANES
    begin, end = lane * part, tl.minimum(lane * part + part, tokens)
    first = tl.cast(0, tl.int32)  # of the rows for `to` that this lane sends
    total = tl.cast(0, tl.int32)
    for block in range(0, tokens, SCAN):
        token, _, goes = _choices(ids, block, SCAN, tokens, to, EACH, W, K, CHOICES)
        first += tl.sum(tl.where(token < begin, goes, 0))
        total += tl.sum(goes)
    last = first
    alive, patience = await_ready(peers, to, rank, sound, p, now, patience, failure, W)
    there = tl.load(peers + tl.where(alive, to, rank))
    k = tl.arange(0, CHOICES)
    for block in range(begin, end, BLOCK):
        token, local, goes = _choices(ids, block, BLOCK, end, to, EACH, W, K, CHOICES)
        at = last + tl.cumsum(goes) - goes
        place = tl.where(goes > 0, to * most + at, -1)
        tl.store(sent_of_token(order, W) + token * W + to, place, mask=token < end)
        tl.store(token_of_sent(order, tokens, W) + to * tokens + at, token, mask=goes > 0)
        sent = (tl.where(alive, goes, 0) > 0)[:, None] & (k < K)[None, :]
        gate = tl.load(gates + token.to(tl.int64)[:, None] * K + k[None, :], mask=sent)
        target = (rank * most + at).to(tl.int64)[:, None] * K + k[None, :]
        tl.store(typed(there, ids_at, local_ids) + target, local, mask=sent)
        tl.store(typed(there, gates_at, gates) + target, gate, mask=sent)
        last += tl.sum(goes)
    if lane == 0:
        tl.store(order + to, total)
    tl.debug_barrier()  # the list that this program wrote
    index = token_of_sent(order, tokens, W) + to * tokens
    target = tl.where(to == rank, own, rows_of(there, x, W)) + (rank * most).to(tl.int64) * WIDTH
    copy_rows(x, index, target, first, tl.where(alive, last, first), WIDTH, ROWS, COLUMNS)
    record = words(there + records_at(W)) + (rank * SLOTS + p) * 4
    tl.store(record, first, mask=alive)
    tl.store(record + 1, last, mask=alive)
    tl.store(record + 2, total, mask=alive)
    release(flag_of(there, rank, p), progress(now, GROUPS - 1))

    come = await_arrival(peers, source, rank, p, now, patience, failure, W)
    record = words(here + records_at(W)) + (source * SLOTS + p) * 4
    first = tl.load(record, mask=come, other=0)
    last = tl.load(record + 1, mask=come, other=0)
    total = tl.load(record + 2, mask=come, other=0)
    if lane == 0:
        tl.store(order + W + source, total)
    base = source * most
    for block in range(first, last, BLOCK):
        row = block + tl.arange(0, BLOCK)
        mask = (row < last)[:, None] & (k < K)[None, :]
        at = (base + row).to(tl.int64)[:, None] * K + k[None, :]
        local = tl.load(typed(here, ids_at, local_ids) + at, mask=mask)
        tl.store(local_ids + at, local, mask=mask)
        gate = tl.load(typed(here, gates_at, gates) + at, mask=mask)
        tl.store(arrived_gates + at, gate, mask=mask)
    # Rows of nobody. Of a late peer all are: other lanes may have some of them, at the same place.
    part = tl.where(come, (most - total + LANES - 1) // LANES, most)
    begin = tl.where(come, total + lane * part, 0)
    end = tl.minimum(begin + part, most)
    for block in range(begin, end, BLOCK):
        row = block + tl.arange(0, BLOCK)
        at = (base + row).to(tl.int64)[:, None] * K + k[None, :]
        tl.store(local_ids + at, -1, mask=(row < end)[:, None] & (k < K)[None, :])
    end_move(p, epochs, now, LANES * W)


@bound
@triton.jit(do_not_specialize=VARYING)
def _replay(
    x,
    own,
    order,
    peers,
    epochs,
    failure,
    rank,
    tokens,
    most,
    timeout_ns: tl.int64,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
):
    p = tl.program_id(0)
    to, source = (rank + p % W) % W, (rank + W - p % W) % W
    now, sound, patience = begin_move(p, epochs, failure, timeout_ns)
    tell_begun(peers, source, rank, sound, p, now, W)
    alive, patience = await_ready(peers, to, rank, sound, p, now, patience, failure, W)
    there = tl.load(peers + tl.where(alive, to, rank))
    sent = tl.load(order + to)
    part = (sent + LANES - 1) // LANES
    begin = p // W * part
    end = tl.where(alive, tl.minimum(begin + part, sent), begin)
    index = token_of_sent(order, tokens, W) + to * tokens
    target = tl.where(to == rank, own, rows_of(there, x, W)) + (rank * most).to(tl.int64) * WIDTH
    copy_rows(x, index, target, begin, end, WIDTH, ROWS, COLUMNS)
    release(flag_of(there, rank, p), progress(now, GROUPS - 1))
    await_arrival(peers, source, rank, p, now, patience, failure, W)
    end_move(p, epochs, now, LANES * W)


@bound
@triton.jit(do_not_specialize=["rank", "most"])
def _take(
    window,
    out,
    order,
    rank,
    most,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (blocks of rows, sources but for this rank)."""
    source = (rank + 1 + tl.program_id(1)) % W
    end = tl.load(order + W + source)
    begin = tl.program_id(0) * ROWS
    base = (source * most).to(tl.int64) * WIDTH
    end = tl.minimum(end, begin + ROWS)
    copy_rows(window + base, None, out + base, begin, end, WIDTH, ROWS, COLUMNS)


@triton.jit
def _choices(
    ids,
    block,
    BLOCK: tl.constexpr,
    end,
    to,
    EACH: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """-> the tokens of a block, their experts of rank `to` counted from its first, and whether they
    have any (0 or 1)"""
    token = block + tl.arange(0, BLOCK)
    k = tl.arange(0, CHOICES)
    mask = (token < end)[:, None] & (k < K)[None, :]
    id = tl.load(ids + token.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=-1)
    tl.device_assert((id >= -1) & (id < EACH * W), "ep_moe: an id that is neither -1 nor an expert")
    local = id.to(tl.int32) - to * EACH
    local = tl.where((local >= 0) & (local < EACH), local, -1)
    return token, local, (tl.max(local, 1) >= 0).to(tl.int32)
