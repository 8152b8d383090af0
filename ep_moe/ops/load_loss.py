"""The balance loss of counts and probabilities that are already summed over tokens. On a GPU one
launch (`ep_moe.kernels.load_loss`)."""

from typing import NamedTuple

import torch
from torch import Tensor


class LoadLoss(NamedTuple):
    loss: Tensor  # (...)
    weight: Tensor  # (...,E): its derivative by p_sum


def load_loss(
    p_sum: Tensor,
    tokens_per_expert: Tensor,
    *,
    top_k: int,
    scale: float = 1.0,
    num_tokens: Tensor | int | None = None,
    counted_tokens: Tensor | int | None = None,
) -> LoadLoss:
    """scale * E / (K T_n T) * sum_i n_i * p_sum_i: with scale 1, 1 at perfect balance.

    p_sum (...,E) over T = num_tokens (...) tokens, tokens_per_expert n (...,E) of T_n =
    counted_tokens (...); by default T_n = sum(n) // K, and T = T_n -> in the dtype of p_sum. T = 0
    gives 0.

    E=2, K=1, n=[2,0], p_sum=[1.4,0.6]  ->  2 / (2*2) * 2 * 1.4 = 1.4
    """
    served = p_sum.dtype == torch.float32 and tokens_per_expert.dtype == torch.int64
    if not (p_sum.is_cuda and served):
        return load_loss_ref(
            p_sum,
            tokens_per_expert,
            top_k=top_k,
            scale=scale,
            num_tokens=num_tokens,
            counted_tokens=counted_tokens,
        )
    from ep_moe.kernels.load_loss import load_loss as kernel

    def of_rows(tokens: Tensor | int | None) -> Tensor | None:
        if tokens is None:
            return None
        return torch.as_tensor(tokens, device=p_sum.device).float().expand(p_sum.shape[:-1])

    numbers = (of_rows(num_tokens), of_rows(counted_tokens))
    return LoadLoss(*kernel(p_sum, tokens_per_expert, *numbers, top_k=top_k, scale=scale))


def load_loss_ref(
    p_sum: Tensor,
    tokens_per_expert: Tensor,
    *,
    top_k: int,
    scale: float = 1.0,
    num_tokens: Tensor | int | None = None,
    counted_tokens: Tensor | int | None = None,
) -> LoadLoss:
    def number(tokens: Tensor | int | None) -> Tensor:
        """In floating point: T^2 passes int32 at 46,341 tokens."""
        if tokens is None:
            tokens = tokens_per_expert.sum(-1) // top_k  # each has so many choices
        return torch.as_tensor(tokens, device=p_sum.device).to(p_sum.dtype).clamp_min(1)

    counted = number(counted_tokens)
    tokens = counted if num_tokens is None else number(num_tokens)
    share = top_k / p_sum.shape[-1]
    weight = (tokens_per_expert / (counted * tokens * share)[..., None] * scale).to(p_sum.dtype)
    return LoadLoss((weight * p_sum).sum(-1), weight)
