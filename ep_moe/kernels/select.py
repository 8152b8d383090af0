"""Grouped top-k in one launch: one warp a token, registers only.

A row of logits is cut into chunks, vectors of LANES with one logit a lane. A group of P experts has
J = ceil(P / LANES) chunks. What combines chunks is written out over tuples and stays in a lane;
what combines lanes is a reduction over integers, which is one instruction on a warp.

The keys are int32 that order like the floats (`ops.select.order_key`); LEAST is below that of -inf.
To pick, every lane sorts what it has of the kept groups; a pick is then the greatest head of a
lane, of equals the one with the lowest id.

Multiplications and additions are not fused, or a score would round differently where a bias is
added to it, and a weight where a mask is given.

Measured (benchmarks/NOTES.md): two or four tokens a program lose a quarter at large T and half at
small; persistent programs lose, too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.device import multiprocessors
from ep_moe.kernels.launch import bound, cdiv, next_power_of_2
from ep_moe.kernels.scores import (
    GREATEST,
    exp,
    fold_max,
    from_key,
    log_score,
    order_key,
    score,
    softmax_parts,
)

LEAST = tl.constexpr(-(2**31))
INF = tl.constexpr(float("inf"))
MINUS_INF = tl.constexpr(float("-inf"))

WARP = tl.constexpr(32)
PROGRAMS_PER_SM = 24  # of a launch that sums over tokens: each leaves a partial sum


def select_forward(
    logits: Tensor,
    *,
    expert_bias: Tensor | None,
    padding_mask: Tensor | None,
    given: Tensor | None,
    top_k: int,
    groups: int,
    kept_groups: int,
    top2_sum: bool,
    scoring_func: str,
    renormalize: bool,
    scale: float,
    uniform: bool,
    segments: int | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """logits (T,E) fp32, bf16 or fp16 -> ids (T,K) int32, gate weights (T,K) fp32, where the
    backward will read them the logits of the chosen (T,K) fp32, and with `segments` (of T /
    segments tokens each) partial sums for the losses (segments,programs,E+1) fp32: of each expert's
    probabilities, and last of logsumexp^2.

    padding_mask (T,) uint8, 1 = padding. given (T,K) int32: weigh these instead; -1 = nowhere.
    """
    tokens, num_experts = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    ratios_suffice = scoring_func == "softmax" and renormalize and segments is None
    chosen = None if ratios_suffice else torch.empty_like(weights)
    sums, grid, length = None, (tokens, 1, 1), tokens
    if segments is not None:
        length = tokens // max(segments, 1)
        wanted = cdiv(PROGRAMS_PER_SM * multiprocessors(logits.device), max(segments, 1))
        programs = max(min(length, wanted), 1)
        sums = weights.new_empty(segments, programs, num_experts + 1)
        grid = (segments, programs, 1)  # the second is at most 65,535
    if 0 not in grid:
        constants = {
            "E": num_experts,
            "K": top_k,
            "GROUPS": groups,
            "KEPT": kept_groups,
            "TOP2": top2_sum,
            "SCORING": scoring_func,
            "RENORMALIZE": renormalize,
            "UNIFORM": uniform,
            "LANES": max(WARP.value, *map(next_power_of_2, (top_k, groups))),
            "num_warps": 1,
            "enable_fp_fusion": False,
        }
        tensors = (logits, expert_bias, padding_mask, given, ids, weights, chosen, sums)
        numbers = (logits.stride(0), length, float(scale))
        _select_forward(grid, tensors, numbers, constants)
    return ids, weights, chosen, sums


@bound
@triton.jit(do_not_specialize=["stride", "tokens", "scale"])
def _select_forward(
    logits,
    expert_bias,
    padding_mask,
    given,
    ids_out,
    weights_out,
    chosen_out,
    sums_out,
    stride: tl.int64,
    tokens,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    TOP2: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    UNIFORM: tl.constexpr,
    LANES: tl.constexpr,
):
    """Grid (tokens,); or with sums (segments, programs), each segment of `tokens` rows."""
    index = tl.program_id(0).to(tl.int64)  # of the token, or of the segment
    if sums_out is None:
        _ = _select_row(
            index, logits, expert_bias, padding_mask, given, ids_out, weights_out,
            chosen_out, stride, scale, E, K, GROUPS, KEPT, TOP2, SCORING, RENORMALIZE, UNIFORM,
            False, LANES,
        )  # fmt: skip
    else:
        lane = tl.arange(0, LANES)
        chunks: tl.constexpr = GROUPS * ((E // GROUPS + LANES - 1) // LANES)
        p_sum = ()
        for _ in tl.static_range(chunks):
            p_sum = p_sum + (tl.zeros([LANES], tl.float32),)
        z_sum = 0.0
        for i in range(tl.program_id(1), tokens, tl.num_programs(1)):
            row = index * tokens + i
            xs, top, total, live = _select_row(
                row, logits, expert_bias, padding_mask, given, ids_out, weights_out, chosen_out,
                stride, scale, E, K, GROUPS, KEPT, TOP2, SCORING, RENORMALIZE, UNIFORM, True, LANES,
            )  # fmt: skip
            log_sum = top + tl.log(total)
            z_sum += tl.where(live, log_sum * log_sum, 0.0)
            if SCORING != "softmax":
                log_scores = ()
                for c in tl.static_range(chunks):
                    log_scores = log_scores + (log_score(xs[c], SCORING),)
                xs = log_scores
                top, total = softmax_parts(xs)
            new_sum = ()
            for c in tl.static_range(chunks):
                p = exp(xs[c] - top) / total
                new_sum = new_sum + (p_sum[c] + tl.where(live, p, 0.0),)
            p_sum = new_sum
        out = sums_out + (index * tl.num_programs(1) + tl.program_id(1)) * (E + 1)
        for c in tl.static_range(chunks):
            first, count = _chunk(c, E, GROUPS, LANES)
            tl.store(out + first + lane, p_sum[c], mask=lane < count)
        tl.store(out + E, z_sum)


@triton.jit
def _select_row(
    row,
    logits,
    expert_bias,
    padding_mask,
    given,
    ids_out,
    weights_out,
    chosen_out,
    stride,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    TOP2: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    UNIFORM: tl.constexpr,
    SUMS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One token -> its logits in chunks, their maximum, the sum of exp(x - maximum), and whether it
    is no padding."""
    J: tl.constexpr = (E // GROUPS + LANES - 1) // LANES
    SCORE_KEY: tl.constexpr = TOP2 or expert_bias is not None
    BY_LOGIT: tl.constexpr = given is None and not SCORE_KEY
    DENSE: tl.constexpr = SUMS or (SCORING == "softmax" and not (BY_LOGIT and RENORMALIZE))
    lane = tl.arange(0, LANES)
    live = True
    if padding_mask is not None:
        live = tl.load(padding_mask + row) == 0
    xs = ()
    for c in tl.static_range(GROUPS * J):
        first, count = _chunk(c, E, GROUPS, LANES)
        x = tl.load(logits + row * stride + first + lane, mask=lane < count, other=MINUS_INF)
        xs = xs + (x.to(tl.float32),)
    level = not live  # all logits count as 0
    if UNIFORM:
        top, _ = softmax_parts(xs)
        level = level | ~(tl.abs(top) < INF)
    if UNIFORM or padding_mask is not None:
        zeroed = ()
        for c in tl.static_range(GROUPS * J):
            first, count = _chunk(c, E, GROUPS, LANES)
            zeroed = zeroed + (tl.where(level & (lane < count), 0.0, xs[c]),)
        xs = zeroed
    top = 0.0
    total = 1.0
    if DENSE:
        top, total = softmax_parts(xs)

    picked = lane < K
    somewhere = picked
    if given is None:
        keys = ()
        experts = ()
        for c in tl.static_range(GROUPS * J):
            first, count = _chunk(c, E, GROUPS, LANES)
            key = xs[c]
            if SCORE_KEY:
                key = score(key, top, total, SCORING)
            if expert_bias is not None:
                key += tl.load(expert_bias + first + lane, mask=lane < count, other=0.0)
            keys = keys + (tl.where(lane < count, order_key(key), LEAST),)
            experts = experts + (first + lane,)
        if KEPT < GROUPS:
            scores = _group_scores(keys, lane, GROUPS, TOP2, E // GROUPS)
            kept = _kept_groups(scores, lane, KEPT)
            kept_keys = ()
            kept_experts = ()
            for c in tl.static_range(KEPT * J):
                key = keys[c]
                for g in tl.static_range(c // J + 1, c // J + GROUPS - KEPT + 1):
                    key = tl.where(kept[c // J] == g, keys[g * J + c % J], key)
                kept_keys = kept_keys + (key,)
                kept_experts = kept_experts + (kept[c // J] * (E // GROUPS) + c % J * LANES + lane,)
            keys = kept_keys
            experts = kept_experts
        ids, key, best_key = _pick(keys, experts, lane, K)
        if SCORE_KEY:
            x = tl.load(logits + row * stride + ids, mask=picked, other=0.0).to(tl.float32)
            x = tl.where(level, 0.0, x)
        else:
            x = from_key(key)
    else:
        ids = tl.load(given + row * K + lane, mask=picked, other=0)
        somewhere = ids >= 0
        ids = tl.maximum(ids, 0)
        x = tl.load(logits + row * stride + ids, mask=picked, other=0.0).to(tl.float32)
        x = tl.where(level, 0.0, x)

    x = tl.where(picked, x, MINUS_INF)
    if RENORMALIZE:
        log_weight = log_score(x, SCORING)
        if BY_LOGIT:
            best = log_score(from_key(best_key), SCORING)
        else:
            best = from_key(tl.max(order_key(log_weight)))
        weight = tl.where(picked, exp(log_weight - best), 0.0)
        if K <= WARP:
            # All are in [0,1] and one is 1: in fixed point their sum is one instruction.
            ONE: tl.constexpr = 2**30 // triton.next_power_of_2(K)
            weight = weight * (ONE / tl.sum((weight * ONE).to(tl.int32)).to(tl.float32))
        else:  # where fixed point is coarser than fp32
            weight = weight / tl.sum(weight)
        if SCORING == "softmax" and not BY_LOGIT:
            best = top  # a row without a softmax has no weights, whatever was chosen
        weight = tl.where(tl.abs(best) < INF, weight, float("nan"))
    else:
        weight = score(x, top, total, SCORING)
    somewhere = somewhere & live
    out = row * K + lane
    tl.store(ids_out + out, tl.where(somewhere, ids, -1), mask=picked)
    tl.store(weights_out + out, tl.where(somewhere, weight * scale, 0.0), mask=picked)
    if chosen_out is not None:
        tl.store(chosen_out + out, x, mask=picked)
    return xs, top, total, live


@triton.jit
def _chunk(c: tl.constexpr, E: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """(first expert, number of experts, where lanes beyond it are idle) of a chunk."""
    P: tl.constexpr = E // GROUPS
    J: tl.constexpr = (P + LANES - 1) // LANES
    return c // J * P + c % J * LANES, P - c % J * LANES


@triton.jit
def _group_scores(keys, lane, GROUPS: tl.constexpr, TOP2: tl.constexpr, GROUP_SIZE: tl.constexpr):
    """The key of each group's score, a tuple of scalars: its greatest, or the sum of its two
    greatest."""
    J: tl.constexpr = len(keys) // GROUPS
    bests = ()
    for g in tl.static_range(GROUPS):
        bests = bests + (tl.max(fold_max(keys[g * J : (g + 1) * J])),)
    if not TOP2 or GROUP_SIZE == 1:
        return bests
    best = tl.where(lane < 0, 0, LEAST)  # lane g adds for group g
    second = best
    for g in tl.static_range(GROUPS):
        below = ()
        copies = tl.zeros_like(lane)
        for c in tl.static_range(g * J, (g + 1) * J):
            below = below + (tl.where(keys[c] == bests[g], LEAST, keys[c]),)
            copies += (keys[c] == bests[g]).to(tl.int32)
        next_best = tl.where(tl.sum(copies) > 1, bests[g], tl.max(fold_max(below)))
        best = tl.where(lane == g, bests[g], best)
        second = tl.where(lane == g, next_best, second)
    sums = order_key(from_key(best) + from_key(second))
    scores = ()
    for g in tl.static_range(GROUPS):
        scores = scores + (tl.max(tl.where(lane == g, sums, LEAST)),)
    return scores


@triton.jit
def _kept_groups(scores, lane, KEPT: tl.constexpr):
    """The numbers of the KEPT best groups, of equals the first, in ascending order: scalars."""
    mine = tl.where(lane < 0, 0, LEAST)
    for g in tl.static_range(len(scores)):
        mine = tl.where(lane == g, scores[g], mine)
    rank = tl.zeros_like(lane)
    for g in tl.static_range(len(scores)):
        rank += ((scores[g] > mine) | ((scores[g] == mine) & (lane > g))).to(tl.int32)
    kept = ()
    for r in tl.static_range(KEPT):
        kept = kept + (tl.min(tl.where(rank == r, lane, GREATEST)),)
    for turn in tl.static_range(KEPT):
        swapped = ()
        for i in tl.static_range(KEPT):
            if i % 2 == turn % 2 and i + 1 < KEPT:
                a, b = kept[i], kept[i + 1]
                swapped = swapped + (tl.minimum(a, b), tl.maximum(a, b))
            elif i % 2 == turn % 2 or i == 0:
                swapped = swapped + (kept[i],)
        kept = swapped
    return kept


@triton.jit
def _sort_in_lanes(keys, experts):
    """Each lane's keys in descending order, equal ones as they stood: odd-even transposition."""
    for turn in tl.static_range(len(keys)):
        new_keys = ()
        new_experts = ()
        for i in tl.static_range(len(keys)):
            if i % 2 == turn % 2 and i + 1 < len(keys):
                a, b = keys[i], keys[i + 1]
                new_keys = new_keys + (tl.maximum(a, b), tl.minimum(a, b))
                e, f = experts[i], experts[i + 1]
                new_experts = new_experts + (tl.where(b > a, f, e), tl.where(b > a, e, f))
            elif i % 2 == turn % 2 or i == 0:
                new_keys = new_keys + (keys[i],)
                new_experts = new_experts + (experts[i],)
        keys = new_keys
        experts = new_experts
    return keys, experts


@triton.jit
def _pick(keys, experts, lane, K: tl.constexpr):
    """The K best by (key descending, id ascending): id and key of the k-th in lane k, and the first
    key."""
    keys, experts = _sort_in_lanes(keys, experts)
    ids = tl.zeros_like(lane)
    chosen = tl.zeros_like(lane)
    for k in tl.static_range(K):
        best = tl.max(keys[0])
        expert = tl.min(tl.where(keys[0] == best, experts[0], GREATEST))
        if k == 0:
            best_key = best
        ids = tl.where(lane == k, expert, ids)
        chosen = tl.where(lane == k, best, chosen)
        won = experts[0] == expert
        new_keys = ()
        new_experts = ()
        for i in tl.static_range(1, len(keys)):
            new_keys = new_keys + (tl.where(won, keys[i], keys[i - 1]),)
            new_experts = new_experts + (tl.where(won, experts[i], experts[i - 1]),)
        keys = new_keys + (tl.where(won, LEAST, keys[len(keys) - 1]),)
        experts = new_experts + (experts[len(experts) - 1],)
    return ids, chosen, best_key
