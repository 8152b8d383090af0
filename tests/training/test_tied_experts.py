"""Layers that share their experts: one parameter with two names counts, is clipped, reduced and
saved once."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ep_moe
from ep_moe.testing import assert_close, run_ranks
from tests.helpers import small_config


class TiedModel(nn.Module):
    """Two layers with the experts of the first: by module, or parameter by parameter."""

    def __init__(self, ep=None, *, by="module", **changes):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [ep_moe.MoELayer(small_config(**changes), ep=ep) for _ in range(2)]
        )
        first, second = self.layers
        if by == "module":
            second.experts = first.experts
        else:
            second.experts.w_gate_up = first.experts.w_gate_up
            second.experts.w_down = first.experts.w_down
        self.double()

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return x


BY = pytest.mark.parametrize("by", ["module", "parameter"])


def batch(rank=0):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(10, 16, generator=generator, dtype=torch.float64)


@BY
@pytest.mark.parametrize("norm_type", [1.0, 2.0])
def test_the_norm_is_that_of_torch(by, norm_type):
    """On one rank, where torch's own clipping is right."""
    norms, grads = [], []
    for clip in (
        lambda model: ep_moe.clip_grad_norm_(model, 0.1, norm_type),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type),
    ):
        model = TiedModel(by=by)
        model(batch()).square().sum().backward()
        norms.append(clip(model))
        grads.append([p.grad for p in model.parameters()])
    assert_close(norms[0], norms[1], name="norm")
    for got, expected in zip(*grads, strict=True):
        assert_close(got, expected, name="gradient")


def rank_reduces(rank, by):
    """2 replicas x 2 ranks of experts; summed, where a second reduction would double."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = TiedModel(mesh, by=by, loss_reduction="sum")
    model(batch(rank)).square().sum().backward()
    ep_moe.sync_expert_grads(model)
    return {n: p.grad for n, p in model.named_parameters() if ".experts." in n}


@BY
def test_replicas_are_added_once(by):
    model = TiedModel(by=by)
    sum(model(batch(rank)).square().sum() for rank in range(4)).backward()
    whole = {n: p.grad for n, p in model.named_parameters() if ".experts." in n}
    for rank, grads in enumerate(run_ranks(rank_reduces, 4, by)):
        assert grads.keys() == whole.keys()
        mine = slice(4 * (rank % 2), 4 * (rank % 2) + 4)
        for name, value in whole.items():
            assert_close(grads[name], value[mine], name=f"{name} of rank {rank}")


def rank_saves(rank, folder, by):
    model = ep_moe.ddp_ignore(TiedModel(dist.group.WORLD, by=by))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped(batch(rank)).square().mean().backward()
    optimizer.step()
    ep_moe.save_checkpoint(folder, wrapped, optimizer)
    return {n: p.detach() for n, p in model.named_parameters()}


@BY
def test_a_checkpoint_holds_the_experts_of_every_rank_under_both_names(by, tmp_path):
    """Were the second name taken for a replica, one rank's experts would come back for all."""
    ranks = run_ranks(rank_saves, 2, tmp_path / "checkpoint", by)
    model = TiedModel(by=by)
    optimizer = torch.optim.AdamW(model.parameters())
    ep_moe.load_checkpoint(tmp_path / "checkpoint", model, optimizer)
    for name, value in model.named_parameters():
        if ".experts." in name:
            expected = torch.cat([weights[name] for weights in ranks])
            assert torch.equal(value.detach(), expected), name
