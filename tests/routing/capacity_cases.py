"""Configs with a capacity, and what a token may choose from."""

from dataclasses import replace

import pytest
from torch import Tensor

from ep_moe import SelectionConfig, oracle

POLICIES = ("position", "probability", "reroute")
EACH_POLICY = pytest.mark.parametrize("policy", POLICIES)

# A factor of 1 or less is what most of these tests are about.
NO_WARNING = pytest.mark.filterwarnings("ignore:capacity_factor")


def with_capacity(factor, policy="position", **changes) -> SelectionConfig:
    fields = {"top_k": 2, "capacity_factor": factor, "capacity_policy": policy}
    return SelectionConfig(**(fields | changes))


def dropless(config: SelectionConfig) -> SelectionConfig:
    """The same without a capacity, and without what would have no effect then."""
    idle = {"capacity_policy": "position", "min_capacity": 0, "renormalize_after_drop": False}
    return replace(config, capacity_factor=None, **idle)


def candidates(logits: Tensor, config: SelectionConfig) -> list[list[int]]:
    """Of every token the experts of its kept groups, best first."""
    all_of_them = config.topk_group * (logits.shape[1] // config.num_expert_group)
    ranking = replace(dropless(config), top_k=all_of_them)
    return [oracle.choose(row, ranking) for row in logits.tolist()]
