"""Gradient clipping that counts every expert once.

torch's own would see only this rank's experts, get another norm on each rank, and scale the
replicated weights apart.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ep_moe.ops.numerics import accumulation_dtype
from ep_moe.training.expert_parameters import distinct_expert_parameters


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients so that their total norm is at most max_norm; returns the norm before,
    the same on all ranks.

    Replicated parameters count once (their gradients must already be reduced, as DDP leaves them),
    experts once each over the ranks that hold them. norm_type may be `math.inf`. Every rank of
    the group must call it. With a gradient scaler: after `scaler.unscale_(optimizer)`, and the
    scaler must be torch's ShardedGradScaler, or a rank whose experts overflow skips a step that the
    others take.
    """
    experts = distinct_expert_parameters(model)
    expert_ids = {id(e.parameter) for e in experts}
    dense = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in expert_ids]
    device = next(model.parameters()).device
    total = _power_sum(dense, norm_type, device)
    by_group = {id(e.ep.group): e.ep for e in experts}
    for key, ep in by_group.items():
        mine = [e.parameter.grad for e in experts if id(e.ep.group) == key]
        share = _power_sum([g for g in mine if g is not None], norm_type, device)
        if ep.group is not None:
            op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            dist.all_reduce(share, op=op, group=ep.group)
        total = torch.maximum(total, share) if math.isinf(norm_type) else total + share
    norm = total if math.isinf(norm_type) else total ** (1 / norm_type)
    norm = norm.to(accumulation_dtype(next(model.parameters()).dtype))
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm


def _power_sum(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """sum |g|^p over all, or max |g| for inf; a rank without gradients takes part with 0."""
    norms = [
        torch.linalg.vector_norm(g, norm_type, dtype=accumulation_dtype(g.dtype)).double()
        for g in grads
    ]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack(norms)
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()
