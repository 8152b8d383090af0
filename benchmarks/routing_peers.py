"""Grouped top-k by other means: logits (T,E) to gate weights and ids, as plain torch writes it."""

from collections.abc import Callable

import torch
from torch import Tensor

from ep_moe import SelectionConfig
from ep_moe.ops import SCORING, dense_probabilities

Select = Callable[[Tensor], tuple[Tensor, Tensor]]


def eager(config: SelectionConfig, expert_bias: Tensor | None) -> Select:
    """The reference that inference engines share, with `torch.topk` and a mask of scores."""
    groups, score = config.num_expert_group, SCORING[config.scoring_func].score

    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = score(logits.float())
        biased = scores if expert_bias is None else scores + expert_bias
        if groups > 1:
            in_groups = biased.view(len(logits), groups, -1)
            if config.group_score == "max":
                group_scores = in_groups.amax(dim=-1)
            else:
                group_scores = in_groups.topk(2, dim=-1).values.sum(dim=-1)
            kept = group_scores.topk(config.topk_group, dim=-1, sorted=False).indices
            mask = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, kept, True)
            biased = in_groups.masked_fill(~mask[..., None], -torch.inf).flatten(1)
        ids = biased.topk(config.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if config.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * config.routed_scaling_factor, ids.int()

    return run


def compiled(config: SelectionConfig, expert_bias: Tensor | None) -> Select:
    """The same through `torch.compile`."""
    return torch.compile(eager(config, expert_bias), dynamic=False)


def loss_sums(logits: Tensor, config: SelectionConfig) -> tuple[Tensor, Tensor]:
    """Sums of probabilities and of squared log-sum-exps over the tokens."""
    logits = logits.float()
    return dense_probabilities(logits, config).sum(0), logits.logsumexp(dim=1).square().sum()


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order of slots, place of each slot, offsets) by a stable sort."""
    by_expert, order = ids.flatten().sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=ids.device)
    edges = torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype)
    return order, place, torch.searchsorted(by_expert, edges)


# To add a peer: a function above and its line here.
PEERS: dict[str, Callable[[SelectionConfig, Tensor | None], Select]] = {
    "eager": eager,
    "torch.compile": compiled,
}
