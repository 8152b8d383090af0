"""The gradient of grouped top-k in one launch, a program a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.launch import bound, next_power_of_2
from ep_moe.kernels.scores import exp, log_score, log_score_slope, softmax_parts

MINUS_INF = tl.constexpr(float("-inf"))


def select_backward(
    d_weights: Tensor,
    d_p_sum: Tensor | None,
    d_z_sum: Tensor | None,
    logits: Tensor | None,
    padding_mask: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    chosen: Tensor | None,
    *,
    num_experts: int,
    dtype: torch.dtype,
    scoring_func: str,
    renormalize: bool,
    scale: float,
    uniform: bool,
) -> Tensor:
    """-> d_logits (T,E) of `dtype`. d_p_sum (segments,E) and d_z_sum (segments,) come together;
    `logits` are needed with them, for a softmax that is not renormalised, and with `uniform`.
    """
    tokens, top_k = ids.shape
    d_logits = torch.empty(tokens, num_experts, dtype=dtype, device=ids.device)
    if logits is not None and logits.stride(1) != 1:
        logits = logits.contiguous()
    if tokens:
        tensors = (
            d_weights.contiguous(),
            None if d_p_sum is None else d_p_sum.contiguous(),
            None if d_z_sum is None else d_z_sum.contiguous(),
            logits,
            padding_mask,
            ids,
            weights,
            chosen,
            d_logits,
        )
        numbers = (
            0 if logits is None else logits.stride(0),
            max(tokens if d_p_sum is None else tokens // len(d_p_sum), 1),
            1.0 / scale if scale else 0.0,
        )
        constants = {
            "E": num_experts,
            "K": top_k,
            "SCORING": scoring_func,
            "RENORMALIZE": renormalize,
            "UNIFORM": uniform,
            "EXPERTS": next_power_of_2(num_experts),
            "CHOICES": next_power_of_2(top_k),
            "num_warps": 1 if num_experts <= 1024 else 4,
        }
        _select_backward((tokens, 1, 1), tensors, numbers, constants)
    return d_logits


@bound
@triton.jit(do_not_specialize=["stride", "tokens", "inverse_scale"])
def _select_backward(
    d_weights,
    d_p_sum,
    d_z_sum,
    logits,
    padding_mask,
    ids_in,
    weights_in,
    chosen_in,
    d_logits,
    stride: tl.int64,
    tokens,
    inverse_scale,
    E: tl.constexpr,
    K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    UNIFORM: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
):
    """Grid (T,). A dense row first, then the chosen over it. `tokens`: of a segment."""
    DENSE: tl.constexpr = d_p_sum is not None or (SCORING == "softmax" and not RENORMALIZE)
    row = tl.program_id(0).to(tl.int64)
    expert, choice = tl.arange(0, EXPERTS), tl.arange(0, CHOICES)
    live = True
    if padding_mask is not None:
        live = tl.load(padding_mask + row) == 0
    of_row = row * K + choice
    ids = tl.load(ids_in + of_row, mask=choice < K, other=-1)
    chosen = ids >= 0
    pull = tl.load(weights_in + of_row, mask=choice < K, other=0.0)
    share = pull * inverse_scale
    pull *= tl.load(d_weights + of_row, mask=choice < K, other=0.0)
    all_pull = tl.sum(pull)
    if RENORMALIZE:
        pull -= share * all_pull
    x = tl.zeros([CHOICES], tl.float32)
    if chosen_in is not None:
        x = tl.load(chosen_in + of_row, mask=choice < K, other=0.0)
    pull *= log_score_slope(x, SCORING)
    dense = tl.zeros([EXPERTS], tl.float32)
    if DENSE or UNIFORM:
        xs = tl.load(logits + row * stride + expert, mask=expert < E, other=MINUS_INF).to(
            tl.float32
        )
        top, total = softmax_parts((xs,))
        if UNIFORM:
            live = live & (tl.abs(top) < float("inf"))
            xs = tl.where(live, xs, 0.0)
    if DENSE:
        # The gradient of every logit x is slope(x) p(x) (pull_of_p - center) + level softmax(x).
        level = 0.0
        if SCORING == "softmax" and not RENORMALIZE:
            level -= all_pull
        center = 0.0
        p_top, p_total = top, total
        if d_p_sum is not None:
            segment = row // tokens
            log_sum = top + tl.log(total)
            level += 2.0 * log_sum * tl.load(d_z_sum + segment)
            if SCORING != "softmax":
                p_top, p_total = softmax_parts(
                    (tl.where(expert < E, log_score(xs, SCORING), MINUS_INF),)
                )
            pull_of_p = tl.load(d_p_sum + segment * E + expert, mask=expert < E, other=0.0)
            p = exp(log_score(xs, SCORING) - p_top) / p_total
            center = tl.sum(tl.where(expert < E, p * pull_of_p, 0.0))
            dense = log_score_slope(xs, SCORING) * p * (pull_of_p - center)
            p = exp(log_score(x, SCORING) - p_top) / p_total
            pull_of_p = tl.load(d_p_sum + segment * E + ids, mask=chosen, other=0.0)
            pull += log_score_slope(x, SCORING) * p * (pull_of_p - center)
        dense += level * exp(xs - top) / total
        pull += level * exp(x - top) / total
    out = d_logits + row * E
    tl.store(out + expert, tl.where(live, dense, 0.0), mask=expert < E)
    tl.debug_barrier()  # the chosen come after the row that they stand in
    tl.store(out + ids, tl.where(live, pull, 0.0), mask=chosen)
