"""From logits to ids and gate weights, with one answer for every input on every device.

`torch.topk` is unspecified on ties and differs between CPU and CUDA, and bf16 logits tie often. So
selection sorts integer keys that order like the floats, stably: NaN greatest, -0 equal to +0, ties
to the lowest id, and lanes that may not be chosen below -inf, where no float could put them.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ep_moe import ops
from ep_moe.config import SelectionConfig
from ep_moe.errors import InputError
from ep_moe.routing.capacity import admit
from ep_moe.types import Routing


def grouped_topk(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int = 8,
    renormalize: bool = True,
    num_expert_group: int = 8,
    topk_group: int = 4,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Group-limited top-k with group score = max, by the signature that inference engines share.

    hidden_states (T, ...), of which only the length is looked at; gating_output (T,E) logits
    -> (topk_weights (T,topk) fp32, topk_ids (T,topk) int32), both by descending weight.

    Raises InputError when the lengths differ, ConfigError for a topology that cannot be chosen
    from.
    """
    if len(hidden_states) != len(gating_output):
        got = f"of {len(gating_output)} rows"
        raise InputError("gating_output", got, f"of {len(hidden_states)} rows, as hidden_states")
    config = SelectionConfig(
        top_k=topk,
        renormalize=renormalize,
        num_expert_group=num_expert_group,
        topk_group=topk_group,
        scoring_func=scoring_func,  # pyright: ignore[reportArgumentType]  # validated by the config
        routed_scaling_factor=routed_scaling_factor,
    )
    routing = select_experts(gating_output, config)
    return routing.gate_weights, routing.ids


def select_experts(
    logits: Tensor,
    config: SelectionConfig,
    *,
    expert_bias: Tensor | None = None,
    padding_mask: Tensor | None = None,
) -> Routing:
    """Score the groups, keep topk_group of them, take top_k of their experts, weigh, renormalise,
    scale.

    logits (T,E) of any float dtype; expert_bias (E,) takes part in the choice only; padding_mask
    (T,) bool, True = not a token -> Routing, ids by (key descending, id ascending), weights fp32
    (fp64 for fp64 logits).

    The key is the logit, as long as it orders like the score: without a bias and with group_score
    max. Otherwise it is the fp32 score (+ bias). ids of real tokens are valid, distinct and
    inside the kept groups whatever the input. Rows with NaN or nothing but -inf, and with softmax
    also +inf, have NaN weights; with nan_policy uniform all these and +inf are treated as all-equal
    logits.
    """
    if logits.ndim != 2:
        raise InputError("logits", f"of shape {tuple(logits.shape)}", "(tokens, num_experts)")
    if expert_bias is not None and (
        not expert_bias.is_floating_point() or expert_bias.shape != logits.shape[1:]
    ):
        got = f"{expert_bias.dtype} of shape {tuple(expert_bias.shape)}"
        raise InputError("expert_bias", got, f"floating-point of shape ({logits.shape[1]},)")
    if padding_mask is not None and (
        padding_mask.dtype != torch.bool or padding_mask.shape != logits.shape[:1]
    ):
        got = f"{padding_mask.dtype} of shape {tuple(padding_mask.shape)}"
        raise InputError("padding_mask", got, f"torch.bool of shape ({len(logits)},)")
    config.check_experts(logits.shape[1])
    logits = sanitize(logits, config, padding_mask)
    with torch.no_grad():
        choice = choose(logits, config, expert_bias=expert_bias, padding_mask=padding_mask)
    return weigh(logits, choice, config)


class Choice(NamedTuple):
    """What selection decided, before any weight.

    wanted  (T,K) int32, before any dropping; -1 = padding. The balance losses count these.
    ids     (T,K) int32, in effect; a dropped slot keeps the id whose score it had.
    kept    (T,K) bool: False = dropped, or padding.
    """

    wanted: Tensor
    ids: Tensor
    kept: Tensor


def choose(
    logits: Tensor,
    config: SelectionConfig,
    *,
    expert_bias: Tensor | None = None,
    padding_mask: Tensor | None = None,
    given: Tensor | None = None,
) -> Choice:
    """logits (T,E), sanitized -> who goes where; `given` ids (T,K) replace the selection."""
    ranked = _rank(logits, config, expert_bias)
    wanted = ranked[:, : config.top_k] if given is None else given.long()
    if padding_mask is not None:
        wanted = wanted.masked_fill(padding_mask[:, None], -1)
    ids, kept = wanted, wanted >= 0
    if config.capacity_factor is not None:
        tokens = len(logits) if padding_mask is None else (~padding_mask).sum()
        scores = SCORING[config.scoring_func].score(logits)
        ids, kept, _, _ = admit(wanted, scores, ranked, config, num_tokens=tokens)
    return Choice(wanted.int(), ids.int(), kept)


def weigh(logits: Tensor, choice: Choice, config: SelectionConfig) -> Routing:
    """Gate weights of a choice, 0 and id -1 where it was not kept."""
    weights = gate_weights(logits, choice.ids.long().clamp_min(0), choice.kept, config)
    return Routing(choice.ids.masked_fill(~choice.kept, -1), weights)


def sanitize(logits: Tensor, config: SelectionConfig, padding_mask: Tensor | None) -> Tensor:
    """fp32 (fp64) logits in which padding, and under nan_policy uniform the rows without a softmax,
    are all zero."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    dropped = padding_mask
    if config.nan_policy == "uniform":
        top = logits.detach().amax(dim=1)  # NaN if any is NaN
        broken = ~top.isfinite()
        dropped = broken if dropped is None else dropped | broken
    return logits if dropped is None else logits.masked_fill(dropped[:, None], 0.0)


def gate_weights(logits: Tensor, ids: Tensor, kept: Tensor, config: SelectionConfig) -> Tensor:
    """Final weights of the chosen experts, 0 where not kept; differentiable in the logits.

    logits (T,E), ids (T,K) int64 in [0,E), kept (T,K) bool -> (T,K). Renormalising is a softmax of
    the chosen log-scores: it needs no other logit, and a sum of underflowing sigmoids is not 0/0.
    """
    scoring = SCORING[config.scoring_func]
    log_scores = scoring.log_score(logits.gather(1, ids))
    if config.renormalize:
        weights = ops.softmax(log_scores)
    else:
        weights = scoring.score(logits).gather(1, ids)
    if config.renormalize_after_drop:
        # A row that lost all, or all but logits of -inf, has no softmax of what remains.
        weighs = kept & (log_scores.detach() > -torch.inf)
        gone = ~kept & weighs.any(dim=1, keepdim=True)
        remaining = ops.softmax(log_scores.masked_fill(gone, -torch.inf))
        weights = remaining * weights.sum(dim=1, keepdim=True)
    if config.scoring_func == "softmax":
        # A row without a softmax has no weights, whatever was chosen.
        broken = ~logits.detach().amax(dim=1, keepdim=True).isfinite()
        weights = weights.masked_fill(broken, torch.nan)
    return (weights * config.routed_scaling_factor).masked_fill(~kept, 0.0)


def dense_probabilities(logits: Tensor, config: SelectionConfig) -> Tensor:
    """p (T,E) of the balance loss: the scores over their sum; never biased, rows sum to 1."""
    return ops.softmax(SCORING[config.scoring_func].log_score(logits))


class Scoring(NamedTuple):
    """score: (T,E) logits -> (T,E); log_score: its logarithm, up to a constant per row."""

    score: Callable[[Tensor], Tensor]
    log_score: Callable[[Tensor], Tensor]


def _log_sqrtsoftplus(logits: Tensor) -> Tensor:
    """log(softplus(x)) / 2, where softplus underflows: x / 2"""
    # softplus(x) = exp(x) (1 - exp(x) / 2 + ...): exp(x) alone, once that is below the rounding
    low = logits < math.log(torch.finfo(logits.dtype).eps)
    log_softplus = ops.softplus(logits.masked_fill(low, 0.0)).log()
    return torch.where(low, logits, log_softplus) / 2


SCORING = {
    "softmax": Scoring(ops.softmax, lambda logits: logits),
    "sigmoid": Scoring(ops.sigmoid, F.logsigmoid),
    "sqrtsoftplus": Scoring(lambda logits: _log_sqrtsoftplus(logits).exp(), _log_sqrtsoftplus),
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


def _rank(logits: Tensor, config: SelectionConfig, expert_bias: Tensor | None) -> Tensor:
    """(T,E) fp32 or fp64 -> (T,C) int64: the experts of the kept groups, best first"""
    tokens, num_experts = logits.shape
    groups, in_group = config.num_expert_group, num_experts // config.num_expert_group
    scores = logits
    if expert_bias is not None or config.group_score == "top2_sum":
        scores = SCORING[config.scoring_func].score(logits)
        if expert_bias is not None:
            scores = scores + expert_bias
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


def _descending(key: Tensor) -> Tensor:
    """Indices by (key descending, index ascending) along the last dimension."""
    return key.sort(dim=-1, descending=True, stable=True).indices
