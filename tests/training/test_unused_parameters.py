"""DDP that looks for unused parameters, on ranks that take different branches."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ep_moe
from ep_moe.testing import assert_close, run_ranks
from tests.helpers import small_config

STEPS = 3


class Branching(nn.Module):
    """Rank 0 goes through what stands before the experts, rank 1 through what stands behind them:
    their gradients are ready in another order."""

    def __init__(self, ep=None):
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(16, 16)
        self.moe = ep_moe.MoELayer(small_config(), ep=ep)
        self.behind = nn.Linear(16, 16)  # the first that DDP reduces
        self.double()

    def forward(self, x, rank):
        x = self.before(x) if rank == 0 else x
        x = x + self.moe(x)[0]
        return self.behind(x) if rank == 1 else x


def batch(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, 16, generator=generator, dtype=torch.float64)


def rank_trains(rank):
    model = ep_moe.ddp_ignore(Branching(dist.new_group()))
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(batch(rank, step), rank).square().mean().backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def test_experts_with_a_group_of_their_own():
    """As one process; in DDP's group one rank's all-to-all would meet the other's all-reduce."""
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(batch(rank, step), rank).square().mean() for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
    for rank, weights in enumerate(run_ranks(rank_trains, 2)):
        for name, value in model.named_parameters():
            mine = slice(4 * rank, 4 * rank + 4)
            value = value.detach()[mine] if ".experts." in name else value.detach()
            assert_close(weights[name], value, name=f"{name} of rank {rank}")
