"""Selection with its gradient: what a token goes to, from logits or from a choice made before."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_moe import ops
from ep_moe.config import SelectionConfig
from ep_moe.errors import InputError
from ep_moe.measure import in_stage
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
    (fp64 for fp64 logits). With capacities, ids of dropped choices are -1.

    The key is the logit, as long as it orders like the score: without a bias and with group_score
    max. Otherwise it is the fp32 score (+ bias). ids of real tokens are valid, distinct and
    inside the kept groups whatever the input. With softmax, rows with NaN, +inf or nothing but -inf
    have NaN weights, and NaN gradients; of other scores, those weights that have no value. With
    nan_policy uniform all such rows are treated as all-equal logits, without a gradient.
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
    return select(logits, config, expert_bias=expert_bias, padding_mask=padding_mask).routing


class Choice(NamedTuple):
    """What selection decided, before any weight.

    wanted  (T,K) int32, before any dropping; -1 = padding. The balance losses count these.
    ids     (T,K) int32, in effect; a dropped slot keeps the id whose score it had.
    kept    (T,K) bool: False = dropped, or padding.
    """

    wanted: Tensor
    ids: Tensor
    kept: Tensor

    @property
    def may_drop(self) -> bool:
        """Whether anything but selection alone, which drops nothing, may have decided. Not data: a
        recomputation, which gets this very choice back, must build the same graph."""
        return self.ids is not self.wanted


class Selection(NamedTuple):
    """choice, and differentiable in the logits: the gate weights in `routing`, and p_sum and z_sum
    as in `ops.Selected`."""

    choice: Choice
    routing: Routing
    p_sum: Tensor | None
    z_sum: Tensor | None


def select(
    logits: Tensor,
    config: SelectionConfig,
    *,
    expert_bias: Tensor | None = None,
    padding_mask: Tensor | None = None,
    segments: int | None = None,
    forced: Tensor | None = None,
    decide: Callable[[Callable[[], Choice]], Choice] = lambda choose: choose(),
) -> Selection:
    """logits (T,E) -> Selection.

    forced (T,K): the choice before capacities. decide(choose) returns choose() or, for a
    recomputation or a replayed record, a choice made before. Choosing and weighing are one launch.
    """
    for name, value in {"expert_bias": expert_bias, "padding_mask": padding_mask}.items():
        if value is not None and value.device != logits.device:
            raise InputError(name, f"on {value.device}", f"on {logits.device}, as the logits")
    selected: ops.Selected | None = None
    options: dict[str, Any] = {"padding_mask": padding_mask, "segments": segments}

    def choose() -> Choice:
        nonlocal selected
        if config.capacity_factor is None and forced is None:
            selected = ops.select(logits.detach(), config, expert_bias=expert_bias, **options)
            return Choice(selected.ids, selected.ids, selected.ids >= 0)
        ranked = ops.rank(logits.detach(), config, expert_bias, padding_mask)
        wanted = ranked[:, : config.top_k] if forced is None else forced.long()
        if padding_mask is not None:
            wanted = wanted.masked_fill(padding_mask[:, None], -1)
        ids, kept = wanted, wanted >= 0
        if config.capacity_factor is not None:
            tokens = len(logits) if padding_mask is None else (~padding_mask).sum()
            scores = ops.SCORING[config.scoring_func].score(
                ops.sanitize(logits.detach(), config, padding_mask)
            )
            ids, kept, _, _ = admit(wanted, scores, ranked, config, num_tokens=tokens)
        return Choice(wanted.int(), ids.int(), kept)

    choice = decide(choose)
    if selected is None:
        selected = ops.select(logits.detach(), config, given=choice.ids, **options)
    ids = selected.ids
    weights, p_sum, z_sum = _Select.apply(logits, selected, config, padding_mask)
    if choice.may_drop:
        if config.renormalize_after_drop:
            weights = _spread(ops.sanitize(logits, config, padding_mask), choice, weights, config)
        weights, ids = weights.masked_fill(~choice.kept, 0.0), ids.masked_fill(~choice.kept, -1)
    return Selection(choice, Routing(ids, weights), p_sum, z_sum)


def _spread(logits: Tensor, choice: Choice, weights: Tensor, config: SelectionConfig) -> Tensor:
    """The sum of a token's weights, over those of its choices that were kept."""
    log_scores = ops.SCORING[config.scoring_func].log_score(
        logits.gather(1, choice.ids.long().clamp_min(0))
    )
    # A row that lost all, or all but logits of -inf, has no softmax of what remains.
    weighs = choice.kept & (log_scores.detach() > -torch.inf)
    gone = ~choice.kept & weighs.any(dim=1, keepdim=True)
    remaining = ops.softmax(log_scores.masked_fill(gone, -torch.inf))
    return remaining * weights.sum(dim=1, keepdim=True)


class _Select(torch.autograd.Function):
    """Gives what `ops.select` computed its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        selected: ops.Selected,
        config: SelectionConfig,
        padding_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        ctx.config, ctx.num_experts, ctx.dtype = config, logits.shape[1], logits.dtype
        ids, weights, p_sum, z_sum, chosen_logits = selected
        segments = None if p_sum is None else len(p_sum)
        kept_logits = logits if ops.needs_logits(logits, config, segments) else None
        ctx.save_for_backward(ids, weights, chosen_logits, kept_logits, padding_mask)
        return weights, p_sum, z_sum

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_weights: Tensor, d_p_sum: Tensor | None, d_z_sum: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ids, weights, chosen_logits, logits, padding_mask = ctx.saved_tensors
        with in_stage("route_backward"):
            d_logits = ops.select_backward(
                d_weights,
                d_p_sum,
                d_z_sum,
                selected=ops.Selected(ids, weights, None, None, chosen_logits),
                logits=logits,
                num_experts=ctx.num_experts,
                dtype=ctx.dtype,
                config=ctx.config,
                padding_mask=padding_mask,
            )
        return d_logits, None, None, None
