"""Grouped top-k: from logits to ids and gate weights, with one answer for every input on every
device, and what the balance losses need of the same logits.

`torch.topk` is unspecified on ties and differs between CPU and CUDA, and bf16 logits tie often. So
selection sorts integer keys that order like the floats, stably: NaN greatest, -0 equal to +0, ties
to the lowest id, and lanes that may not be chosen below -inf, where no float could put them.

On a GPU forward and backward are one launch each (`ep_moe.kernels.select`); the torch reference
serves CPUs and fp64.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ep_moe.config import SelectionConfig
from ep_moe.ops.numerics import sigmoid, softmax, softplus


class Selected(NamedTuple):
    """ids           (T,K) int32 by (key descending, id ascending); -1 at padding.
    gate_weights  (T,K) fp32 (fp64 for fp64 logits) of all ids, 0 at padding.
    p_sum, z_sum  (segments,E), (segments,): sums over the tokens of a segment of their
                  `dense_probabilities` and of logsumexp(logits)^2; None unless asked for.
    chosen_logits (T,K) fp32, where the kernel's backward reads them.
    """

    ids: Tensor
    gate_weights: Tensor
    p_sum: Tensor | None
    z_sum: Tensor | None
    chosen_logits: Tensor | None


def select(
    logits: Tensor,
    config: SelectionConfig,
    *,
    expert_bias: Tensor | None = None,
    padding_mask: Tensor | None = None,
    given: Tensor | None = None,
    segments: int | None = None,
) -> Selected:
    """Score the groups, keep topk_group of them, take top_k of their experts, weigh, renormalise,
    scale.  logits (T,E), expert_bias (E,), padding_mask (T,) bool -> Selected

    given (T,K) int32: weigh these instead; -1 = nowhere. segments: sum over each of so many equal
    runs of tokens. Capacities are not looked at.
    """
    if not served_by_kernel(logits):
        ids = given
        if ids is None:
            ids = rank(logits, config, expert_bias, padding_mask)[:, : config.top_k].int()
        if padding_mask is not None:
            ids = ids.masked_fill(padding_mask[:, None], -1)
        return Selected(ids, *_follow(logits, ids, config, padding_mask, segments), None)
    from ep_moe.kernels.select import select_forward

    ids, weights, chosen_logits, sums = select_forward(
        logits,
        expert_bias=None if expert_bias is None else expert_bias.float().contiguous(),
        padding_mask=_as_bytes(padding_mask),
        given=None if given is None else given.contiguous(),
        top_k=config.top_k,
        groups=config.num_expert_group,
        kept_groups=config.topk_group,
        top2_sum=config.group_score == "top2_sum",
        scoring_func=config.scoring_func,
        renormalize=config.renormalize,
        scale=config.routed_scaling_factor,
        uniform=config.nan_policy == "uniform",
        segments=segments,
    )
    if sums is None:
        return Selected(ids, weights, None, None, chosen_logits)
    sums = sums.sum(1)
    return Selected(ids, weights, sums[:, :-1], sums[:, -1], chosen_logits)


def select_backward(
    d_weights: Tensor,
    d_p_sum: Tensor | None,
    d_z_sum: Tensor | None,
    *,
    selected: Selected,
    logits: Tensor | None,
    num_experts: int,
    dtype: torch.dtype,
    config: SelectionConfig,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """-> d_logits (T,E) of `dtype`. The logits may be None unless `needs_logits`.

    With w the gate weights, c their scale, g = d_weights, s the scores, q the shares of the K
    chosen in their sum, p those of all E, and the sums j over the chosen, f over all:
        renormalised  dx_i = c q_i (g_i - sum_j q_j g_j) (log s)'(x_i)    for the chosen
        softmax       dx_e = w_e g_e - s_e sum_j w_j g_j
        others        dx_i = w_i g_i (log s)'(x_i)                        for the chosen
        p_sum         dx_e = p_e (dP_e - sum_f p_f dP_f) (log s)'(x_e)
        z_sum         dx_e = 2 logsumexp(x) dZ softmax(x)_e
    """
    if not served_by_kernel(d_weights):
        assert logits is not None
        grads = (d_weights, d_p_sum, d_z_sum)
        return _select_backward_ref(*grads, selected, logits, config, padding_mask).to(dtype)
    from ep_moe.kernels.select_backward import select_backward as kernel

    return kernel(
        d_weights,
        d_p_sum,
        d_z_sum,
        logits,
        _as_bytes(padding_mask),
        selected.ids,
        selected.gate_weights,
        selected.chosen_logits,
        num_experts=num_experts,
        dtype=dtype,
        scoring_func=config.scoring_func,
        renormalize=config.renormalize,
        scale=config.routed_scaling_factor,
        uniform=config.nan_policy == "uniform",
    )


def served_by_kernel(logits: Tensor) -> bool:
    """Whether there are kernels for such logits, and for such gradients of gate weights."""
    return logits.is_cuda and logits.dtype != torch.float64


def needs_logits(logits: Tensor, config: SelectionConfig, segments: int | None) -> bool:
    """Whether the backward reads the logits again: where every expert of a row gets a gradient."""
    dense = segments is not None or (config.scoring_func == "softmax" and not config.renormalize)
    return dense or config.nan_policy == "uniform" or not served_by_kernel(logits)


def rank(
    logits: Tensor,
    config: SelectionConfig,
    expert_bias: Tensor | None = None,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """The experts of the kept groups, best first.  (T,E) -> (T,C) int64

    The key is the logit, as long as it orders like the score: without a bias and with group_score
    max. Otherwise it is the fp32 score (+ bias).
    """
    logits = sanitize(logits, config, padding_mask)
    tokens, num_experts = logits.shape
    groups, in_group = config.num_expert_group, num_experts // config.num_expert_group
    scores = logits
    if expert_bias is not None or config.group_score == "top2_sum":
        scores = SCORING[config.scoring_func].score(logits)
        if expert_bias is not None:
            scores = scores + expert_bias.to(scores.dtype)  # fp32 where the kernel's are
    key = order_key(scores)
    if groups > 1:
        key_TGP = key.view(tokens, groups, in_group)
        if config.group_score == "max":
            group_key = key_TGP.amax(dim=2)
        else:
            best = _descending(key_TGP)[..., :2]
            group_key = order_key(scores.view_as(key_TGP).gather(2, best).sum(dim=2))
        kept = _descending(group_key)[:, : config.topk_group]
        dropped = torch.ones_like(group_key, dtype=torch.bool).scatter_(1, kept, False)
        below_all = torch.iinfo(key.dtype).min
        key = key_TGP.masked_fill(dropped[..., None], below_all).view(tokens, num_experts)
    return _descending(key)[:, : config.topk_group * in_group]


def sanitize(logits: Tensor, config: SelectionConfig, padding_mask: Tensor | None) -> Tensor:
    """fp32 (fp64) logits in which padding, and under nan_policy uniform the rows without a softmax,
    are all zero."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    level = _level_rows(logits, config, padding_mask)
    return logits if level is None else logits.masked_fill(level[:, None], 0.0)


def _level_rows(
    logits: Tensor, config: SelectionConfig, padding_mask: Tensor | None
) -> Tensor | None:
    """(T,) bool: rows whose logits all count as 0. None = no row does."""
    if config.nan_policy != "uniform":
        return padding_mask
    broken = ~logits.detach().amax(dim=1).isfinite()  # NaN if any is NaN
    return broken if padding_mask is None else broken | padding_mask


def dense_probabilities(logits: Tensor, config: SelectionConfig) -> Tensor:
    """p (T,E) of the balance loss: the scores over their sum; never biased, rows sum to 1."""
    return softmax(SCORING[config.scoring_func].log_score(logits))


class Scoring(NamedTuple):
    """score: (T,E) logits -> (T,E); log_score: its logarithm, up to a constant per row; slope: the
    derivative of log_score."""

    score: Callable[[Tensor], Tensor]
    log_score: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _log_sqrtsoftplus(logits: Tensor) -> Tensor:
    """log(softplus(x)) / 2, where softplus underflows: x / 2"""
    low = _softplus_is_exp(logits)
    log_softplus = softplus(logits.masked_fill(low, 0.0)).log()
    return torch.where(low, logits, log_softplus) / 2


def _sqrtsoftplus_slope(logits: Tensor) -> Tensor:
    slope = sigmoid(logits) / softplus(logits)
    return torch.where(_softplus_is_exp(logits), 1.0, slope) / 2


def _softplus_is_exp(logits: Tensor) -> Tensor:
    """softplus(x) = exp(x) (1 - exp(x) / 2 + ...): exp(x) alone, once that is below the rounding"""
    return logits < math.log(torch.finfo(logits.dtype).eps)


SCORING = {
    "softmax": Scoring(softmax, lambda logits: logits, torch.ones_like),
    "sigmoid": Scoring(sigmoid, F.logsigmoid, lambda logits: sigmoid(-logits)),
    "sqrtsoftplus": Scoring(
        lambda logits: _log_sqrtsoftplus(logits).exp(), _log_sqrtsoftplus, _sqrtsoftplus_slope
    ),
}


def order_key(scores: Tensor) -> Tensor:
    """int32 (int64 for fp64) that order like the floats: NaN greatest, -0 = +0, and the least
    integer left free.

    [-inf, -0., 0., 1., inf, nan] -> strictly increasing but for the two zeros, all above iinfo.min
    """
    as_int, mask = (
        (torch.int64, 0x7FFF_FFFF_FFFF_FFFF)
        if scores.dtype == torch.float64
        else (torch.int32, 0x7FFF_FFFF)
    )
    bits = (scores + 0.0).view(as_int)  # -0 + 0 = +0
    key = torch.where(bits < 0, bits ^ mask, bits)
    return key.masked_fill(scores.isnan(), mask)


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)


def _follow(
    logits: Tensor,
    ids: Tensor,
    config: SelectionConfig,
    padding_mask: Tensor | None,
    segments: int | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """gate_weights, p_sum and z_sum of a choice.

    Renormalising is a softmax of the chosen log-scores: it needs no other logit, and a sum of
    underflowing sigmoids is not 0/0.
    """
    logits = sanitize(logits, config, padding_mask)
    scoring, chosen = SCORING[config.scoring_func], ids.long().clamp_min(0)
    if config.renormalize:
        weights = softmax(scoring.log_score(logits.gather(1, chosen)))
    else:
        weights = scoring.score(logits).gather(1, chosen)
    if config.scoring_func == "softmax":
        # A row without a softmax has no weights, whatever was chosen.
        broken = ~logits.amax(dim=1, keepdim=True).isfinite()
        weights = weights.masked_fill(broken, torch.nan)
    weights = (weights * config.routed_scaling_factor).masked_fill(ids < 0, 0.0)
    if segments is None:
        return weights, None, None
    p, z = dense_probabilities(logits, config), logits.logsumexp(dim=1).square()
    if padding_mask is not None:
        p, z = p.masked_fill(padding_mask[:, None], 0.0), z.masked_fill(padding_mask, 0.0)
    length = len(logits) // max(segments, 1)
    return weights, p.view(segments, length, p.shape[1]).sum(1), z.view(segments, length).sum(1)


def _select_backward_ref(
    d_weights: Tensor,
    d_p_sum: Tensor | None,
    d_z_sum: Tensor | None,
    selected: Selected,
    logits: Tensor,
    config: SelectionConfig,
    padding_mask: Tensor | None,
) -> Tensor:
    """The formulas of `select_backward`, with pull = w g."""
    level = _level_rows(logits, config, padding_mask)
    logits = sanitize(logits, config, padding_mask)
    scoring, chosen = SCORING[config.scoring_func], selected.ids.long().clamp_min(0)
    slope, weights = scoring.slope(logits), selected.gate_weights
    pull = weights * d_weights
    all_pull = pull.sum(dim=1, keepdim=True)
    if config.renormalize and config.routed_scaling_factor:
        pull = pull - weights / config.routed_scaling_factor * all_pull
    # An id of -1 adds its 0 to expert 0.
    d_logits = torch.zeros_like(logits).scatter_add(1, chosen, pull * slope.gather(1, chosen))
    if config.scoring_func == "softmax" and not config.renormalize:
        d_logits = d_logits - scoring.score(logits) * all_pull
    if d_p_sum is not None and d_z_sum is not None:
        length = len(logits) // max(len(d_p_sum), 1)
        d_p = d_p_sum.repeat_interleave(length, dim=0)
        d_z = d_z_sum.repeat_interleave(length)[:, None]
        p = dense_probabilities(logits, config)
        d_logits = d_logits + slope * p * (d_p - (p * d_p).sum(dim=1, keepdim=True))
        d_logits = d_logits + 2 * d_z * logits.logsumexp(dim=1, keepdim=True) * softmax(logits)
    return d_logits if level is None else d_logits.masked_fill(level[:, None], 0.0)


def _descending(key: Tensor) -> Tensor:
    """Indices by (key descending, index ascending) along the last dimension."""
    return key.sort(dim=-1, descending=True, stable=True).indices
