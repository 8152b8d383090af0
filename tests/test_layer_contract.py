"""What a layer promises beside its numbers: it is a module like any other, leaves its inputs alone,
keeps nothing between calls, and refuses bad calls by name."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ep_moe import (
    InputError,
    MoELayer,
    RecomputationMismatch,
    Routing,
    RoutingStats,
    moe,
    oracle,
)
from ep_moe.testing import assert_close
from tests.helpers import random_layer, small_config

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def test_a_nan_token_is_alone():
    """Case BB-07: a broken row, such as padding without a mask, spoils no other token."""
    layer = random_layer(small_config(num_shared_experts=1))
    x = torch.randn(6, 16, dtype=torch.float64)
    expected, _ = layer(x[1:])
    x[0] = torch.nan
    x.requires_grad_()
    y, stats = layer(x)
    assert y[0].isnan().all()
    assert_close(y[1:], expected, name="y of the others")
    assert stats.tokens_per_expert.sum() == 12
    (d_x,) = torch.autograd.grad(y[1:].sum(), x)
    assert d_x[1:].isfinite().all()


def test_x_is_left_alone():
    layer = random_layer(small_config(num_shared_experts=1))
    x = torch.randn(5, 16, dtype=torch.float64)
    before, mask = x.clone(), torch.arange(5) == 2
    for padding_mask in (None, mask):
        y, _ = layer(x, padding_mask)
        y.sum().backward()
        assert torch.equal(x, before)
        assert y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("train_router", [False, True])
def test_changing_x_before_the_backward_is_an_error(train_router):
    """The experts work on x itself: torch must notice, whatever else keeps x."""
    layer = random_layer(small_config())
    layer.router.requires_grad_(train_router)
    x = torch.randn(5, 16, dtype=torch.float64)
    y, _ = layer(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("of", ["x", "router.weight", "experts.w_down"])
def test_second_derivatives_are_refused(of, numerics):
    """Never a wrong one. First ones may be taken with create_graph, for others' sake."""
    layer = random_layer(small_config(num_shared_experts=1, numerics=numerics))
    x = torch.randn(5, 16, dtype=torch.float64, requires_grad=True)
    leaves = {"x": x, **dict(layer.named_parameters())}
    expected = torch.autograd.grad(layer(x)[0].square().sum(), leaves.values())
    first = torch.autograd.grad(layer(x)[0].square().sum(), leaves.values(), create_graph=True)
    for name, got, value in zip(leaves, first, expected, strict=True):
        assert_close(got.detach(), value, name=name)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dict(zip(leaves, first, strict=True))[of].square().sum().backward()


def forward_mode(layer, x):
    with forward_ad.dual_level():
        layer(forward_ad.make_dual(x, torch.randn_like(x)))


TRANSFORMS = {
    "forward mode": forward_mode,
    "torch.func.grad": lambda layer, x: torch.func.grad(lambda x: layer(x)[0].sum())(x),
    "torch.func.jvp": lambda layer, x: torch.func.jvp(lambda x: layer(x)[0], (x,), (x,)),
    "torch.func.vmap": lambda layer, x: torch.func.vmap(lambda x: layer(x)[0])(x[None]),
    "torch.export": lambda layer, x: torch.export.export(layer, (x,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_transforms_that_do_not_work_are_errors(transform):
    """As README says; whoever makes one work changes both."""
    layer = random_layer(small_config())
    with pytest.raises(RuntimeError):  # NotImplementedError is one
        transform(layer, torch.randn(5, 16, dtype=torch.float64))


def test_two_calls_before_one_backward():
    """Nothing is kept on the module between calls."""
    layer = random_layer(small_config())
    a, b = (torch.randn(n, 16, dtype=torch.float64, requires_grad=True) for n in (4, 9))
    expected = [torch.autograd.grad(layer(x)[0].sum(), x)[0] for x in (a, b)]
    (layer(a)[0].sum() + layer(b)[0].sum()).backward()
    for x, d_x in zip((a, b), expected, strict=True):
        assert_close(x.grad, d_x, name="dx")


def test_two_runs_agree_bit_for_bit():
    layer = random_layer(small_config(num_experts=6, top_k=4), torch.float32)
    x = torch.randn(200, 16, requires_grad=True)
    runs = [torch.autograd.grad(layer(x)[0].square().sum(), [x, *layer.parameters()]) for _ in "ab"]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_checkpointing_changes_nothing():
    layer = random_layer(small_config())
    x = torch.randn(9, 16, dtype=torch.float64, requires_grad=True)
    leaves, d_y = [x, *layer.parameters()], torch.randn(9, 16, dtype=torch.float64)
    expected = torch.autograd.grad(layer(x)[0], leaves, d_y)
    y = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)
    y.backward(d_y)
    assert all(torch.equal(a.grad, b) for a, b in zip(leaves, expected, strict=True))


def test_a_routing_that_changes_under_checkpointing_is_named():
    """Two tokens swap experts, so every count stays: only the ids tell."""
    config = small_config(hidden_size=2, num_experts=2, top_k=1)
    layer = random_layer(config)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(2))
    y = checkpoint(lambda x: layer(x)[0], torch.eye(2).double(), use_reentrant=False)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(2).flip(0))
    with pytest.raises(RecomputationMismatch):
        y.sum().backward()


def test_a_copy_is_equal_and_independent():
    layer = random_layer(small_config(num_shared_experts=1, expert_bias=True))
    twin = copy.deepcopy(layer)
    x = torch.randn(5, 16, dtype=torch.float64)
    expected, _ = layer(x)
    assert torch.equal(twin(x)[0], expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(layer(x)[0], expected)
    twin(x)[0].sum().backward()
    assert all(p.grad is None for p in layer.parameters())


def test_state_dict_round_trip(tmp_path):
    config = small_config(
        num_shared_experts=1,
        mlp_bias=True,
        router_bias=True,
        expert_bias=True,
        learn_temperature=True,
    )
    layer = random_layer(config)
    assert set(layer.state_dict()) == {
        "router.weight",
        "router.bias",
        "router.log_temperature",
        "router.expert_bias",
        *(f"experts.{n}" for n in ("w_gate_up", "w_down", "b_gate_up", "b_down")),
        *(f"shared_experts.{n}" for n in ("w_gate_up", "w_down")),
    }
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    twin = MoELayer(config).double()
    twin.load_state_dict(torch.load(tmp_path / "layer.pt"))
    x = torch.randn(5, 16, dtype=torch.float64)
    assert torch.equal(twin(x)[0], layer(x)[0])


@pytest.mark.parametrize("assign", [False, True])
def test_the_selection_bias_stays_fp32_whatever_is_loaded(assign):
    """A bias in bf16 could not move by .001; the other tensors are taken as they come."""
    config = small_config(expert_bias=True)
    state = {name: value.bfloat16() for name, value in random_layer(config).state_dict().items()}
    layer = MoELayer(config)
    layer.load_state_dict(state, assign=assign)
    assert layer.router.expert_bias.dtype == torch.float32
    assert torch.equal(layer.router.expert_bias, state["router.expert_bias"].float())
    assert layer.router.weight.dtype == (torch.bfloat16 if assign else torch.float32)
    assert "expert_bias" in dict(layer.router.named_buffers())


def test_the_same_seed_gives_the_same_layer():
    def build(seed):
        torch.manual_seed(seed)
        return MoELayer(small_config(num_shared_experts=1, mlp_bias=True))

    first, second, other = build(1), build(1), build(2)
    for name, value in first.named_parameters():
        assert torch.equal(value, second.get_parameter(name)), name
        assert value.isfinite().all(), name
        assert "b_" in name or not torch.equal(value, other.get_parameter(name)), name


def test_a_layer_can_be_built_without_memory():
    """On the meta device, then given memory and its first values."""
    with torch.device("meta"):
        layer = MoELayer(small_config())
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device="cpu")
    for part in (layer.router, layer.experts):
        part.reset_parameters()
    y, _ = layer(torch.randn(3, 16))
    assert y.isfinite().all()


def test_stats_are_a_pytree():
    """Hooks, checkpoints and compilers see the three tensors in it."""
    layer = random_layer(small_config(aux_loss_coef=0.1))
    _, stats = layer(torch.randn(3, 16, dtype=torch.float64))
    leaves, tree = pytree.tree_flatten(stats)
    assert len(leaves) == len(pytree.tree_leaves(stats)) == len(RoutingStats._fields)
    assert all(isinstance(value, Tensor) for value in leaves)
    again = pytree.tree_unflatten(leaves, tree)
    assert isinstance(again, RoutingStats)
    assert again.aux_loss is stats.aux_loss


def float32(*shape):
    return torch.zeros(*shape)


def with_experts_elsewhere(layer):
    layer.experts.to("meta")
    return layer


@pytest.mark.parametrize(
    "argument,call",
    [
        ("x", lambda layer: layer(float32(3, 15))),
        ("x", lambda layer: layer(float32(16, 3))),
        ("x", lambda layer: layer(torch.zeros(()))),
        ("x", lambda layer: layer(float32(3, 16).double())),
        ("x", lambda layer: layer(float32(3, 16).bfloat16())),
        ("x", lambda layer: layer(float32(3, 16).long())),
        ("padding_mask", lambda layer: layer(float32(3, 16), torch.zeros(2, dtype=torch.bool))),
        ("padding_mask", lambda layer: layer(float32(3, 16), torch.zeros(3, 16, dtype=torch.bool))),
        ("padding_mask", lambda layer: layer(float32(2, 3, 16), torch.zeros(6, dtype=torch.bool))),
        ("padding_mask", lambda layer: layer(float32(3, 16), torch.zeros(3))),
        ("padding_mask", lambda layer: layer(float32(3, 16), torch.zeros(3, dtype=torch.int32))),
        ("x", lambda layer: layer.to("meta")(float32(3, 16))),
        ("x", lambda layer: with_experts_elsewhere(layer)(float32(3, 16))),
    ],
)
def test_bad_calls_of_the_layer(argument, call):
    with pytest.raises(InputError, match=f"^{argument} is"):
        call(MoELayer(small_config()))


IDS, GATES = torch.tensor([[0, 7], [3, -1]]), torch.ones(2, 2)


@pytest.mark.parametrize(
    "argument,x,ids,gates",
    [
        ("x", float32(2, 15), IDS, GATES),
        ("x", float32(1, 2, 16), IDS, GATES),
        ("x", float32(2, 16).double(), IDS, GATES),
        ("routing.ids", float32(3, 16), IDS, GATES),
        ("routing.ids", float32(2, 16), IDS[0], GATES[0]),
        ("routing.ids", float32(2, 16), IDS.float(), GATES),
        ("routing.ids", float32(2, 16), IDS.short(), GATES),
        ("routing.ids", float32(2, 16), IDS + 1, GATES),
        ("routing.ids", float32(2, 16), IDS - 1, GATES),
        ("routing.gate_weights", float32(2, 16), IDS, GATES[:, :1]),
        ("routing.gate_weights", float32(2, 16), IDS, GATES.bfloat16()),
        ("routing.gate_weights", float32(2, 16), IDS, GATES.to("meta")),
        ("x", float32(2, 16).to("meta"), IDS.to("meta"), GATES.to("meta")),
        ("routing.ids", float32(2, 16), IDS.to("meta"), GATES.to("meta")),
    ],
)
def test_bad_calls_of_moe(argument, x, ids, gates):
    layer = MoELayer(small_config())
    with pytest.raises(InputError, match=f"^{argument} is"):
        moe(x, Routing(ids, gates), layer.experts, layer.transport)


@pytest.mark.parametrize("transport", ["auto", "local"])
def test_transports_of_one_rank(transport):
    config = small_config(transport=transport)
    layer = random_layer(config)
    x = torch.randn(3, 16, dtype=torch.float64)
    expected = oracle.moe_layer(x, layer.state_dict(), replace(config, transport="auto"))
    assert_close(layer(x)[0], expected, name="y")
