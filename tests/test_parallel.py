"""Groups and devices: everything `ep=` takes, and what is refused."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ep_moe
from ep_moe.peers import Peers
from ep_moe.testing import run_ranks

CONFIG = ep_moe.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=1)


def rank_resolves(rank):
    world = dist.group.WORLD
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    unnamed = init_device_mesh("cpu", (2, 2))
    with pytest.raises(ep_moe.ConfigError, match="one is named 'ep'"):
        ep_moe.ExpertParallel.resolve(unnamed)
    kinds = {
        "group": world,
        "mesh": init_device_mesh("cpu", (4,)),
        "named mesh": square,
        "sub-mesh": square["ep"],
    }
    return {
        kind: (resolved.rank, resolved.size, list(ep_moe.Experts(CONFIG, resolved).global_ids))
        for kind, resolved in ((k, ep_moe.ExpertParallel.resolve(v)) for k, v in kinds.items())
    }


def test_groups_and_meshes():
    for rank, got in enumerate(run_ranks(rank_resolves, 4)):
        inner = rank % 2
        assert got == {
            "group": (rank, 4, [rank]),
            "mesh": (rank, 4, [rank]),
            "named mesh": (inner, 2, [2 * inner, 2 * inner + 1]),
            "sub-mesh": (inner, 2, [2 * inner, 2 * inner + 1]),
        }


def rank_builds_undividable(rank):
    with pytest.raises(ep_moe.ConfigError, match=r"num_experts = 4, .* multiple of the 3 ranks"):
        ep_moe.MoELayer(CONFIG, ep=dist.group.WORLD)


def test_experts_must_divide_among_the_ranks():
    run_ranks(rank_builds_undividable, 3)


def test_not_a_group():
    with pytest.raises(ep_moe.ConfigError, match=r"ep = 4, .* ProcessGroup or a DeviceMesh"):
        ep_moe.MoELayer(CONFIG, ep=4)
    with pytest.raises(ep_moe.ConfigError, match=r"balance_over = 4, .* ProcessGroup or a Dev"):
        ep_moe.MoELayer(CONFIG, balance_over=4)


@pytest.fixture
def torchrun(monkeypatch):
    """Set what torchrun sets; without it, nothing is."""

    def set_environment(**values):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_environment


def test_alone(torchrun):
    torchrun()
    process = ep_moe.init_process()
    assert (process.rank, process.world_size, process.group) == (0, 1, None)
    assert process.new_group() is None
    process.close()


def rank_makes_a_group(rank):
    world = dist.group.WORLD
    process = ep_moe.Process(rank, rank, 2, torch.device("cpu"), world, timedelta(seconds=7))
    group = process.new_group()
    assert group is not world
    assert dist.get_process_group_ranks(group) == [0, 1]
    assert Peers.of(group)._timeout == 7


def test_a_group_beside_that_of_the_process():
    run_ranks(rank_makes_a_group, 2)


def test_more_ranks_than_gpus(monkeypatch, torchrun):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    torchrun(RANK=3, LOCAL_RANK=1, WORLD_SIZE=4)
    with pytest.raises(
        ep_moe.BackendUnavailable, match=r"rank 3 has LOCAL_RANK 1, .* shows 1 GPUs"
    ):
        ep_moe.init_process()
