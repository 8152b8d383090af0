"""The real DeepEP; ranks share a GPU where there are fewer. What is installed serves by its newest
class, and V2.1 also by V1's, which it has kept."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ep_moe.dispatch import deepep_buffers
from ep_moe.dispatch.needs import needs_of, unmet
from ep_moe.host import Host
from ep_moe.testing import run_ranks
from tests.dispatch.ep_cases import (
    Case,
    compare,
    config,
    expert_parallel_each,
    make_layer,
    one_process,
)
from tests.dispatch.test_deepep import EXACT, of_shares, over_deepep
from tests.dispatch.test_symm import captured_steps
from tests.dispatch.test_transports import Kind, check_cells, rank_moves

SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"
HOW = {
    "newest": {"backend": "nccl", "timeout": 160.0, "environ": {SWITCH: "1"}},
    "v1": {"timeout": 160.0},
}
MOE = config(hidden_size=256, transport="deepep", max_tokens_per_rank=20)
NARROW = replace(MOE, hidden_size=160, num_shared_experts=1)
CASES = {
    "balanced, 1": Case((20,), MOE),
    "a buffer larger than the others need": Case(
        (12, 12), replace(MOE, hidden_size=300, max_tokens_per_rank=40)
    ),
    "balanced": Case((12, 12), MOE),
    "one is empty": Case((0, 17), MOE),
    "no tokens anywhere": Case((0, 0), MOE),
    "one expert takes all": Case((7, 4), replace(MOE, top_k=1, renormalize=False), route_to=(5,)),
    "padding, rows that are padded, shared experts": Case((10, 13), NARROW, padding=True),
    "checkpoint, uneven": Case((20, 3), MOE, checkpoint=True),
}
CASES = {name: replace(case, dtype=torch.bfloat16) for name, case in CASES.items()}
RUNS = [("newest", 1), ("newest", 2), ("v1", 2)]

pytestmark = [pytest.mark.gpu, pytest.mark.deepep, pytest.mark.parametrize("by, world_size", RUNS)]


@pytest.fixture(autouse=True)
def require_deepep(require_gpu, by, world_size):
    host = replace(Host.look(), switches=(SWITCH,))
    missing = unmet(needs_of("deepep", host, world_size))
    if by == "v1" and not (host.deepep and host.deepep.low_latency):
        pytest.skip(f"the class Buffer of V1, which {host.deepep} does not have")
    if missing:
        pytest.skip("; ".join(f"{need.what}: {need.has}, needs {need.needs}" for need in missing))


def serve_by(by):
    if by == "v1":
        load = deepep_buffers.load

        def older(name, ranks, device):
            return SimpleNamespace(Buffer=load(name, 1, device).Buffer)

        deepep_buffers.load = older


def moves(rank, by, world_size):
    serve_by(by)
    return rank_moves(rank, Kind("deepep"), world_size, None, "cuda")


def test_moves(by, world_size):
    check_cells(Kind("deepep"), run_ranks(moves, world_size, by, world_size, **HOW[by]))


def layers(rank, by, cases):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    serve_by(by)
    return expert_parallel_each(rank, cases, "cuda")


def test_layers_equal_one_process(by, world_size):
    cases = [case for case in CASES.values() if case.world_size == world_size]
    ranks = run_ranks(layers, world_size, by, cases, **HOW[by])
    for i, case in enumerate(cases):
        alone = replace(case, config=replace(case.config, transport="auto"))
        compare(case, [got[i] for got in ranks], one_process(alone, "cuda"))


def exactly(rank, by, world_size):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    serve_by(by)
    case = Case((), over_deepep(EXACT), dtype=torch.bfloat16)
    shares = (0, 1) if world_size == 1 else (rank,)
    return of_shares(make_layer(case, dist.group.WORLD, "cuda"), *shares)


def test_exact_numerics_do_not_know_of_ranks(by, world_size):
    expected = of_shares(make_layer(Case((), EXACT, dtype=torch.bfloat16), None, "cuda"), 0, 1)
    ranks = run_ranks(exactly, world_size, by, world_size, **HOW[by])
    for parts, whole in zip(zip(*ranks, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(parts), whole)


def captured(rank, by):
    serve_by(by)
    return captured_steps(rank, "deepep")


def test_a_graph_equals_eager(by, world_size):
    ranks = run_ranks(captured, world_size, by, **HOW[by])
    assert all(all(same) for same in ranks)
