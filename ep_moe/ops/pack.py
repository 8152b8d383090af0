"""Order the (arrived row, local expert) pairs of a rank by expert. An index, not a copy. And count
them.

On a GPU three launches (`ep_moe.kernels.pack`), and a host sync unless it is known how many pairs
there are at most.
"""

import torch
from torch import Tensor

from ep_moe import check
from ep_moe.types import Packed


def pack(local_ids: Tensor, num_local_experts: int, max_packed: int | None = None) -> Packed:
    """Sort the pairs by local expert, then by arrived row (stable, so two runs agree).

    local_ids (A,K) int32, -1 = that choice lives elsewhere -> Packed with S = pairs that live here.
    A = 0 is fine. max_packed: pairs that live here at most, where known; on a GPU the packed rows
    are then as many, and those from offsets[-1] on stand for none (their indices are 0).

    [[0,-1],[1,0],[-1,1]], 2 experts -> arrived_of_packed [0,1,1,2], offsets [0,2,4] (more in
    `Packed`).
    """
    if check.wanted():
        check.local_ids(local_ids, num_local_experts)
    if local_ids.is_cuda:
        from ep_moe.kernels.pack import pack as kernel

        arrived, choice, packed, offsets = kernel(local_ids, num_local_experts)
        count = int(offsets[-1]) if max_packed is None else max_packed
        return Packed(
            arrived_of_packed=arrived[:count],
            choice_of_packed=choice[:count],
            packed_of_arrived=packed,
            offsets=offsets,
        )
    rows, choices = local_ids.shape
    flat = local_ids.reshape(-1).long()
    # An absent pair sorts behind every expert: -1 in front would shift each row by the number of
    # absentees.
    key = torch.where(flat < 0, num_local_experts, flat)
    by_expert, order = torch.sort(key, stable=True)
    experts = torch.arange(num_local_experts + 1, device=flat.device)
    offsets = torch.searchsorted(by_expert, experts).int()
    order = order[: int(offsets[-1])]
    packed_of_arrived = flat.new_full((rows * choices,), -1, dtype=torch.int32)
    packed_of_arrived[order] = torch.arange(len(order), dtype=torch.int32, device=flat.device)
    return Packed(
        arrived_of_packed=(order // choices).int(),
        choice_of_packed=(order % choices).int(),
        packed_of_arrived=packed_of_arrived.view(rows, choices),
        offsets=offsets,
    )


def count(ids: Tensor, num_experts: int) -> Tensor:
    """How often each expert is named.  ids (..., T, K), -1 = nowhere -> (..., E) int64"""
    if ids.is_cuda and ids.dtype == torch.int32 and ids.ndim == 2:
        from ep_moe.kernels.pack import count as kernel

        return kernel(ids.contiguous(), num_experts).sum(0, dtype=torch.int64)
    slots = torch.where(ids < 0, num_experts, ids).flatten(-2).long()
    counts = slots.new_zeros(*slots.shape[:-1], num_experts + 1)
    return counts.scatter_add_(-1, slots, torch.ones_like(slots))[..., :num_experts]
