"""How evenly tokens spread: the losses that push towards it and the figures that report it.

n_i = choices of expert i, before any dropping, real tokens only; p = unbiased probabilities
(`dense_probabilities`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ep_moe.types import RoutingStats


def count_tokens(ids: Tensor, num_experts: int) -> Tensor:
    """n (E,) int64 from ids (T,K); -1 counts nowhere, experts without a token are 0, never
    missing."""
    slots = torch.where(ids < 0, num_experts, ids).reshape(-1).long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, slots, torch.ones_like(slots))[:num_experts]


def aux_loss(
    probabilities: Tensor, tokens_per_expert: Tensor, *, top_k: int, num_tokens: Tensor | int
) -> Tensor:
    """E / (K T^2) * sum_i n_i * sum_t p_{t,i}: 1 at perfect balance for any K, larger when load
    follows probability.

    Micro-batch scope: n, p and T are this call's. probabilities (T,E), zero in rows that are not
    tokens; tokens_per_expert (E,); num_tokens T -> scalar. T = 0 gives 0.

    Source: https://arxiv.org/abs/2101.03961, eq. 4, divided by K so that its scale does not depend
    on K.
    """
    num_experts = probabilities.shape[1]
    tokens = torch.as_tensor(num_tokens, device=probabilities.device).to(probabilities.dtype)
    tokens = tokens.clamp_min(1)  # T^2 in floating point: it passes int32 at 46,341 tokens
    load = tokens_per_expert.to(probabilities.dtype)
    return (load * probabilities.sum(0)).sum() * num_experts / (top_k * tokens * tokens)


def z_loss(logits: Tensor, *, is_token: Tensor | None = None) -> Tensor:
    """mean over tokens of logsumexp(logits)^2, https://arxiv.org/abs/2202.08906.  logits (T,E),
    is_token (T,) bool"""
    square = logits.logsumexp(dim=1).square()
    if is_token is None:
        return square.sum() / max(len(logits), 1)
    return torch.where(is_token, square, 0.0).sum() / is_token.sum().clamp_min(1)


def total_aux(stats: Sequence[RoutingStats]) -> Tensor:
    """What to add to the loss: the mean over layers of their aux and z-losses (coefficients are
    already in)."""
    return torch.stack([s.aux_loss + s.z_loss for s in stats]).mean()


def max_vio(tokens_per_expert: Tensor) -> Tensor:
    """MaxVio = max(n) / mean(n) - 1: 0 at perfect balance, E - 1 when one expert takes all. (E,) ->
    scalar fp32

    Source: https://arxiv.org/abs/2408.15664. Sum the counts over ranks or batches first for a wider
    scope.
    """
    n = tokens_per_expert.float()
    return n.max() / n.mean().clamp_min(1 / len(n)) - (n.sum() > 0).float()


def dead_experts(tokens_per_expert: Tensor) -> Tensor:
    """How many experts no token chose. (E,) -> scalar int64"""
    return (tokens_per_expert == 0).sum()
