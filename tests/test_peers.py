"""Waiting for peers: one net for each group however many layers it has, global ranks in errors, and
no other failure taken for theirs."""

import copy
import gc
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ep_moe
from ep_moe.parallel import Ranks
from ep_moe.testing import run_ranks

CONFIG = ep_moe.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)


def net_threads():
    return [thread for thread in threading.enumerate() if thread.name == "ep_moe.net"]


def rank_shares_a_net(rank):
    """The layers of a group number themselves and share one thread, which ends with the group."""
    group = dist.new_group()
    layers = [ep_moe.MoELayer(CONFIG, ep=group) for _ in range(3)]
    layers.append(copy.deepcopy(layers[0]))
    assert [layer.transport.layer for layer in layers] == [0, 1, 2, 3]
    for layer in layers:
        layer(torch.randn(3, 8))
    assert len(net_threads()) == 1
    dist.barrier()
    del layer, layers
    dist.destroy_process_group(group)
    del group
    gc.collect()
    deadline = time.monotonic() + 10
    while net_threads():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_net_for_each_group():
    run_ranks(rank_shares_a_net, 2)


def rank_of_two_groups(rank):
    """Ranks 2 and 3 share experts, and 3 does not come."""
    pairs = [dist.new_group(pair, timeout=timedelta(seconds=3)) for pair in ([0, 1], [2, 3])]
    ep = ep_moe.ExpertParallel.resolve(pairs[rank // 2])
    assert torch.equal(Ranks.resolve(ep).sum(torch.tensor(rank)), torch.tensor([1, 5][rank // 2]))
    if rank == 3:
        return time.sleep(6)
    if rank == 2:
        with pytest.raises(
            ep_moe.DispatchTimeout, match=r"rank 2 waited 3\.\d s .*; rank 3 is at work after"
        ):
            Ranks.resolve(ep).sum(torch.tensor(1))
        return None
    for _ in range(10):
        Ranks.resolve(ep).sum(torch.tensor(1))


def test_errors_name_global_ranks():
    run_ranks(rank_of_two_groups, 4)


def rank_leaves_early(rank):
    """Rank 1 makes one call less, and leaves the group in peace."""
    group = dist.new_group()
    ep = ep_moe.ExpertParallel.resolve(group)
    Ranks.resolve(ep).sum(torch.tensor(1))
    if rank == 1:
        ep.peers.close()
        return dist.destroy_process_group(group)
    with pytest.raises(ep_moe.PeerLost, match=r"rank 0 lost rank 1 at .*ended without an error"):
        Ranks.resolve(ep).sum(torch.tensor(1))


def test_a_rank_that_leaves_early():
    run_ranks(rank_leaves_early, 2)


def rank_meets_an_error_of_its_own(rank):
    """A failure that no peer is the reason of stays what it is."""
    ep = ep_moe.ExpertParallel.resolve(dist.group.WORLD)
    Ranks.resolve(ep).sum(torch.tensor(1))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="mine") as error, ep.waiting("something"):
        raise RuntimeError("mine")
    assert error.value.__notes__ == [f"rank {rank} was at something"]
    assert time.monotonic() - began < 10
    assert Ranks.resolve(ep).sum(torch.tensor(1)) == 2


def test_other_errors_pass():
    run_ranks(rank_meets_an_error_of_its_own, 2)


def test_alone_nobody_is_waited_for():
    with ep_moe.ExpertParallel().waiting("nothing"):
        pass
    assert not net_threads()
    with pytest.raises(ep_moe.ConfigError, match="process group"):
        _ = ep_moe.ExpertParallel().peers
