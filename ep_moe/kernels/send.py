"""Which ranks need a token, and what they are told about it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128


def destinations(ids: Tensor, experts_per_rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """(T,K) int32 -> (T,W) int32: w where rank w needs the token, else -1; and the choices of each
    rank (W,) int64"""
    ids = ids.contiguous()
    tokens, top_k = ids.shape
    out = torch.empty(tokens, ranks, dtype=torch.int32, device=ids.device)
    blocks = triton.cdiv(tokens, BLOCK)
    counts = out.new_empty(blocks, ranks)
    if blocks:
        _destinations[(blocks,)](
            ids,
            out,
            counts,
            tokens,
            EACH=experts_per_rank,
            W=ranks,
            K=top_k,
            CHOICES=triton.next_power_of_2(top_k),
            BLOCK=BLOCK,
            sanitize_overflow=False,
        )
    return out, counts.sum(0, dtype=torch.int64)


def message(
    ids: Tensor, gates: Tensor, token_of_sent: Tensor, offsets: Tensor, *, experts_per_rank: int
) -> Tensor:
    """ids (T,K) int32, gates (T,K), token_of_sent (N,) and offsets (W+1,) -> (N, K + the gates'
    words) int32; rows from offsets[-1] on are not written."""
    ids, words = ids.contiguous(), gates.contiguous().view(torch.int32)
    rows, ranks = len(token_of_sent), len(offsets) - 1
    top_k, width = ids.shape[1], ids.shape[1] + words.shape[1]
    out = words.new_empty(rows, width)
    if rows:
        _message[(triton.cdiv(rows, BLOCK),)](
            ids,
            words,
            token_of_sent,
            offsets,
            out,
            EACH=experts_per_rank,
            W=ranks,
            K=top_k,
            WIDTH=width,
            COLUMNS=triton.next_power_of_2(width),
            BLOCK=BLOCK,
        )
    return out


@triton.jit(do_not_specialize=["tokens"], debug=True)
def _destinations(
    ids,
    out,
    counts,
    tokens,
    EACH: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stops at an id that is no expert, which would go nowhere: the host does not look at ids."""
    block = tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, CHOICES)
    inside = (token < tokens)[:, None] & (k < K)[None, :]
    at = token.to(tl.int64)
    id = tl.load(ids + at[:, None] * K + k[None, :], mask=inside, other=-1)
    tl.device_assert((id >= -1) & (id < EACH * W), "ep_moe: an id that is neither -1 nor an expert")
    rank = tl.where(id < 0, -1, id // EACH)
    for w in range(W):
        here = tl.sum((rank == w).to(tl.int32), axis=1)
        tl.store(out + at * W + w, tl.where(here > 0, w, -1), mask=token < tokens)
        tl.store(counts + block * W + w, tl.sum(here))


@triton.jit
def _message(
    ids,
    words,
    token_of_sent,
    offsets,
    out,
    EACH: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owned = row < tl.load(offsets + W)
    token = tl.load(token_of_sent + row, mask=owned, other=0).to(tl.int64)
    first = tl.zeros([BLOCK], tl.int32)  # of the destination's experts
    for w in range(1, W):
        first += (row >= tl.load(offsets + w)).to(tl.int32) * EACH
    column = tl.arange(0, COLUMNS)
    is_id = (column < K)[None, :]
    mask = owned[:, None] & (column < WIDTH)[None, :]
    id = tl.load(ids + token[:, None] * K + column[None, :], mask=mask & is_id, other=-1)
    local = id - first[:, None]
    local = tl.where((local >= 0) & (local < EACH), local, -1)
    gate = words + token[:, None] * (WIDTH - K) + (column - K)[None, :]
    bits = tl.load(gate, mask=mask & (column >= K)[None, :], other=0)
    to = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(to, tl.where(is_id, local, bits), mask=mask)
