"""Whatever the sizes, the skew, the dtype and the number of ranks: equal to one process."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ep_moe.testing import run_ranks
from tests.dispatch.ep_cases import Case, compare, config, expert_parallel_each, one_process


@st.composite
def cases(draw, world_size):
    num_experts = world_size * draw(st.integers(1, 4))
    top_k = draw(st.integers(1, min(num_experts, 4)))
    scoring = draw(st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]))
    favourites = draw(st.lists(st.integers(0, num_experts - 1), max_size=2, unique=True))
    return Case(
        tokens=tuple(draw(st.sampled_from([0, 1, 2, 7, 19])) for _ in range(world_size)),
        config=config(
            hidden_size=draw(st.sampled_from([1, 3, 8, 33])),
            intermediate_size=draw(st.sampled_from([1, 5, 16])),
            num_experts=num_experts,
            top_k=top_k,
            scoring_func=scoring,
            renormalize=draw(st.booleans()) and top_k > 1,
            expert_bias=draw(st.booleans()),
            num_shared_experts=draw(st.integers(0, 1)),
            activation=draw(st.sampled_from(["swiglu", "geglu", "relu2", "swiglu_clamped"])),
            gate_on=draw(st.sampled_from(["output", "input"])),
            mlp_bias=draw(st.booleans()),
            numerics=draw(st.sampled_from(["fast", "exact"])),
        ),
        route_to=tuple(favourites),
        dtype=draw(st.sampled_from([torch.float64, torch.float32])),
        padding=draw(st.booleans()),
        checkpoint=draw(st.booleans()),
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@settings(
    max_examples=2,
    phases=[Phase.generate],  # every example starts processes: too slow to shrink
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_equals_one_process(world_size, data):
    drawn = data.draw(st.lists(cases(world_size), min_size=12, max_size=12))
    ranks = run_ranks(expert_parallel_each, world_size, drawn, "cpu", timeout=120.0)
    for i, case in enumerate(drawn):
        compare(case, [got[i] for got in ranks], one_process(case))
