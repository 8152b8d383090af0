"""Which rows go where, and what their receivers are told about them; and what arrived of that.

One launch makes an order over all tokens without atomics or a second pass: a program scans all ids
itself to know what stands before its own part.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.device import registers
from ep_moe.kernels.launch import bound, cdiv, next_power_of_2

SCANNED = 16384  # ids at a time
TOKENS = 2048  # of them at most: a thread counts for each of its tokens
LANE = 256  # tokens that a program makes lines of, or more where programs would be more than MOST
MOST = 128  # of them all, of which each scans all ids
BITS = tl.constexpr(30)  # ranks in a word, for its sign to stay out of shifts
LINES = 128  # that a program opens


def send_order(
    ids: Tensor, gates: Tensor, num_experts: int, blocks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """ids (T,K) int32 or int64, gates (T,K); writes blocks (W, 1+lines, width) int32 ->
    token_of_sent (T min(W,K),), 0 from offsets[-1] on, sent_of_token (T,W) and offsets (W+1,), all
    int32."""
    ids, words = ids.contiguous(), gates.contiguous().view(torch.int32)
    (tokens, top_k), (ranks, lines, width) = ids.shape, blocks.shape
    token_of_sent = blocks.new_empty(tokens * min(ranks, top_k))
    sent_of_token = blocks.new_empty(tokens, ranks)
    offsets = blocks.new_empty(ranks + 1)
    choices = next_power_of_2(top_k)
    lanes = max(min(cdiv(tokens, LANE), MOST // ranks), 1)
    lanes = next_power_of_2(lanes + 1) // 2  # rounded down: each number is compiled
    constants = {
        "EACH": num_experts // ranks,
        "W": ranks,
        "K": top_k,
        "WORDS": words.shape[1],
        "WIDTH": width,
        "CHOICES": choices,
        "COLUMNS": next_power_of_2(words.shape[1]),
        "SCAN": min(max(SCANNED // choices, 1), TOKENS),
        "BLOCK": max(min(SCANNED // 4 // choices, LANE), 1),
        "LANES": lanes,
    }
    options = {"num_warps": 16, **registers(128), "sanitize_overflow": False}
    tensors = (ids, words, token_of_sent, sent_of_token, offsets, blocks)
    _send_order((ranks * lanes, 1, 1), tensors, (tokens, lines), constants | options)
    return token_of_sent, sent_of_token, offsets


def open_blocks(
    blocks: Tensor, rows: Sequence[int], *, top_k: int, gates: torch.dtype
) -> tuple[Tensor, Tensor]:
    """blocks (W, 1+lines, width) int32, whose first lines name `rows` -> local ids (A,K) int32 and
    gates (A,K), A = sum(rows)"""
    (ranks, lines, width), arrived = blocks.shape, sum(rows)
    local_ids = blocks.new_empty(arrived, top_k)
    weights = torch.empty(arrived, top_k, dtype=gates, device=blocks.device)
    if arrived:
        words = weights.view(torch.int32)
        constants = {
            "SOURCES": next_power_of_2(ranks),
            "W": ranks,
            "K": top_k,
            "WORDS": words.shape[1],
            "WIDTH": width,
            "CHOICES": next_power_of_2(top_k),
            "COLUMNS": next_power_of_2(words.shape[1]),
            "BLOCK": LINES,
        }
        grid = (cdiv(max(rows), LINES), ranks, 1)
        _open_blocks(grid, (blocks, local_ids, words), (lines,), constants)
    return local_ids, weights


@bound
@triton.jit(do_not_specialize=["tokens", "lines"], debug=True)
def _send_order(
    ids,
    words,
    token_of_sent,
    sent_of_token,
    offsets,
    blocks,
    tokens,
    lines,
    EACH: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCAN: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Program to * LANES + lane writes what the lane's part of the tokens has for rank `to`. Stops
    at an id that is no expert, which would go nowhere: the host does not look at ids.

    A token's ranks are bits of a word (one for every BITS ranks), so that each counts once: those
    below bit `to` are rows that stand before all of this rank's.
    """
    p = tl.program_id(0)
    to, lane = p // LANES, p % LANES
    part = (tokens + LANES - 1) // LANES
    begin, end = lane * part, tl.minimum(lane * part + part, tokens)
    none = tl.zeros([SCAN], tl.int32)
    earlier, rows, first, choices = none, none, none, none  # added up over blocks, token by token
    for block in range(0, tokens, SCAN):
        token, id, rank = _choices(ids, block, SCAN, tokens, EACH, W, K, CHOICES)
        here = tl.sum((rank == to).to(tl.int32), 1)
        goes = (here > 0).to(tl.int32)
        choices += here
        rows += goes
        first += tl.where(token < begin, goes, 0)
        for base in tl.static_range(0, W, BITS):
            bit = tl.minimum(tl.maximum(rank - base, 0), BITS - 1)
            inside = (rank >= base) & (rank < base + BITS)
            ranks = tl.reduce(tl.where(inside, 1 << bit, 0), 1, _or)
            below = (1 << tl.minimum(tl.maximum(to - base, 0), BITS)) - 1
            earlier += _ones(ranks & below)
    before, total, choices_there, at = tl.sum(earlier), tl.sum(rows), tl.sum(choices), tl.sum(first)

    block_there = blocks + to.to(tl.int64) * lines * WIDTH
    if lane == 0:
        tl.store(offsets + to, before)
        tl.store(offsets + W, before + total, mask=to == W - 1)
        tl.store(block_there, total)
        tl.store(block_there + 1, choices_there)
        tl.store(block_there + 2, tokens)
    k, column = tl.arange(0, CHOICES), tl.arange(0, COLUMNS)
    for block in range(begin, end, BLOCK):
        token, id, rank = _choices(ids, block, BLOCK, end, EACH, W, K, CHOICES)
        here = rank == to
        goes = tl.max(here.to(tl.int32), 1)
        place = at + tl.cumsum(goes) - goes  # among the rows for that rank
        long = token.to(tl.int64)
        sent_row = tl.where(goes > 0, before + place, -1)
        tl.store(sent_of_token + long * W + to, sent_row, mask=token < end)
        tl.store(token_of_sent + before + place, token, mask=goes > 0)
        line = block_there + (1 + place).to(tl.int64) * WIDTH
        fits = (goes > 0) & (1 + place < lines)
        local = tl.where(here, id - to * EACH, -1)
        tl.store(line[:, None] + k[None, :], local, mask=fits[:, None] & (k < K)[None, :])
        mask = fits[:, None] & (column < WORDS)[None, :]
        bits = tl.load(words + long[:, None] * WORDS + column[None, :], mask=mask)
        tl.store(line[:, None] + K + column[None, :], bits, mask=mask)
        at += tl.sum(goes)
    if to == W - 1:  # behind the last row, for readers that do not look at offsets
        slots = tokens * (W if W < K else K)
        for block in range(before + total + lane * BLOCK, slots, LANES * BLOCK):
            nobodys = block + tl.arange(0, BLOCK)
            tl.store(token_of_sent + nobodys, 0, mask=nobodys < slots)


@triton.jit
def _choices(
    ids,
    block,
    BLOCK: tl.constexpr,
    end,
    EACH: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """-> the tokens of a block, their experts, and the ranks of these; -1 = nowhere"""
    token = block + tl.arange(0, BLOCK)
    k = tl.arange(0, CHOICES)
    mask = (token < end)[:, None] & (k < K)[None, :]
    id = tl.load(ids + token.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=-1)
    tl.device_assert((id >= -1) & (id < EACH * W), "ep_moe: an id that is neither -1 nor an expert")
    id = id.to(tl.int32)
    return token, id, tl.where(id < 0, -1, id // EACH)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _ones(word):
    """How many bits are set; by pairs, fours and eights, whose counts a product adds up."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24


@bound
@triton.jit(do_not_specialize=["lines"])
def _open_blocks(
    blocks,
    local_ids,
    words,
    lines,
    SOURCES: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (parts of a block, blocks)."""
    source, each = tl.program_id(1), tl.arange(0, SOURCES)
    stride = lines.to(tl.int64) * WIDTH
    rows = tl.load(blocks + each * stride, mask=each < W, other=0)
    before = tl.sum(tl.where(each < source, rows, 0))
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    filled = row < tl.sum(tl.where(each == source, rows, 0))
    line = blocks + source * stride + (1 + row).to(tl.int64) * WIDTH
    at = (before + row).to(tl.int64)
    k, column = tl.arange(0, CHOICES), tl.arange(0, COLUMNS)
    mask = filled[:, None] & (k < K)[None, :]
    id = tl.load(line[:, None] + k[None, :], mask=mask)
    tl.store(local_ids + at[:, None] * K + k[None, :], id, mask=mask)
    mask = filled[:, None] & (column < WORDS)[None, :]
    bits = tl.load(line[:, None] + K + column[None, :], mask=mask)
    tl.store(words + at[:, None] * WORDS + column[None, :], bits, mask=mask)
