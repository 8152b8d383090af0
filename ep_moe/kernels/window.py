"""What all moves between ranks share: the form of a window, waits on it, and copies."""

from functools import cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.flags import GROUPS, release, wait
from ep_moe.kernels.launch import next_power_of_2

SLOTS = tl.constexpr(128)  # programs that a rank may have
BYTES = 65536  # that a program has under way
BEGINNING, ARRIVAL = tl.constexpr(1), tl.constexpr(2)  # what failed
VARYING = ["rank", "tokens", "most", "timeout_ns"]


class Link(NamedTuple):
    """What every move is told.

    peers    (W+1,) int64: addresses of the ranks' windows, and of where the host looks for failures
    epochs   (SLOTS,) int32: moves of each program
    failure  (4,) int32: what failed, waiting for whom, in which move, 1; all 0 = nothing
    """

    peers: Tensor
    epochs: Tensor
    failure: Tensor
    rank: int
    most: int
    programs: int
    timeout_ns: int

    @property
    def ranks(self) -> int:
        return self.peers.shape[0] - 1

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the kernels that move, in their order, behind other tensors."""
        return self.peers, self.epochs, self.failure

    def integers(self, tokens: int) -> tuple[int, ...]:
        """Likewise."""
        return self.rank, tokens, self.most, self.timeout_ns


class Layout(NamedTuple):
    """Of a window, in bytes from its start: rows, and in a dispatch ids and gates behind them."""

    rows: int
    ids: int
    gates: int
    total: int


class Order(NamedTuple):
    """What this rank sends and gets, of T tokens: `words` holds, one behind the other,

    sent           (W,) rows to each rank
    arrived        (W,) rows from each rank
    sent_of_token  (T,W) where a token's rows stand on the way back; -1 = not at rank w
    token_of_sent  (W,T) tokens in the order in which rank w gets them
    """

    words: Tensor
    tokens: int


@cache  # the host makes a move in less time than this takes
def layout(ranks: int, most: int, row_bytes: int, top_k: int = 0, gate_bytes: int = 0) -> Layout:
    rows = 24 * ranks * SLOTS.value
    ids = rows + aligned(ranks * most * row_bytes)
    gates = ids + aligned(ranks * most * top_k * 4)
    return Layout(rows, ids, gates, gates + aligned(ranks * most * top_k * gate_bytes))


@cache
def tile_sizes(ranks: int, width: int, item: int, *, size: int | None = None) -> dict[str, int]:
    """Tiles of `size` bytes, of whole pieces of a row where its width has such."""
    size = size or BYTES
    columns = min(width & -width, 1024)
    if columns < 256:
        columns = min(next_power_of_2(width), 1024)
    rows = min(max(size // (columns * item), 1), 512)
    return {"W": ranks, "WIDTH": width, "ROWS": rows, "COLUMNS": columns}


def aligned(size: int) -> int:
    return (size + 127) // 128 * 128


@triton.jit
def copy_rows(
    source,
    index,
    target,
    begin,
    end,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows begin..end of the source, or those that `index` names there, to these of the target."""
    for block in range(begin, end, ROWS):
        row = block + tl.arange(0, ROWS)
        from_ = row
        if index is not None:
            from_ = tl.load(index + row, mask=row < end, other=0)
        for column in range(0, WIDTH, COLUMNS):
            c = column + tl.arange(0, COLUMNS)
            mask = (row < end)[:, None] & (c < WIDTH)[None, :]
            value = tl.load(source + from_.to(tl.int64)[:, None] * WIDTH + c[None, :], mask=mask)
            tl.store(target + row.to(tl.int64)[:, None] * WIDTH + c[None, :], value, mask=mask)


@triton.jit
def begin_move(p, epochs, failure, timeout_ns):
    """-> the number of this move, whether none has failed, and how long to wait"""
    sound = tl.load(failure) == 0
    return tl.load(epochs + p) + 1, sound, tl.where(sound, timeout_ns, 0).to(tl.int64)


@triton.jit
def end_move(p, epochs, now, PROGRAMS: tl.constexpr):
    """The move counts for those that do not run, too."""
    slot = p + PROGRAMS * tl.arange(0, SLOTS)
    tl.debug_barrier()
    tl.store(epochs + slot, now, mask=slot < SLOTS)


@triton.jit
def tell_begun(peers, peer, rank, sound, p, now, W: tl.constexpr):
    """A peer, that this rank has begun."""
    release(ready_flag_of(tl.load(peers + tl.where(sound, peer, rank)), rank, p, W), now)


@triton.jit
def await_ready(peers, to, rank, sound, p, now, patience, failure, W: tl.constexpr):
    """-> whether `to` has begun and may be written, and how long to wait further"""
    one = tl.zeros([1, 1], tl.int32)
    flag = ready_flag_of(tl.load(peers + rank), to, p, W) + one
    seen = tl.load(peers + W)
    come = wait(flag, now, one == 0, to + one, now, patience, failure, seen, BEGINNING)
    return come & (sound | (to == rank)), tl.where(come, patience, 0)


@triton.jit
def await_arrival(peers, source, rank, p, now, patience, failure, W: tl.constexpr):
    """-> whether all that program p of the source sends is there"""
    one = tl.zeros([1, 1], tl.int32)
    flag = flag_of(tl.load(peers + rank), source, p) + one
    awaited, seen = progress(now, GROUPS - 1), tl.load(peers + W)
    return wait(flag, awaited, one == 0, source + one, now, patience, failure, seen, ARRIVAL)


@triton.jit
def progress(now, group):
    return now * GROUPS + group


@triton.jit
def flag_of(window, source, p):
    return window + (source * SLOTS + p) * 4


@triton.jit
def ready_flag_of(window, source, p, W: tl.constexpr):
    return flag_of(window, W + source, p)


@triton.jit
def records_at(W: tl.constexpr):
    return 2 * W * SLOTS * 4


@triton.jit
def rows_of(window, like, W: tl.constexpr):
    return typed(window, 6 * W * SLOTS * 4 // 128, like)


@triton.jit
def typed(window, blocks, like):
    """A pointer into a window, so many times 128 bytes from its start."""
    element = like.dtype.element_ty
    start = tl.multiple_of(window.to(tl.pointer_type(element)), 16)  # of a sum it would be lost
    return start + tl.cast(blocks, tl.int64) * (1024 // element.primitive_bitwidth)


@triton.jit
def sent_of_token(order, W: tl.constexpr):
    return order + 2 * W


@triton.jit
def token_of_sent(order, tokens, W: tl.constexpr):
    return order + 2 * W + tokens * W
