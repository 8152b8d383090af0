"""EP = 1, 2, 4, 8 equal one process: outputs, every gradient, one optimizer step; and nothing
hangs."""

import pytest
import torch

from ep_moe.testing import run_ranks
from tests.dispatch.ep_cases import (
    Case,
    compare,
    config,
    expert_parallel,
    expert_parallel_each,
    one_process,
)

CASES = {
    "balanced, 2": Case((12, 12), config()),
    "balanced, 4": Case((9, 9, 9, 9), config()),
    "uneven, 2": Case((1, 17), config()),
    "uneven and empty, 4": Case((5, 0, 11, 1), config()),
    "uneven and empty, 8": Case(
        (5, 0, 11, 1, 3, 0, 2, 7), config(num_experts=16, top_k=3), checkpoint=True
    ),
    "no tokens anywhere": Case((0, 0), config()),
    "one expert takes all": Case((7, 4, 0, 6), config(top_k=1, renormalize=False), route_to=(5,)),
    "skewed to one rank": Case((8, 6), config(), route_to=(0, 1)),
    "K touches every rank": Case((6, 3, 5, 2), config(top_k=8)),
    "K touches every rank, 8": Case((6, 3, 5, 2, 4, 1, 7, 3), config(top_k=8)),
    "top 1 of 1 expert a rank": Case(
        (6, 3, 5, 2), config(num_experts=4, top_k=1, renormalize=False)
    ),
    "padding": Case((10, 13), config(), padding=True),
    "shared experts and biases": Case(
        (10, 3),
        config(num_shared_experts=1, mlp_bias=True, router_bias=True, activation="swiglu_clamped"),
    ),
    "DeepSeek-V3 form": Case(
        (10, 6),
        config(
            top_k=3,
            scoring_func="sigmoid",
            num_expert_group=4,
            topk_group=2,
            group_score="top2_sum",
            expert_bias=True,
            routed_scaling_factor=2.5,
        ),
    ),
    "sum": Case((6, 6), config(loss_reduction="sum")),
    "a loss that only touches y": Case((6, 6), config(), detached_loss=(1,)),
    "checkpoint, one empty rank": Case((8, 0), config(), route_to=(0, 1), checkpoint=True),
    "checkpoint, uneven, 4": Case((8, 1, 0, 5), config(), checkpoint=True),
    "fp32": Case((33, 20), config(), dtype=torch.float32),
    "bf16": Case((33, 20), config(), dtype=torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_one_process(case):
    ranks = run_ranks(expert_parallel, case.world_size, case)
    expected = one_process(case)
    compare(case, ranks, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_equals_one_process_on_gpu(world_size, require_gpu):
    """NCCL; where there are fewer GPUs than ranks, ranks share them."""
    cases = [case for case in CASES.values() if case.world_size == world_size]
    ranks = run_ranks(
        expert_parallel_each, world_size, cases, "cuda", backend="nccl", timeout=240.0
    )
    for i, case in enumerate(cases):
        compare(case, [got[i] for got in ranks], one_process(case, "cuda"))
