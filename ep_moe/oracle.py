"""The whole layer in one page: dense, one token at a time, one expert at a time, in the dtype of
its inputs (float64 to judge others by). Differentiable by plain autograd. It imports no op: what is
wrong there cannot be wrong here the same way.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ep_moe.config import MoEConfig
from ep_moe.types import Routing


def choose(scores: list[float], config: MoEConfig) -> list[int]:
    """ids of one token from its selection scores: best groups first, then best experts of the kept
    groups."""

    def rank(score: float) -> float:  # NaN is greatest
        return math.inf if math.isnan(score) else score

    def best(candidates: list[int], value: Mapping[int, float]) -> list[int]:
        # sorted() is stable: ties stay in ascending id; among +inf, NaN comes first
        return sorted(
            candidates, key=lambda i: (rank(value[i]), math.isnan(value[i])), reverse=True
        )

    size = len(scores) // config.num_expert_group
    by_id = dict(enumerate(scores))
    groups = [list(range(g * size, (g + 1) * size)) for g in range(config.num_expert_group)]
    group_score = {}
    for g, members in enumerate(groups):
        top = [scores[i] for i in best(members, by_id)]
        group_score[g] = top[0] if config.group_score == "max" else sum(top[:2])
    kept = best(list(range(len(groups))), group_score)[: config.topk_group]
    candidates = sorted(i for g in kept for i in groups[g])
    return best(candidates, by_id)[: config.top_k]


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda row: row.softmax(0),
    "sigmoid": lambda row: 1 / (1 + (-row).exp()),
    "sqrtsoftplus": lambda row: (1 + row.exp()).log().sqrt(),
}


def route(logits: Tensor, config: MoEConfig, expert_bias: Tensor | None = None) -> Routing:
    """logits (T,E), finite -> ids and gate weights (T,K) in the dtype of the logits"""
    all_ids, all_weights = [], []
    for row in logits:
        s = SCORES[config.scoring_func](row)
        key = row if expert_bias is None and config.group_score == "max" else s
        key = key if expert_bias is None else key + expert_bias
        ids = choose(key.tolist(), config)
        weights = s[ids]
        if config.renormalize:
            weights = weights / weights.sum()
        all_ids.append(ids)
        all_weights.append(weights * config.routed_scaling_factor)
    if not all_ids:
        empty = logits.new_zeros(0, config.top_k)
        return Routing(empty.int(), empty)
    return Routing(
        torch.tensor(all_ids, dtype=torch.int32, device=logits.device), torch.stack(all_weights)
    )


def mlp(
    x: Tensor, weights: Mapping[str, Tensor], prefix: str, activation: str, e: int | None = None
) -> Tensor:
    """One expert (or, with e None, the shared one) on one token x (H,)."""

    def get(name: str) -> Tensor:
        value = weights[f"{prefix}.{name}"]
        return value if e is None else value[e]

    def affine(v: Tensor, layer: str) -> Tensor:
        out = get(f"w_{layer}") @ v
        return out + get(f"b_{layer}") if f"{prefix}.b_{layer}" in weights else out

    pre = affine(x, "gate_up")
    gate, up = pre.chunk(2) if activation != "relu2" else (pre, pre)
    match activation:
        case "swiglu":
            h = gate * gate.sigmoid() * up
        case "geglu":
            h = gate * (1 + (gate / math.sqrt(2)).erf()) / 2 * up
        case "relu2":
            h = up.clamp(min=0) ** 2
        case _:  # swiglu_clamped
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            h = gate * (1.702 * gate).sigmoid() * (up + 1)
    return affine(h, "down")


def moe_layer(
    x: Tensor,
    weights: Mapping[str, Tensor],
    config: MoEConfig,
    *,
    routing: Routing | None = None,
    padding_mask: Tensor | None = None,
) -> Tensor:
    """y (T,H) from x (T,H) and the layer's weights by the names of its state dict, ALL E experts
    stacked.

    With `routing` the router is left out (compare outputs with fixed ids first, the router apart).
    """
    if routing is None:
        logits = x @ weights["router.weight"].t() + weights.get("router.bias", 0.0)
        log_temperature = weights.get("router.log_temperature")
        scale = config.temperature if log_temperature is None else log_temperature.exp()
        routing = route(logits / scale, config, weights.get("router.expert_bias"))
    rows = []
    for t in range(len(x)):
        y = torch.zeros_like(x[t])
        if padding_mask is None or not padding_mask[t]:
            for k, e in enumerate(routing.ids[t].tolist()):
                if e < 0:
                    continue
                gate = routing.gate_weights[t, k]
                if config.gate_on == "input":
                    y = y + mlp(gate * x[t], weights, "experts", config.activation, e)
                else:
                    y = y + gate * mlp(x[t], weights, "experts", config.activation, e)
            if "shared_experts.w_down" in weights:
                shared = mlp(x[t], weights, "shared_experts", config.activation)
                w_gate = weights.get("shared_experts.w_gate")
                y = y + (shared if w_gate is None else (w_gate @ x[t]).sigmoid() * shared)
        rows.append(y)
    return torch.stack(rows) if rows else torch.zeros_like(x)
