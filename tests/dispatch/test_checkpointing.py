"""Activation checkpointing across ranks; x and the routing changed between forward and backward."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ep_moe
from ep_moe.dispatch import combine, dispatch
from ep_moe.testing import run_ranks

CONFIG = ep_moe.MoEConfig(
    hidden_size=8, intermediate_size=8, num_experts=4, top_k=1, renormalize=False
)
GATE_ON = ("output", "input")
CONTEXTS = ({}, {"context_fn": ep_moe.replay()})


def route_differently_on_recompute(ep, num_experts=4):
    """Tokens swap experts before recomputation: every count stays, every gradient is wrong."""
    torch.manual_seed(0)
    layer = ep_moe.MoELayer(replace(CONFIG, num_experts=num_experts), ep=ep)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(num_experts, 8) * 9)
    x = torch.eye(8)[:num_experts].clone().requires_grad_()
    calls = []

    def block(x):
        calls.append(0)
        return layer(x.flip(0) if len(calls) > 1 else x)[0]

    y = checkpoint(block, x, use_reentrant=False)
    with pytest.raises(ep_moe.RecomputationMismatch, match="a different routing"):
        y.sum().backward()


def rank_routes_differently(rank):
    """With one expert a rank too, where no receiver could tell from its local ids."""
    for num_experts in (4, 2):
        route_differently_on_recompute(dist.group.WORLD, num_experts)


def test_changed_routing_is_named():
    route_differently_on_recompute(None)


def test_changed_routing_is_named_across_ranks():
    run_ranks(rank_routes_differently, 2)


def change_x_in_place(ep, dtype):
    """The same on one rank, where the experts work on x, and on two, where they have copies."""
    layer = ep_moe.MoELayer(CONFIG, ep=ep).to(dtype)
    for own_router in (False, True):
        x = torch.randn(6, 8, dtype=dtype, requires_grad=True) * 1  # not a leaf, so it may change
        if own_router:  # nothing but the dispatch is left to notice
            ids, gates = torch.arange(6)[:, None] % 4, torch.ones(6, 1)
            y = ep_moe.moe(x, ep_moe.Routing(ids, gates), layer.experts, layer.transport)
        else:
            y, _ = layer(x)
        x.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def change_x_in_place_without_grad(ep):
    torch.manual_seed(1)
    layer = ep_moe.MoELayer(CONFIG, ep=ep)
    x = torch.randn(6, 8)
    with torch.no_grad():
        y, _ = layer(x)
        before = y.clone()
        x.zero_()
    assert torch.equal(y, before)


def change_y_in_place(ep):
    """y is the caller's: a residual added in place must not be refused on one rank only."""
    x = torch.randn(6, 8, requires_grad=True)
    y, _ = ep_moe.MoELayer(CONFIG, ep=ep)(x)
    y += x
    y.sum().backward()


def rank_changes_x(rank, dtype):
    change_y_in_place(dist.group.WORLD)
    change_x_in_place(dist.group.WORLD, dtype)
    change_x_in_place_without_grad(dist.group.WORLD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_x_changed_in_place(dtype):
    change_y_in_place(None)
    change_x_in_place(None, dtype)
    change_x_in_place_without_grad(None)
    run_ranks(rank_changes_x, 2, dtype)


def change_routing_in_place(ep):
    """Gates and ids of the caller's own router, which one rank works on and two send."""
    for part, numerics, gate_on in product(("gates", "ids"), ("fast", "exact"), GATE_ON):
        layer = ep_moe.MoELayer(replace(CONFIG, numerics=numerics, gate_on=gate_on), ep=ep)
        x = torch.randn(6, 8, requires_grad=True)
        ids = (torch.arange(6)[:, None] % 4).int()
        gates = torch.rand(6, 1)
        y = ep_moe.moe(x, ep_moe.Routing(ids, gates), layer.experts, layer.transport)
        {"gates": gates, "ids": ids}[part].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def change_ids_before_recomputing(ep, context):
    """Of a routing from outside the block: another one, or nonsense."""
    layer = ep_moe.MoELayer(CONFIG, ep=ep)
    other, nonsense = (lambda ids: ids.copy_(ids.flip(0))), (lambda ids: ids.fill_(99))
    # Without a plan to replay the recomputation stumbles over nonsense itself.
    for change in (other, nonsense) if context else (other,):
        ids, gates = (torch.arange(8)[:, None] % 4).int(), torch.ones(8, 1)
        routing = ep_moe.Routing(ids, gates)

        def block(x, routing=routing):
            return dispatch_to_experts(layer, x, routing)

        y = checkpoint(block, torch.randn(8, 8, requires_grad=True), use_reentrant=False, **context)
        change(ids)
        with pytest.raises(ep_moe.RecomputationMismatch, match="changed parameters or ids"):
            y.sum().backward()


def dispatch_to_experts(layer, x, routing):
    """`moe` without its look at the ids."""
    arrived = dispatch(x, routing, CONFIG.num_experts, layer.transport)
    return combine(layer.experts(arrived), arrived.plan, layer.transport)


def rank_changes_routing(rank):
    change_routing_in_place(dist.group.WORLD)
    for context in CONTEXTS:
        change_ids_before_recomputing(dist.group.WORLD, context)


def test_a_routing_changed_in_place():
    """The same error on one rank and on two, in a checkpoint and without."""
    change_routing_in_place(None)
    for context in CONTEXTS:
        change_ids_before_recomputing(None, context)
    run_ranks(rank_changes_routing, 2)
