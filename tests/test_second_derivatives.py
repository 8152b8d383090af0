"""The hand-written backward functions are no graphs of their own: a derivative of them is refused,
never silently wrong."""

import pytest
import torch

from ep_moe import ExpertParallel, Experts, Routing
from ep_moe.dispatch import combine, dispatch, make_transport
from ep_moe.exact import exact_linear, split_slots, sum_slots
from ep_moe.routing import Router
from ep_moe.routing.balance import load_loss
from ep_moe.types import Arrived
from tests.helpers import random_local_ids, small_config

CONFIG = small_config(renormalize=False)
ROWS, TOP_K, HIDDEN = 5, CONFIG.top_k, CONFIG.hidden_size


def routing():
    ids = random_local_ids(ROWS, TOP_K, CONFIG.num_experts, absent=0.0)
    return Routing(ids, torch.rand(ROWS, TOP_K, dtype=torch.float64))


def transport():
    return make_transport("local", ExpertParallel())


def experts():
    return Experts(CONFIG, ExpertParallel()).double()


def whole(experts, x):
    chosen = routing()
    return experts(Arrived(x, chosen.gate_weights, chosen.ids, plan=None))


def in_parts(experts, x):
    chosen, work = routing(), experts.in_parts()
    parts = zip(*(t.split(3) for t in (x, chosen.gate_weights, chosen.ids)), strict=True)
    return torch.cat([work(Arrived(*part, plan=None)) for part in parts])


def through_combine(x):
    plan = dispatch(x.detach(), routing(), CONFIG.num_experts, transport()).plan
    return combine(x, plan, transport())


FUNCTIONS = {
    "router": lambda x: Router(CONFIG).double().logits(x),
    "load_loss": lambda x: load_loss(x, torch.ones(HIDDEN, dtype=torch.int64), top_k=1, scale=1.0),
    "dispatch": lambda x: dispatch(x, routing(), CONFIG.num_experts, transport()).rows,
    "experts": lambda x: whole(experts(), x),
    "experts in parts": lambda x: in_parts(experts(), x),
    "combine": through_combine,
    "split_slots": lambda x: split_slots(x, routing(), gate_on="output")[0],
    "sum_slots": lambda x: sum_slots(
        x.repeat_interleave(TOP_K, dim=0), routing(), gate_on="output"
    ),
    "exact_linear": lambda x: exact_linear(x, torch.randn(3, HIDDEN)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_derivative_is_refused(name):
    x = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    loss = FUNCTIONS[name](x).square().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    assert slope.abs().max() > 0
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize("through", [whole, in_parts])
@pytest.mark.parametrize("name", ["w_gate_up", "w_down"])
def test_nor_is_one_of_a_weight_taken(name, through):
    layer = experts()
    x = torch.randn(ROWS, HIDDEN, dtype=torch.float64)
    loss = through(layer, x).square().sum()
    (slope,) = torch.autograd.grad(loss, getattr(layer, name), create_graph=True)
    assert slope.abs().max() > 0
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()
