"""From logits to ids and gate weights, with one answer for every input on every device.

`torch.topk` is unspecified on ties and differs between CPU and CUDA, and bf16 logits tie often. So
selection sorts integer keys that order like the floats, stably: NaN greatest, -0 equal to +0, ties
to the lowest id, and lanes that may not be chosen below -inf, where no float could put them.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ep_moe.config import SelectionConfig
from ep_moe.errors import InputError
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
    inside the kept groups whatever the input. Rows with NaN, +inf or nothing but -inf have NaN
    weights, or with nan_policy uniform are treated as all-equal logits.
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
        ids = _select(logits, config, expert_bias)
    weights = gate_weights(logits, ids, config)
    if padding_mask is not None:
        ids = ids.masked_fill(padding_mask[:, None], -1)
        weights = weights.masked_fill(padding_mask[:, None], 0.0)
    return Routing(ids.int(), weights)


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


def gate_weights(logits: Tensor, ids: Tensor, config: SelectionConfig) -> Tensor:
    """Final weights of the chosen experts; differentiable in the logits.  (T,E), (T,K) int64 ->
    (T,K)

    softmax + renormalise needs the K chosen logits only. sigmoid + renormalise is written as a
    softmax of log-sigmoids, so that a sum of underflowing sigmoids is not 0/0.
    """
    chosen = logits.gather(1, ids)
    match config.scoring_func, config.renormalize:
        case "softmax", True:
            weights = chosen.softmax(dim=1)
        case "softmax", False:
            weights = logits.softmax(dim=1).gather(1, ids)
        case "sigmoid", True:
            weights = F.logsigmoid(chosen).softmax(dim=1)
        case _:
            weights = chosen.sigmoid()
    if (
        config.scoring_func == "softmax"
    ):  # a row without a softmax has no weights, whatever was chosen
        broken = ~logits.detach().amax(dim=1, keepdim=True).isfinite()
        weights = weights.masked_fill(broken, torch.nan)
    return weights * config.routed_scaling_factor


def dense_probabilities(logits: Tensor, config: SelectionConfig) -> Tensor:
    """p (T,E) of the balance loss: softmax, or each sigmoid over the sum of them; never biased,
    rows sum to 1."""
    if config.scoring_func == "softmax":
        return logits.softmax(dim=1)
    return F.logsigmoid(logits).softmax(dim=1)


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


def _select(logits: Tensor, config: SelectionConfig, expert_bias: Tensor | None) -> Tensor:
    """(T,E) fp32 or fp64 -> (T,K) int64"""
    tokens, num_experts = logits.shape
    groups = config.num_expert_group
    scores = logits
    if expert_bias is not None or config.group_score == "top2_sum":
        scores = logits.softmax(dim=1) if config.scoring_func == "softmax" else logits.sigmoid()
        if expert_bias is not None:
            scores = scores + expert_bias
    key = order_key(scores)
    if groups > 1:
        key_TGP = key.view(tokens, groups, num_experts // groups)
        if config.group_score == "max":
            group_key = key_TGP.amax(dim=2)
        else:
            best = _descending(key_TGP)[..., :2]
            group_key = order_key(scores.view_as(key_TGP).gather(2, best).sum(dim=2))
        kept = _descending(group_key)[:, : config.topk_group]
        dropped = torch.ones_like(group_key, dtype=torch.bool).scatter_(1, kept, False)
        below_all = torch.iinfo(key.dtype).min
        key = key_TGP.masked_fill(dropped[..., None], below_all).view(tokens, num_experts)
    return _descending(key)[:, : config.top_k]


def _descending(key: Tensor) -> Tensor:
    """Indices by (key descending, index ascending) along the last dimension."""
    return key.sort(dim=-1, descending=True, stable=True).indices
