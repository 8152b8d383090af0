"""Which rows a rank sends where, and the small message of ids and gates that goes ahead of them.

A message is a block of lines for each rank, of a size that does not depend on the data: a line that
says how many lines are filled, then a line for each row that will follow. So one exchange of equal
blocks, which needs no counts, brings the counts too. On a GPU one launch makes all that is sent,
and one reads what arrived (`ep_moe.kernels.send`); neither waits for the host.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Numbers in the first line of a block: its rows, the choices among them, and how many lines the
# sender's largest block needs.
HEAD = 3
FEW = 8  # ranks to which that is simply T; among more, whom few rows of each rank go, it is counted


class SendOrder(NamedTuple):
    """W=2, two experts a rank, ids [[0,1],[3,0]]:
    token_of_sent = [0,1,1]   sent_of_token = [[0,-1],[1,2]]   offsets = [0,2,3]

    token_of_sent  (N,) int32, ordered by (destination, token). On a GPU there may be more, 0 from
                   offsets[-1] on.
    sent_of_token  (T,W) int32, -1 = that rank does not need this token.
    offsets        (W+1,) int32: rank w gets rows [offsets[w], offsets[w+1]).
    """

    token_of_sent: Tensor
    sent_of_token: Tensor
    offsets: Tensor


def empty_blocks(
    *blocks: int, lines: int, top_k: int, gates: torch.dtype, device: torch.device
) -> Tensor:
    """(..., 1 + lines, width) int32, not initialized: room for so many rows each."""
    width = max(top_k + top_k * gates.itemsize // 4, HEAD)
    return torch.empty(*blocks, 1 + lines, width, dtype=torch.int32, device=device)


def send_order(ids: Tensor, gates: Tensor, num_experts: int, blocks: Tensor) -> SendOrder:
    """A token goes to a rank once, however many of its experts live there. Rank w has experts
    [w, w+1) * num_experts / W.

    ids (T,K) int32 or int64, -1 = nowhere; gates (T,K) fp32 or fp64. Writes blocks (W, 1+lines,
    width), one for each rank: [rows, choices, lines that the largest block needs, or T among few
    ranks], then for each row the receiver's own expert ids, -1 for those of others, and the gates'
    bits. Rows that find no line are counted alone; lines behind the last row are not written.

    The example of `SendOrder` with gates a to d -> [[[2,3,2], [0,1,a,b], [-1,0,c,d]],
                                                     [[1,1,2], [1,-1,c,d], [?,?,?,?]]]
    """
    if ids.is_cuda:
        from ep_moe.kernels.send import send_order as kernel

        order = SendOrder(*kernel(ids, gates, num_experts, blocks))
    else:
        order = send_order_ref(ids, gates, num_experts, blocks)
    if len(blocks) > FEW:
        blocks[:, 0, 2] = order.offsets.diff().max()
    return order


def send_order_ref(ids: Tensor, gates: Tensor, num_experts: int, blocks: Tensor) -> SendOrder:
    tokens, (ranks, lines, _) = len(ids), blocks.shape
    each = num_experts // ranks
    rank_of_slot = ids.div(each, rounding_mode="floor")  # -1 stays -1
    numbers = torch.arange(ranks, dtype=torch.int32, device=ids.device)
    choices = (rank_of_slot[:, :, None] == numbers).sum(dim=1)  # (T,W)
    destination, token = (choices.T > 0).nonzero(as_tuple=True)  # by destination, then token
    bounds = torch.arange(ranks + 1, device=ids.device)
    offsets = torch.searchsorted(destination, bounds, out_int32=True)
    sent = torch.arange(len(token), dtype=torch.int32, device=ids.device)
    sent_of_token = torch.full((tokens, ranks), -1, dtype=torch.int32, device=ids.device)
    sent_of_token[token, destination] = sent

    blocks[:, 0, 0] = offsets.diff()
    blocks[:, 0, 1] = choices.sum(dim=0)
    blocks[:, 0, 2] = tokens
    local = ids[token] - (destination * each)[:, None]
    local = local.masked_fill((local < 0) | (local >= each), -1).int()
    message = torch.cat([local, gates[token].contiguous().view(torch.int32)], dim=1)
    line = 1 + sent - offsets[destination]
    fits = line < lines
    blocks[destination[fits], line[fits], : message.shape[1]] = message[fits]
    return SendOrder(token.int(), sent_of_token, offsets)


def open_blocks(
    blocks: Tensor, rows: Sequence[int], *, top_k: int, gates: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What arrived, in the order of its sources: blocks (W, 1+lines, width), whose first lines name
    `rows`, all of which found a line -> local ids (A,K) int32 and gates (A,K) of that dtype, where
    A = sum(rows)."""
    if blocks.is_cuda:
        from ep_moe.kernels.send import open_blocks as kernel

        return kernel(blocks, rows, top_k=top_k, gates=gates)
    return open_blocks_ref(blocks, rows, top_k=top_k, gates=gates)


def open_blocks_ref(
    blocks: Tensor, rows: Sequence[int], *, top_k: int, gates: torch.dtype
) -> tuple[Tensor, Tensor]:
    filled = torch.cat([block[1 : 1 + n] for block, n in zip(blocks, rows, strict=True)])
    end = top_k + top_k * gates.itemsize // 4
    words = filled[:, top_k:end].clone(memory_format=torch.contiguous_format)
    return filled[:, :top_k].contiguous(), words.view(gates)
