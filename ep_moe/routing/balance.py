"""How evenly tokens spread: the losses that push towards it and the figures that report it.

n_i = choices of expert i, before any dropping, real tokens only; p = unbiased probabilities
(`dense_probabilities`). Sum counts over ranks, batches or steps first for a figure of wider scope.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_moe import ops
from ep_moe.errors import InputError
from ep_moe.types import RoutingStats


def count_tokens(ids: Tensor, num_experts: int) -> Tensor:
    """n (..., E) int64 from ids (..., T, K); -1 counts nowhere, an expert without a token is 0."""
    return ops.count(ids, num_experts)


def aux_loss(
    probabilities: Tensor,
    tokens_per_expert: Tensor,
    *,
    top_k: int,
    num_tokens: Tensor | int,
    counted_tokens: Tensor | int | None = None,
) -> Tensor:
    """E / (K T_n T) * sum_i n_i * sum_t p_{t,i}: 1 at perfect balance for any K, larger when load
    follows probability.

    probabilities (..., T, E), zero in rows that are not tokens; tokens_per_expert n (..., E);
    num_tokens T (...) over which p is summed; counted_tokens T_n (...) over which n is, by default
    the same -> (...). T = 0 gives 0.

    Source: https://arxiv.org/abs/2101.03961, eq. 4, divided by K so that its scale does not depend
    on K; with n of a wider scope than p, https://arxiv.org/abs/2501.11873.
    """
    return ops.load_loss_ref(
        probabilities.sum(-2),
        tokens_per_expert,
        top_k=top_k,
        num_tokens=num_tokens,
        counted_tokens=num_tokens if counted_tokens is None else counted_tokens,
    ).loss


def load_loss(
    p_sum: Tensor,
    tokens_per_expert: Tensor,
    *,
    top_k: int,
    scale: float,
    num_tokens: Tensor | None = None,
) -> Tensor:
    """`aux_loss`, `scale` times, from p_sum (..., E), the sum of the probabilities over the tokens;
    by default those that n counts."""
    return _LoadLoss.apply(p_sum, tokens_per_expert, top_k, scale, num_tokens)


class _LoadLoss(torch.autograd.Function):
    """ops.load_loss with its backward."""

    @staticmethod
    def forward(
        ctx: Any, p_sum: Tensor, n: Tensor, top_k: int, scale: float, num_tokens: Tensor | None
    ) -> Tensor:
        loss, weight = ops.load_loss(p_sum, n, top_k=top_k, scale=scale, num_tokens=num_tokens)
        ctx.save_for_backward(weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return d_loss[..., None] * weight, None, None, None, None


def z_loss(logits: Tensor, *, is_token: Tensor | None = None) -> Tensor:
    """mean over tokens of logsumexp(logits)^2, https://arxiv.org/abs/2202.08906.

    logits (T,E), is_token (T,) bool -> scalar
    """
    square = logits.logsumexp(dim=1).square()
    if is_token is None:
        return square.sum() / max(len(logits), 1)
    return torch.where(is_token, square, 0.0).sum() / is_token.sum().clamp_min(1)


def total_aux(stats: Sequence[RoutingStats]) -> Tensor:
    """What to add to the loss: the mean over layers of their aux and z-losses (coefficients are
    already in). Raises InputError when no layer reported."""
    if not stats:
        rule = "the RoutingStats of at least one layer, which its call returned beside y"
        raise InputError("stats", "empty", rule)
    return torch.stack([s.aux_loss + s.z_loss for s in stats]).mean()


def max_vio(tokens_per_expert: Tensor) -> Tensor:
    """MaxVio = max(n) / mean(n) - 1: 0 at perfect balance, E - 1 when one expert takes all.

    (E,) -> scalar fp32. Source: https://arxiv.org/abs/2408.15664.
    """
    n = tokens_per_expert.float()
    return n.max() / n.mean().clamp_min(1 / len(n)) - (n.sum() > 0).float()


def dead_experts(tokens_per_expert: Tensor) -> Tensor:
    """How many experts no token chose. (E,) -> scalar int64"""
    return (tokens_per_expert == 0).sum()


def busiest_rank(tokens_per_expert: Tensor, num_ranks: int) -> Tensor:
    """Load of the busiest of num_ranks ranks over their mean: what a step waits for. (E,) -> scalar
    fp32, 1 at perfect balance, 0 without tokens."""
    per_rank = tokens_per_expert.view(num_ranks, -1).sum(1).float()
    return per_rank.max() / per_rank.mean().clamp_min(1 / num_ranks)


def load_change(before: Tensor, after: Tensor) -> Tensor:
    """Share of the load that moved to other experts between two batches: half the L1 distance of
    the two load distributions. (E,), (E,) -> scalar fp32 in [0, 1]; a batch without tokens counts
    as even load."""
    shares = []
    for n in (before.float(), after.float()):
        total = n.sum()
        shares.append(torch.where(total > 0, n / total.clamp_min(1), 1 / len(n)))
    return (shares[0] - shares[1]).abs().sum() / 2


def dropped_share(stats: RoutingStats) -> Tensor:
    """Share of the choices that a capacity turned away -> scalar fp32"""
    return stats.dropped_choices.float() / stats.tokens_per_expert.sum().clamp_min(1)


def updated_bias(expert_bias: Tensor, tokens_per_expert: Tensor, rate: float) -> Tensor:
    """b_i + rate * sign(mean(n) - n_i) in fp32; an expert at the mean keeps its bias.

    Loss-free balancing, https://arxiv.org/abs/2408.15664: n is of all ranks and micro-batches of
    one optimizer step.
    """
    n = tokens_per_expert.double()
    return expert_bias.float() + rate * (n.mean() - n).sign().float()
