"""The real DeepEP, of whatever generation is installed; ranks share a GPU where there are fewer."""

from dataclasses import replace

import pytest
import torch

from ep_moe.dispatch.needs import needs_of, unmet
from ep_moe.host import Host
from ep_moe.testing import run_ranks
from tests.dispatch.ep_cases import Case, compare, config, expert_parallel_each, one_process
from tests.dispatch.test_symm import captured_steps
from tests.dispatch.test_transports import Kind, check_cells, rank_moves

SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"
HOW = {"backend": "nccl", "timeout": 160.0, "environ": {SWITCH: "1"}}
MOE = config(hidden_size=256, transport="deepep", max_tokens_per_rank=20)
NARROW = replace(MOE, hidden_size=160, num_shared_experts=1)
CASES = {
    "balanced, 1": Case((20,), MOE),
    "balanced": Case((12, 12), MOE),
    "one is empty": Case((0, 17), MOE),
    "no tokens anywhere": Case((0, 0), MOE),
    "one expert takes all": Case((7, 4), replace(MOE, top_k=1, renormalize=False), route_to=(5,)),
    "padding, rows that are padded, shared experts": Case((10, 13), NARROW, padding=True),
    "checkpoint, uneven": Case((20, 3), MOE, checkpoint=True),
}
CASES = {name: replace(case, dtype=torch.bfloat16) for name, case in CASES.items()}

pytestmark = [pytest.mark.gpu, pytest.mark.deepep]


@pytest.fixture
def require_deepep(require_gpu, world_size):
    host = replace(Host.look(), switches=(SWITCH,))
    if missing := unmet(needs_of("deepep", host, world_size)):
        pytest.skip("; ".join(f"{need.what}: {need.has}, needs {need.needs}" for need in missing))


@pytest.mark.parametrize("world_size", [1, 2])
def test_moves(world_size, require_deepep):
    kind = Kind("deepep")
    check_cells(kind, run_ranks(rank_moves, world_size, kind, world_size, None, "cuda", **HOW))


@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_equal_one_process(world_size, require_deepep):
    cases = [case for case in CASES.values() if case.world_size == world_size]
    ranks = run_ranks(expert_parallel_each, world_size, cases, "cuda", **HOW)
    for i, case in enumerate(cases):
        alone = replace(case, config=replace(case.config, transport="auto"))
        compare(case, [got[i] for got in ranks], one_process(alone, "cuda"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_graph_equals_eager(world_size, require_deepep):
    ranks = run_ranks(captured_steps, world_size, "deepep", **HOW)
    assert all(all(same) for same in ranks)
