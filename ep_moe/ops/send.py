"""Which rows a rank sends where, and the small message of ids and gates that goes with them.

On a GPU five launches for the order and one for the message (`ep_moe.kernels.send`), none of which
waits for the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ep_moe.ops.pack import pack


class SendOrder(NamedTuple):
    """W=2, two experts a rank, ids [[0,1],[3,0]]:
    token_of_sent = [0,1,1]   sent_of_token = [[0,-1],[1,2]]   offsets = [0,2,3]   choices = [3,1]

    token_of_sent  (N,) int32, ordered by (destination, token). On a GPU there may be more, 0 from
                   offsets[-1] on.
    sent_of_token  (T,W) int32, -1 = that rank does not need this token.
    offsets        (W+1,) int32: rank w gets rows [offsets[w], offsets[w+1]).
    choices        (W,) int64: how many of the (T,K) choices live there.
    """

    token_of_sent: Tensor
    sent_of_token: Tensor
    offsets: Tensor
    choices: Tensor


def send_order(ids: Tensor, num_experts: int, ranks: int) -> SendOrder:
    """A token goes to a rank once, however many of its experts live there.

    ids (T,K) int32, -1 = nowhere; rank w has experts [w, w+1) * num_experts / ranks.
    """
    tokens, top_k = ids.shape
    if ids.is_cuda:
        from ep_moe.kernels.send import destinations

        ranks_of_token, choices = destinations(ids, num_experts // ranks, ranks)
    else:
        ranks_of_token, choices = destinations_ref(ids, num_experts // ranks, ranks)
    order = pack(ranks_of_token, ranks, tokens * min(ranks, top_k))
    return SendOrder(order.arrived_of_packed, order.packed_of_arrived, order.offsets, choices)


def destinations_ref(ids: Tensor, experts_per_rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """(T,K) -> (T,W) int32: w where rank w needs the token, else -1; and the choices of each rank
    (W,) int64"""
    rank_of_slot = ids.div(experts_per_rank, rounding_mode="floor")  # -1 stays -1
    numbers = torch.arange(ranks, dtype=torch.int32, device=ids.device)
    choices = (rank_of_slot[:, :, None] == numbers).sum(dim=1)  # (T,W)
    return torch.where(choices > 0, numbers, -1), choices.sum(dim=0)


def message(ids: Tensor, gates: Tensor, order: SendOrder, experts_per_rank: int) -> Tensor:
    """For each row that is sent the receiver's own expert ids, -1 for those of others, and the
    gates' bits.  ids (T,K), gates (T,K) fp32 or fp64 -> (N,2K) or (N,3K) int32"""
    if ids.is_cuda:
        from ep_moe.kernels.send import message as kernel

        return kernel(
            ids, gates, order.token_of_sent, order.offsets, experts_per_rank=experts_per_rank
        )
    tokens = order.token_of_sent
    rows = torch.arange(len(tokens), dtype=torch.int32, device=ids.device)
    destination = torch.searchsorted(order.offsets[1:], rows, right=True, out_int32=True)
    local = ids[tokens] - (destination * experts_per_rank)[:, None]
    local = local.masked_fill((local < 0) | (local >= experts_per_rank), -1).int()
    return torch.cat([local, gates[tokens].contiguous().view(torch.int32)], dim=1)
