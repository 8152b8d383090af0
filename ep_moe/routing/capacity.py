"""How many tokens an expert takes from one rank, and what happens to the others.

Every policy works on the tokens of one rank: nothing is exchanged, so ranks may have different
numbers of tokens, or none.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from ep_moe.config import SelectionConfig


class Admitted(NamedTuple):
    """ids  (T,K) int64; with reroute of where a choice moved, or of what a dropped one was refused.
    Distinct in a token.
    kept    (T,K) bool; False = dropped.
    place   (T,K) int64: the choice's place among those of its expert that stayed; -1 = dropped.
    capacity  scalar int64.
    """

    ids: Tensor
    kept: Tensor
    place: Tensor
    capacity: Tensor


def expert_capacity(num_tokens: Tensor | int, num_experts: int, config: SelectionConfig) -> Tensor:
    """max(min_capacity, ceil(K * T / E * capacity_factor)), in integers: floats give 56 for 55.

    The factor is the decimal that its digits say, 1.1 and not the float beside it; or, with more
    than 9 digits, the simplest fraction there: 5/3 is five thirds. Products stay in 64 bits: a
    factor above E, with which nothing can be dropped, counts as E.
    T = the real tokens of this rank -> scalar int64, on T's device.
    """
    factor = Fraction(str(config.capacity_factor)).limit_denominator(10**9)
    factor = min(factor, Fraction(num_experts))
    tokens = torch.as_tensor(num_tokens, dtype=torch.int64)
    numerator = tokens * (config.top_k * factor.numerator)
    denominator = num_experts * factor.denominator
    exact = (numerator + denominator - 1).div(denominator, rounding_mode="floor")
    return exact.clamp_min(config.min_capacity)


def admit(
    ids: Tensor,
    scores: Tensor,
    ranked: Tensor,
    config: SelectionConfig,
    *,
    num_tokens: Tensor | int,
) -> Admitted:
    """Keep each expert within its capacity.

    ids (T,K) int64, -1 = no choice; scores (T,E), unbiased; ranked (T,C) int64: a token's
    candidates, best first (only reroute looks at it).
    """
    capacity = expert_capacity(num_tokens, scores.shape[1], config).to(ids.device)
    return POLICIES[config.capacity_policy](ids, scores, ranked, capacity)


def drop_by_position(ids: Tensor, scores: Tensor, ranked: Tensor, capacity: Tensor) -> Admitted:
    """The first tokens stay."""
    return _first(ids, _place(ids), capacity)


def drop_by_probability(ids: Tensor, scores: Tensor, ranked: Tensor, capacity: Tensor) -> Admitted:
    """The most probable stay, by the unbiased score; of equals the lower token."""
    chosen = scores.gather(1, ids.clamp_min(0))
    by_score = chosen.flatten().sort(descending=True, stable=True).indices
    return _first(ids, _place(ids, by_score), capacity)


def reroute(ids: Tensor, scores: Tensor, ranked: Tensor, capacity: Tensor) -> Admitted:
    """K rounds. In each, tokens in order take the best of their candidates that they do not have
    and that has room; a token that finds none loses that choice, the best that is left to it.

    Serial by definition: it runs on the host, with one sync on a GPU.
    """
    limit, num_experts = int(capacity), scores.shape[1]
    candidates = ranked.tolist()
    real = (ids[:, 0] >= 0).tolist()
    load = [0] * num_experts
    new_ids = [[-1] * ids.shape[1] for _ in candidates]
    place = [[-1] * ids.shape[1] for _ in candidates]
    for k in range(ids.shape[1]):
        for t, waiting in enumerate(candidates):
            if not real[t]:
                continue
            found = next((i for i, e in enumerate(waiting) if load[e] < limit), None)
            e = new_ids[t][k] = waiting.pop(found or 0)
            if found is not None:
                place[t][k] = load[e]
                load[e] += 1
    new = torch.tensor(new_ids, dtype=torch.int64, device=ids.device).view_as(ids)
    places = torch.tensor(place, dtype=torch.int64, device=ids.device).view_as(ids)
    return Admitted(new, places >= 0, places, capacity)


POLICIES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Admitted]] = {
    "position": drop_by_position,
    "probability": drop_by_probability,
    "reroute": reroute,
}


def _first(ids: Tensor, place: Tensor, capacity: Tensor) -> Admitted:
    kept = (ids >= 0) & (place < capacity)
    return Admitted(ids, kept, place.masked_fill(~kept, -1), capacity)


def _place(ids: Tensor, order: Tensor | None = None) -> Tensor:
    """How many choices of the same expert come before each one, in `order` of the flat slots.

    [[0],[1],[0],[0]] -> [[0],[0],[1],[2]]
    """
    flat = ids.flatten()
    order = torch.arange(len(flat), device=ids.device) if order is None else order
    by_expert = flat[order].sort(stable=True)
    sorted_ids, slots = by_expert.values, order[by_expert.indices]
    starts = torch.searchsorted(sorted_ids, sorted_ids)
    place = torch.empty_like(flat)
    place[slots] = torch.arange(len(flat), device=ids.device) - starts
    return place.view_as(ids)
