"""Rows back to their homes, and their sums: the second half of `ep_moe.kernels.symm`."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.device import registers
from ep_moe.kernels.flags import GROUPS, release, wait
from ep_moe.kernels.launch import bound, cdiv, next_power_of_2
from ep_moe.kernels.window import (
    ARRIVAL,
    BEGINNING,
    VARYING,
    Link,
    Order,
    begin_move,
    copy_rows,
    end_move,
    flag_of,
    progress,
    ready_flag_of,
    rows_of,
    sent_of_token,
    tell_begun,
    tile_sizes,
)

FEW = 128  # tokens whose sums are made beside the push, to save the host a second launch
LATE = 256  # tokens whose sums do not pay beside it: nothing has arrived yet
AT_LEAST = tl.constexpr(16)  # rows of a group that a program pushes, where there are as many


def combine(rows: Tensor, order: Order, link: Link) -> Tensor:
    """rows (A,H), back to their homes -> (T,H): the sum of each token's, in the order of ranks, in
    fp32 (fp64 for fp64), rounded once."""
    ranks, tokens, rows = link.ranks, order.tokens, rows.contiguous()
    width, item = rows.shape[1], rows.element_size()
    out = torch.empty(tokens, width, dtype=rows.dtype, device=rows.device)
    few = tokens <= FEW and not (rows.is_cuda and torch.cuda.is_current_stream_capturing())
    summed = tokens  # beside the push, and the others when all SMs are free for it
    if not few:
        summed = max(tokens - LATE, 0) * 9 * (ranks - 1) // (10 * ranks)
    constants = _constants(ranks, width, item, link.programs, few=few)
    programs = constants["PUSHERS"] + constants["SUMMERS"]
    tensors = (rows, out, order.words, *link.tensors)
    _combine((programs, 1, 1), tensors, (*link.integers(tokens), summed), constants)
    if few:
        _prepare_graph(rows.dtype, rows.device, ranks, width, link.programs)
    elif summed < tokens:
        constants = _constants_of_others(ranks, width, item)
        grid = (tokens - summed, cdiv(width, constants["COLUMNS"]), 1)
        _sum_others(grid, (rows, out, order.words, link.peers), (link.rank, summed), constants)
    return out


@cache
def _constants(ranks: int, width: int, item: int, programs: int, *, few: bool) -> dict[str, int]:
    pushers = max(programs // 2, 1)
    sizes = tile_sizes(ranks, width, item)
    summed = sizes["ROWS"] * (1 if few else 2) // next_power_of_2(ranks)
    return {
        **sizes,
        "RANKS": next_power_of_2(ranks),
        "PUSHERS": pushers,
        "FLAGS": next_power_of_2(pushers),
        "SUMMERS": max(programs - pushers, 1),
        "SUMMED": max(summed, 1),
        "num_warps": 16,
        **registers(128),
    }


@cache
def _constants_of_others(ranks: int, width: int, item: int) -> dict[str, int]:
    columns = min(2048, next_power_of_2(width))
    warps = max(1, columns * item // 512)
    return {"W": ranks, "WIDTH": width, "COLUMNS": columns, "num_warps": warps}


@cache
def _prepare_graph(
    dtype: torch.dtype, device: torch.device, ranks: int, width: int, programs: int
) -> None:
    """What the same call launches in a graph, which `layer.warmup` does not see."""
    constants = _constants(ranks, width, dtype.itemsize, programs, few=False)
    ints, longs = torch.int32, torch.int64
    tensors = (dtype, dtype, ints, longs, ints, ints)  # as in `combine`
    _combine.prepare(tensors, (0, 0, 0, 0, 0), constants)
    others = _constants_of_others(ranks, width, dtype.itemsize)
    _sum_others.prepare((dtype, dtype, ints, longs), (0, 0), others)


@bound
@triton.jit(do_not_specialize=[*VARYING, "summed"])
def _combine(
    rows,
    out,
    order,
    peers,
    epochs,
    failure,
    rank,
    tokens,
    most,
    timeout_ns: tl.int64,
    summed,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    PUSHERS: tl.constexpr,
    FLAGS: tl.constexpr,
    SUMMERS: tl.constexpr,
    SUMMED: tl.constexpr,
):
    """The first programs push rows, the others sum up the first tokens as theirs arrive.

    Rows go in groups, the same share of a group by each pusher, to all homes in turn. A summer
    waits until the group with the last row of its block of tokens is there.
    """
    p = tl.program_id(0)
    now, sound, patience = begin_move(p, epochs, failure, timeout_ns)
    r = tl.arange(0, RANKS)
    others = (r < W) & (r != rank)
    peer = tl.minimum(r, W - 1)
    here = tl.load(peers + rank)
    seen = tl.load(peers + W)
    if p < PUSHERS:
        for step in range(1, W):
            tell_begun(peers, (rank + step) % W, rank, sound, p, now, W)
        ready = ready_flag_of(here, peer, p, W)[:, None]
        alive = wait(
            ready, now, others[:, None], peer[:, None], now, patience, failure, seen, BEGINNING
        )
        alive = alive & sound
        for group in range(GROUPS):
            for step in range(1, W):
                home = (rank + step) % W
                n = tl.load(order + W + home)
                part = _part(n, PUSHERS)
                begin = (group * PUSHERS + p) * part
                end = tl.where(alive, tl.minimum(begin + part, n), begin)
                there = tl.load(peers + tl.where(alive, home, rank))
                source = rows + (home * most).to(tl.int64) * WIDTH
                target = rows_of(there, rows, W) + (rank * most).to(tl.int64) * WIDTH
                copy_rows(source, None, target, begin, end, WIDTH, ROWS, COLUMNS)
                filled = (group + 1) * PUSHERS * part >= n
                if (group * PUSHERS * part < n) | (group == 0):  # a release takes a microsecond
                    step_ = tl.where(filled, GROUPS - 1, group)
                    release(flag_of(there, rank, p), progress(now, step_))
    else:
        q = tl.minimum(tl.arange(0, FLAGS), PUSHERS - 1)
        flags = flag_of(here, peer[:, None], q[None, :])
        peer_q = peer[:, None] + 0 * q[None, :]
        wanted = others[:, None] & (q >= 0)[None, :]
        n = tl.load(order + peer)
        in_group = tl.maximum(_part(n, PUSHERS) * PUSHERS, 1)
        for block in range((p - PUSHERS) * SUMMED, summed, SUMMERS * SUMMED):
            token = block + tl.arange(0, SUMMED)
            owned = token < summed
            place = tl.load(
                sent_of_token(order, W) + token[:, None] * W + peer[None, :],
                mask=owned[:, None],
                other=-1,
            )
            last = tl.max(place, 0) - peer * most
            group = tl.minimum(tl.maximum(last, 0) // in_group, GROUPS - 1)
            number = progress(now, group)[:, None]
            needed = wanted & (last >= 0)[:, None]
            come = wait(flags, number, needed, peer_q, now, patience, failure, seen, ARRIVAL)
            patience = tl.where(come, patience, 0)
            for column in range(0, WIDTH, COLUMNS):
                c = column + tl.arange(0, COLUMNS)
                _sum(rows, out, order, here, rank, token, owned, c, W, WIDTH)
        number = progress(now, GROUPS - 1)
        wait(flags, number, wanted, peer_q, now, patience, failure, seen, ARRIVAL)
    end_move(p, epochs, now, PUSHERS + SUMMERS)


@bound
@triton.jit(do_not_specialize=["rank", "summed"])
def _sum_others(
    rows,
    out,
    order,
    peers,
    rank,
    summed,
    W: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (tokens from `summed` on, blocks of columns); the last first: what arrived last is still
    in the cache."""
    token = summed + tl.num_programs(0) - 1 - tl.program_id(0) + tl.arange(0, 1)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    _sum(rows, out, order, tl.load(peers + rank), rank, token, token >= 0, c, W, WIDTH)


@triton.jit
def _sum(rows, out, order, here, rank, token, owned, c, W: tl.constexpr, WIDTH: tl.constexpr):
    """This rank's own rows stand where the experts left them, the others in the window."""
    element = out.dtype.element_ty
    wide: tl.constexpr = tl.float64 if element == tl.float64 else tl.float32
    acc = tl.zeros([token.shape[0], c.shape[0]], wide)
    inside = owned[:, None] & (c < WIDTH)[None, :]
    for r in tl.static_range(W):
        place = tl.load(sent_of_token(order, W) + token * W + r, mask=owned, other=-1)
        from_ = tl.where(r == rank, rows, rows_of(here, rows, W))
        at = place.to(tl.int64)[:, None] * WIDTH + c[None, :]
        mask = inside & (place >= 0)[:, None]
        acc += tl.load(from_ + at, mask=mask, other=0.0).to(wide)
    at = token.to(tl.int64)[:, None] * WIDTH + c[None, :]
    tl.store(out + at, acc.to(element), mask=inside)


@triton.jit
def _part(n, PUSHERS: tl.constexpr):
    """Rows of a group that one pusher takes."""
    some = tl.minimum((n + PUSHERS - 1) // PUSHERS, AT_LEAST)
    return tl.maximum((n + GROUPS * PUSHERS - 1) // (GROUPS * PUSHERS), some)
