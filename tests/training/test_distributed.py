"""DDP around the dense part, one norm for all ranks, checkpoints that any number of ranks reads."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import ep_moe
from ep_moe.dispatch import combine, dispatch
from ep_moe.testing import assert_close, run_ranks

CONFIG = ep_moe.MoEConfig(hidden_size=16, intermediate_size=12, num_experts=8, top_k=2)


class Model(nn.Module):
    """A linear layer and an MoE layer: the least that has replicated and expert parameters."""

    def __init__(self, ep, config=CONFIG):
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(16, 16)
        self.moe = ep_moe.MoELayer(config, ep=ep)
        self.double()  # Adam divides rounding errors by moments as small as they

    def forward(self, x):
        y, _ = self.moe(self.dense(x))
        return y


def batch(rank, step=0, tokens=10):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(tokens, 16, generator=generator, dtype=torch.float64)


def train(model, optimizer, batches, max_norm=0.1):
    """One step a batch; batches hold the shares of the ranks that this process stands for."""
    norms = []
    for shares in batches:
        optimizer.zero_grad()
        torch.stack([model(x).square().mean() for x in shares]).mean().backward()
        module = model.module if isinstance(model, DistributedDataParallel) else model
        norms.append(ep_moe.clip_grad_norm_(module, max_norm))
        optimizer.step()
    return torch.stack(norms)


def trained(ep, ranks, steps, load=None, save=None):
    """Train `steps`, as the only process for all `ranks`, or as one of them under DDP."""
    model = ep_moe.ddp_ignore(Model(ep))
    wrapped = DistributedDataParallel(model) if ep is not None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if load:
        assert ep_moe.load_checkpoint(load, wrapped, optimizer) == {"step": 3}
    norms = train(wrapped, optimizer, [[batch(r, step) for r in ranks] for step in steps])
    if save:
        ep_moe.save_checkpoint(save, wrapped, optimizer, {"step": 3})
    return norms, {n: p.detach().clone() for n, p in model.named_parameters()}


def rank_trained(rank, steps, load, save):
    return trained(dist.group.WORLD, [rank], steps, load, save)


def assert_same_model(ranks, one):
    for rank, (norms, weights) in enumerate(ranks):
        assert_close(norms, one[0], name=f"norms of rank {rank}")
        for name, value in one[1].items():
            if ".experts." in name:
                each = len(value) // len(ranks)
                value = value[rank * each : (rank + 1) * each]
            # Adam's steps do not get smaller with the gradient: where that is near nothing, its
            # rounding is all that there is.
            assert_close(weights[name], value, name=f"{name} of rank {rank}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_ddp_training_equals_one_process(world_size):
    ranks = run_ranks(rank_trained, world_size, range(3), None, None)
    assert_same_model(ranks, trained(None, range(world_size), range(3)))


CROWDED = replace(CONFIG, top_k=1, renormalize=False, router_bias=True)


def trained_with_idle_experts(ep, ranks, crowded):
    """5 steps on a token a rank, or 3 on ten that all want expert 0: what `trained` returns, and
    whether each gradient of the last step was nothing but zeros."""
    model = Model(ep, CROWDED if crowded else CONFIG)
    if crowded:
        with torch.no_grad():
            model.moe.router.bias[0] = 20.0
    ep_moe.ddp_ignore(model)
    wrapped = model if ep is None else DistributedDataParallel(model, find_unused_parameters=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens, steps = (10, 3) if crowded else (1, 5)
    norms = train(
        wrapped, optimizer, [[batch(r, step, tokens) for r in ranks] for step in range(steps)]
    )
    zero = {n: not p.grad.any() for n, p in model.named_parameters()}
    return norms, {n: p.detach().clone() for n, p in model.named_parameters()}, zero


def rank_trained_with_idle_experts(rank, crowded):
    return trained_with_idle_experts(dist.group.WORLD, [rank], crowded)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("crowded", [False, True], ids=["BB-103 few tokens", "BB-65 one expert"])
def test_experts_without_tokens_under_ddp(crowded, world_size):
    """Their gradients are zeros, not None: nobody waits for them, or says that they are unused."""
    ranks = run_ranks(rank_trained_with_idle_experts, world_size, crowded)
    one = trained_with_idle_experts(None, range(world_size), crowded)
    assert_same_model([got[:2] for got in ranks], one)
    if crowded:
        idle = [rank for rank, (*_, zero) in enumerate(ranks) if zero["moe.experts.w_down"]]
        assert idle == list(range(1, world_size))


@pytest.mark.parametrize("written_by, read_by", [(2, 1), (1, 2), (2, 4)])
def test_checkpoint_read_by_other_number_of_ranks(written_by, read_by, tmp_path):
    """Train 3 steps, save, load elsewhere, train 2: as if 5 had been trained in one go."""
    shares = range(4)  # the same data whatever the number of ranks

    def run(world_size, *args):
        if world_size == 1:
            return [trained(None, shares, *args)]
        return run_ranks(rank_trained_on_shares, world_size, world_size, shares, *args)

    run(written_by, range(3), None, tmp_path / "checkpoint")
    continued = run(read_by, range(3, 5), tmp_path / "checkpoint", None)
    norms, weights = trained(None, shares, range(5))
    assert_same_model(continued, (norms[3:], weights))


def rank_trained_on_shares(rank, world_size, shares, steps, load, save):
    return trained(dist.group.WORLD, shares[rank::world_size], steps, load, save)


def rank_saves_and_goes_on(rank, folder, make_optimizer):
    """Steps before and after a save are as without it, and frozen experts have no state to save."""
    found = {}
    for saving in (False, True):
        model = ep_moe.ddp_ignore(Model(dist.group.WORLD))
        model.moe.experts.w_down.requires_grad_(False)
        wrapped = DistributedDataParallel(model)
        optimizer = make_optimizer(model.parameters())
        for step in range(3):
            if saving and step:
                ep_moe.save_checkpoint(folder / str(step), wrapped, optimizer)
            train(wrapped, optimizer, [[batch(rank, step)]])
        found[saving] = {n: p.detach().clone() for n, p in model.named_parameters()}
    if make_optimizer is not sgd:  # and what was saved is what a resumed run needs
        model = ep_moe.ddp_ignore(Model(dist.group.WORLD))
        model.moe.experts.w_down.requires_grad_(False)
        wrapped = DistributedDataParallel(model)
        optimizer = make_optimizer(model.parameters())
        ep_moe.load_checkpoint(folder / "2", wrapped, optimizer)
        train(wrapped, optimizer, [[batch(rank, 2)]])
        found["resumed"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return found


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def adafactor(parameters):
    """Its moments have the number of experts in common with the parameter, not its shape."""
    return torch.optim.Adafactor(parameters, lr=0.01)


@pytest.mark.parametrize("make_optimizer", [sgd, adam, adafactor])
def test_saving_changes_nothing_and_keeps_every_rank_its_own(make_optimizer, tmp_path):
    for found in run_ranks(rank_saves_and_goes_on, 2, tmp_path, make_optimizer):
        for weights in found.values():
            for name, value in weights.items():
                assert torch.equal(value, found[False][name]), name


@pytest.mark.parametrize(
    "placed, overwritten", [("right", False), ("nowhere", True), ("on a part", True)]
)
def test_experts_that_ddp_took_are_named(placed, overwritten):
    """DDP broadcasts rank 0's experts over the others; the first forward says so."""
    for rank, (changed, error) in enumerate(run_ranks(rank_under_ddp, 2, placed)):
        assert changed == (overwritten and rank == 1)
        assert ("ddp_ignore" in error) == overwritten, error


def rank_under_ddp(rank, placed):
    model = Model(dist.group.WORLD)
    before = copy.deepcopy(model.moe.experts.w_down)
    ep_moe.ddp_ignore({"right": model, "nowhere": nn.Identity(), "on a part": model.moe}[placed])
    wrapped = DistributedDataParallel(model)
    error = ""
    try:
        for _ in range(2):
            wrapped(batch(rank)).sum().backward()
    except ep_moe.ConfigError as refused:
        error = str(refused)
    return not torch.equal(before, model.moe.experts.w_down), error


def test_a_new_wrapper_is_no_old_one(monkeypatch):
    """The address of a wrapper that is gone may be that of the next, which is looked at again."""
    layer = ep_moe.MoELayer(CONFIG).double()
    layer.ep = ep_moe.ExpertParallel(size=2)
    active = []
    monkeypatch.setattr(DistributedDataParallel, "_get_active_ddp_module", lambda: active[0])

    class Wrapper:
        def __init__(self, ignored):
            self.module, self.parameters_to_ignore = layer, ignored

    active.append(Wrapper({name for name, _ in layer.named_parameters()}))
    layer(batch(0))
    address = id(active.pop())
    later = [Wrapper(set()) for _ in range(10_000)]
    active += [wrapper for wrapper in later if id(wrapper) == address]
    assert active, "no object came to the same place"
    with pytest.raises(ep_moe.ConfigError, match="ddp_ignore"):
        layer(batch(0))


class ExpertsOnTheRoot(ep_moe.Experts):
    """The parameters of DDP's own root, which its reducer names `.w`."""

    def __init__(self, ep):
        super().__init__(CONFIG, ep_moe.ExpertParallel.resolve(ep))
        self.dense = nn.Linear(16, 16)
        self.transport = ep_moe.make_transport("auto", self.ep)

    def forward(self, x):
        ids = torch.full((len(x), 1), self.ep.rank, dtype=torch.int32) * 4  # its own experts
        routing = ep_moe.Routing(ids, torch.ones(len(x), 1))
        arrived = dispatch(self.dense(x), routing, CONFIG.num_experts, self.transport)
        return combine(super().forward(arrived), arrived.plan, self.transport)


def rank_experts_on_the_root(rank):
    torch.manual_seed(0)
    model = ExpertsOnTheRoot(dist.group.WORLD).double()
    wrapped = DistributedDataParallel(ep_moe.ddp_ignore(model))
    wrapped(batch(rank)).square().mean().backward()
    alone = copy.deepcopy(model)
    alone.zero_grad()
    alone(batch(rank)).square().mean().backward()
    return {
        name: torch.equal(p.grad, alone.get_parameter(name).grad)
        for name, p in model.named_parameters()
    }


def test_expert_parameters_on_the_root_of_ddp():
    for untouched in run_ranks(rank_experts_on_the_root, 2):
        names = {name for name, same in untouched.items() if same}
        assert names == {"w_gate_up", "w_down"}  # the dense gradients were averaged


def rank_expert_dp(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = ep_moe.ddp_ignore(Model(mesh))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss = wrapped(batch(rank)).square().mean()
    loss.backward()
    ep_moe.sync_expert_grads(model)
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    norm = ep_moe.clip_grad_norm_(model, 0.1)
    optimizer.step()
    return loss.detach(), norm, grads, {n: p.detach() for n, p in model.named_parameters()}


def test_expert_parallel_times_data_parallel_equals_one_process():
    """2 x 2: the loss, every gradient, the norm and an Adam step on the mean of the four losses."""
    model = Model(None)
    losses = [model(batch(rank)).square().mean() for rank in range(4)]
    torch.stack(losses).mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    norm = ep_moe.clip_grad_norm_(model, 0.1)
    torch.optim.Adam(model.parameters(), lr=0.01).step()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    for rank, got in enumerate(run_ranks(rank_expert_dp, 4)):
        assert_close(got[0], losses[rank].detach(), name=f"loss of rank {rank}")
        assert_close(got[1], norm, name=f"norm of rank {rank}")
        half = slice(4 * (rank % 2), 4 * (rank % 2) + 4)  # experts 0-3 or 4-7
        for kind, mine, whole in (("gradient", got[2], grads), ("weight", got[3], weights)):
            for name, value in whole.items():
                value = value[half] if ".experts." in name else value
                assert_close(mine[name], value, name=f"{kind} of {name}, rank {rank}")


def rank_norm(rank, norm_type, with_grad):
    experts = ep_moe.MoELayer(CONFIG, ep=dist.group.WORLD)
    dense = experts.router.weight
    dense.grad = torch.full_like(dense, 0.5)
    if with_grad[rank]:
        w = experts.experts.w_down
        w.grad = torch.zeros_like(w)
        w.grad[0, 0, :2] = torch.tensor([[2.0, 4.0], [6.0, 8.0]])[rank]
    return ep_moe.clip_grad_norm_(experts, 1.0, norm_type)


@pytest.mark.parametrize(
    "norm_type, with_grad, expected",
    [
        (2.0, (True, True), math.sqrt(120 + 0.25 * 128)),
        (2.0, (True, False), math.sqrt(20 + 0.25 * 128)),  # a rank without gradients takes part
        (math.inf, (True, True), 8.0),
        (math.inf, (True, False), 4.0),
    ],
)
def test_norm_counts_every_expert_once(norm_type, with_grad, expected):
    for norm in run_ranks(rank_norm, 2, norm_type, with_grad):
        assert norm.item() == pytest.approx(expected, rel=1e-6)
