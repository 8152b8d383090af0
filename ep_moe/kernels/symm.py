"""One-sided moves between ranks whose memory each of them can write: rows are put where their
receiver looks for them, and a flag says that they are there.

Each rank has a window of the same layout (`layout`): flags, counts, rows. Counts and rows are there
twice and used in turn, by the parity of an epoch that every rank counts alike. Twice is enough:
every move waits for a flag of every peer, so who begins move n + 2 knows that all have ended n.
Program p of a rank moves the p-th part of every segment and waits for programs p alone.

Epochs live on the device, so that a CUDA graph counts on when it is replayed; they may wrap around.
Waits are bounded: a program that waits too long says for whom in `failure`, takes nothing from that
peer and goes on. From the next move on its rank neither waits nor writes to others: a peer that is
late may still read what stands in its window, and those that are not shall notice.

All moves of a rank are in one order: on one stream, or on streams that wait for each other.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer
from triton.language.target_info import is_cuda

PROGRAMS = 16  # multiprocessors that a move takes
WORDS = 4096  # that a program copies at a time
COUNTS, ROWS = 1, 2  # what failed


class Layout(NamedTuple):
    """Of a window, in bytes from its start. rows: of each of the two halves."""

    count_flags: int
    row_flags: int
    counts: int
    rows: int
    bytes_of_rows: int
    total: int


def layout(ranks: int, max_tokens: int, row_bytes: int) -> Layout:
    """For ranks of at most `max_tokens` tokens of `row_bytes`."""
    sizes = (4 * ranks, 4 * ranks * PROGRAMS, 8 * ranks * ranks)
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + _aligned(size))
    bytes_of_rows = _aligned(ranks * max_tokens * row_bytes)
    return Layout(*starts, bytes_of_rows, starts[-1] + 2 * bytes_of_rows)


def exchange_counts(
    offsets: Tensor,
    pointers: Tensor,
    epoch: Tensor,
    failure: Tensor,
    *,
    rank: int,
    window: Layout,
    timeout_ns: int,
) -> Tensor:
    """offsets (W+1,) int32 of the rows that this rank sends -> (W,W) int32: rows from each rank to
    each. pointers (W,) int64: the ranks' windows; epoch (1,) int32."""
    ranks = len(pointers)
    counts = offsets.new_empty(ranks, ranks)
    _exchange_counts[(1,)](
        offsets,
        pointers,
        epoch,
        failure,
        counts,
        rank,
        timeout_ns,
        FLAGS=window.count_flags,
        COUNTS=window.counts,
        W=ranks,
        RANKS=triton.next_power_of_2(ranks),
        FAILED=COUNTS,
    )
    return counts


def move(
    values: Tensor,
    index: Tensor | None,
    counts: Tensor,
    out: Tensor,
    pointers: Tensor,
    epochs: Tensor,
    failure: Tensor,
    *,
    rank: int,
    back: bool,
    window: Layout,
    timeout_ns: int,
) -> None:
    """Rows of int32 words: values (N,C), or its rows `index` (N,), ordered by destination -> out,
    ordered by source. counts (W,W) are from rank to rank on the way out; `back` turns them round.
    epochs (PROGRAMS,) int32."""
    ranks, width = len(pointers), values.shape[1]
    columns = min(triton.next_power_of_2(width), 1024)
    _move[(PROGRAMS,)](
        values,
        index,
        counts,
        out,
        pointers,
        epochs,
        failure,
        rank,
        timeout_ns,
        FLAGS=window.row_flags,
        ROWS_AT=window.rows,
        BYTES=window.bytes_of_rows,
        BACK=back,
        W=ranks,
        RANKS=triton.next_power_of_2(ranks),
        WIDTH=width,
        ROWS=WORDS // columns,
        COLUMNS=columns,
        PROGRAMS=PROGRAMS,
        FAILED=ROWS,
        num_warps=8,
    )


def _aligned(size: int) -> int:
    return (size + 127) // 128 * 128


@triton.jit(do_not_specialize=["rank", "timeout_ns"])
def _exchange_counts(
    offsets,
    pointers,
    epoch,
    failure,
    counts,
    rank,
    timeout_ns,
    FLAGS: tl.constexpr,
    COUNTS: tl.constexpr,
    W: tl.constexpr,
    RANKS: tl.constexpr,
    FAILED: tl.constexpr,
):
    now = tl.load(epoch) + 1
    sound = tl.load(failure) == 0
    patience = tl.where(sound, timeout_ns, 0)
    r = tl.arange(0, RANKS)
    mine = tl.load(offsets + 1 + r, mask=r < W, other=0) - tl.load(offsets + r, mask=r < W, other=0)
    row = COUNTS + (now & 1) * (4 * W * W)
    for peer in range(W):
        window = tl.load(pointers + tl.where(sound, peer, rank))
        tl.store(_words(window + row + rank * (4 * W)) + r, mine, mask=r < W)
        _release(window + FLAGS + rank * 4, now)
    here = tl.load(pointers + rank)
    known = W
    for peer in range(W):
        there = _wait(here + FLAGS + peer * 4, now, peer, failure, patience, FAILED)
        known = tl.where(there, known, 0)  # older counts may be more than the buffers hold
    both = r[:, None] * W + r[None, :]
    read, inside = (r < known)[:, None] & (r < known)[None, :], (r < W)[:, None] & (r < W)[None, :]
    tl.store(counts + both, tl.load(_words(here + row) + both, mask=read, other=0), mask=inside)
    tl.store(epoch, now)


@triton.jit(do_not_specialize=["rank", "timeout_ns"])
def _move(
    values,
    index,
    counts,
    out,
    pointers,
    epochs,
    failure,
    rank,
    timeout_ns,
    FLAGS: tl.constexpr,
    ROWS_AT: tl.constexpr,
    BYTES: tl.constexpr,
    BACK: tl.constexpr,
    W: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FAILED: tl.constexpr,
):
    p = tl.program_id(0)
    now = tl.load(epochs + p) + 1
    sound = tl.load(failure) == 0
    patience = tl.where(sound, timeout_ns, 0)
    half = ROWS_AT + (now & 1).to(tl.int64) * BYTES
    for step in range(W):  # not all to the same rank at once; the own rows last, beside the waiting
        peer = (rank + 1 + step) % W
        n, from_ = _segment(counts, rank, peer, BACK, W, RANKS)
        to = _before(counts, rank, peer, BACK, W, RANKS)
        window = tl.load(pointers + tl.where(sound, peer, rank))
        target = tl.where(peer == rank, out.to(tl.int64), window + half)
        part = (n + PROGRAMS - 1) // PROGRAMS
        for row in range(p * part, tl.minimum((p + 1) * part, n), ROWS):
            i = row + tl.arange(0, ROWS)
            inside = i < tl.minimum((p + 1) * part, n)
            source = from_ + i
            if index is not None:
                source = tl.load(index + source, mask=inside, other=0)
            _copy(values, source, _rows(target), to + i, inside, WIDTH, ROWS, COLUMNS)
        if peer != rank:
            _release(window + FLAGS + (rank * PROGRAMS + p) * 4, now)
    here = tl.load(pointers + rank)
    for step in range(W - 1):
        peer = (rank + W - 1 - step) % W
        flag = here + FLAGS + (peer * PROGRAMS + p) * 4
        there = _wait(flag, now, peer, failure, patience, FAILED)
        n, _ = _segment(counts, peer, rank, BACK, W, RANKS)
        at = _before(counts, peer, rank, BACK, W, RANKS)
        part = (n + PROGRAMS - 1) // PROGRAMS
        for row in range(p * part, tl.minimum((p + 1) * part, n), ROWS):
            i = row + tl.arange(0, ROWS)
            inside = i < tl.where(there, tl.minimum((p + 1) * part, n), 0)
            _copy(_rows(here + half), at + i, out, at + i, inside, WIDTH, ROWS, COLUMNS)
    tl.store(epochs + p, now)


@triton.jit
def _segment(counts, source, to, BACK: tl.constexpr, W: tl.constexpr, RANKS: tl.constexpr):
    """-> rows from one rank to another, and how many `source` sends to the ranks before it"""
    r = tl.arange(0, RANKS)
    if BACK:
        n = tl.load(counts + r * W + source, mask=r < W, other=0)
    else:
        n = tl.load(counts + source * W + r, mask=r < W, other=0)
    return tl.sum(tl.where(r == to, n, 0)), tl.sum(tl.where(r < to, n, 0))


@triton.jit
def _before(counts, source, to, BACK: tl.constexpr, W: tl.constexpr, RANKS: tl.constexpr):
    """-> rows that `to` gets from the ranks before `source`"""
    r = tl.arange(0, RANKS)
    if BACK:
        n = tl.load(counts + to * W + r, mask=r < W, other=0)
    else:
        n = tl.load(counts + r * W + to, mask=r < W, other=0)
    return tl.sum(tl.where(r < source, n, 0))


@triton.jit
def _copy(
    source,
    source_row,
    target,
    target_row,
    inside,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    for column in range(0, WIDTH, COLUMNS):
        c = column + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (c < WIDTH)[None, :]
        from_ = source + source_row.to(tl.int64)[:, None] * WIDTH + c[None, :]
        to = target + target_row.to(tl.int64)[:, None] * WIDTH + c[None, :]
        tl.store(to, tl.load(from_, mask=mask), mask=mask)


@triton.jit
def _words(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _rows(address):
    """Of a window, or of a tensor: both begin at multiples of 16."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _release(address, value):
    """After all that this program has written, to be seen by every GPU."""
    tl.debug_barrier()
    if is_cuda():
        tl.inline_asm_elementwise(
            "st.release.sys.global.u32 [$1], $2; mov.u32 $0, $2;",
            "=r,l,r",
            [address, value],
            tl.int32,
            False,
            1,
        )
    else:
        tl.atomic_xchg(_words(address), value, sem="release", scope="sys")


@triton.jit
def _acquire(address):
    if is_cuda():
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [address], tl.int32, False, 1
        )
    else:
        return tl.atomic_add(_words(address), 0, sem="acquire", scope="sys")


@triton.jit
def _now(spins):
    """Nanoseconds; a guess where there is no clock."""
    if is_cuda():
        return globaltimer().to(tl.int64)
    else:
        return spins.to(tl.int64) * 1000


@triton.jit
def _wait(address, value, peer, failure, patience, FAILED: tl.constexpr):
    """Until the flag has the value, or `patience` is over. -> whether it has it"""
    spins = tl.cast(0, tl.int32)
    began = _now(spins)
    seen = _acquire(address)
    while (seen - value < 0) & (_now(spins) - began < patience):
        seen = _acquire(address)
        spins += 1
    there = seen - value >= 0
    if (patience > 0) & (seen - value < 0):
        tl.store(failure + 1, peer)
        tl.store(failure + 2, value)
        tl.store(failure, FAILED)
    tl.debug_barrier()
    return there
