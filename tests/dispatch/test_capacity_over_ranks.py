"""Each rank has a capacity of its own and sends what it keeps: nobody waits for sizes that no other
knows."""

import warnings
from functools import cache

import pytest

from ep_moe.routing import expert_capacity
from ep_moe.testing import run_ranks
from tests.dispatch.ep_cases import (
    Case,
    compare,
    config,
    expert_parallel_each,
    one_process,
)
from tests.routing.capacity_cases import NO_WARNING, POLICIES, with_capacity

pytestmark = NO_WARNING

TOKENS = ((8, 4), (5, 0), (1, 7))
DROPPING = {  # at most half of what comes to the first two experts, which all tokens want
    policy: {"capacity_factor": 1.0, "capacity_policy": policy, "renormalize_after_drop": True}
    for policy in POLICIES
}
CHANGES = {"no dropping": {}, "room for all": {"capacity_factor": 4.0}} | DROPPING
with warnings.catch_warnings(action="ignore"):
    CASES = {
        (tokens, name, padding): Case(
            tokens, config(num_experts=4, **changes), route_to=(0, 1), padding=padding
        )
        for tokens in TOKENS
        for name, changes in CHANGES.items()
        for padding in (False, True)
    }


@cache
def on_two_ranks():
    ranks = run_ranks(expert_parallel_each, 2, list(CASES.values()), "cpu")
    return dict(zip(CASES, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("cell", CASES, ids=str)
def test_every_rank_as_if_it_were_alone(cell):
    """Case BB-63, its whole kind: outputs, gradients and an optimizer step of one process that
    routes each rank's tokens by themselves; it ends, with and without dropping."""
    compare(CASES[cell], on_two_ranks()[cell], one_process(CASES[cell]))


def test_capacities_of_two_ranks():
    """Case BB-63: buffers of 2 and 1 made an all-to-all hang. They may differ here, since true
    sizes are exchanged."""
    alone = with_capacity(1.0, top_k=1)
    assert [expert_capacity(t, 4, alone).item() for t in (8, 4)] == [2, 1]
