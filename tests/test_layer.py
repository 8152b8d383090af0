"""The whole layer on one process against the one-page oracle: y, dx and every gradient."""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor

from ep_moe import (
    MoELayer,
    Routing,
    moe,
    ops,
    oracle,
    select_experts,
    total_aux,
)
from ep_moe.testing import TOLERANCE, assert_close
from tests.helpers import NOT_POWERS_OF_TWO, leaf, random_layer, small_config

pytestmark = pytest.mark.usefixtures("poisoned_memory")

GROUPED = {"num_expert_group": 4, "topk_group": 2, "top_k": 3}
MATRIX = {
    "plain": {},
    "top 1": {"top_k": 1, "renormalize": False},
    "K = E": {"top_k": 8},
    "one expert": {"num_experts": 1, "top_k": 1},
    "softmax, not renormalised": {"renormalize": False, "routed_scaling_factor": 2.5},
    "sigmoid": {"scoring_func": "sigmoid"},
    "sigmoid, not renormalised": {"scoring_func": "sigmoid", "renormalize": False},
    "groups": GROUPED,
    "groups by top-2 sum": {**GROUPED, "group_score": "top2_sum"},
    "selection bias": {"expert_bias": True},
    "DeepSeek-V3": {
        **GROUPED,
        "scoring_func": "sigmoid",
        "group_score": "top2_sum",
        "expert_bias": True,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    },
    "GPT-OSS": {"router_bias": True, "mlp_bias": True, "activation": "swiglu_clamped", "top_k": 4},
    "shared experts": {"num_shared_experts": 2},
    "shared experts of another width": {"num_shared_experts": 1, "shared_intermediate_size": 5},
    "temperature": {"temperature": 0.5},
    "learnt temperature": {"temperature": 0.5, "learn_temperature": True},
    "odd sizes": {"hidden_size": 33, "intermediate_size": 17, "num_experts": 7, "top_k": 3},
    "H = I": {"hidden_size": 12, "intermediate_size": 12},
    "H = 2I": {"hidden_size": 24, "intermediate_size": 12},
}


def results(y: Tensor, d_y: Tensor, x: Tensor, parameters: dict[str, Tensor]):
    """y, dx and the gradient of every parameter by name."""
    found = torch.autograd.grad(y, [x, *parameters.values()], d_y)
    return {"y": y.detach()} | dict(zip(["x", *parameters], found, strict=True))


def of_oracle(layer, x, d_y, padding_mask=None, routing=None):
    exact, weights = leaf(x), {n: v.double() for n, v in layer.state_dict().items()}
    parameters = {n: leaf(p) for n, p in layer.named_parameters()}
    if routing is not None:
        parameters = {n: p for n, p in parameters.items() if n.startswith("experts.")}
    y = oracle.moe_layer(
        exact, weights | parameters, layer.config, padding_mask=padding_mask, routing=routing
    )
    return results(y, d_y.double(), exact, parameters)


def compare(got, expected, tolerance=None):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(got[name], value, name=name, tolerance=tolerance)


@pytest.mark.parametrize("changes", MATRIX.values(), ids=MATRIX.keys())
def test_equals_the_oracle(changes, device):
    layer = random_layer(small_config(**changes)).to(device)
    x, d_y = torch.randn(2, 13, layer.config.hidden_size, dtype=torch.float64, device=device)
    x.requires_grad_()
    y, _ = layer(x)
    got = results(y, d_y, x, dict(layer.named_parameters()))
    compare(got, of_oracle(layer, x, d_y))


@pytest.mark.parametrize("changes", [MATRIX["plain"], MATRIX["DeepSeek-V3"], MATRIX["GPT-OSS"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype, changes, device):
    layer = random_layer(small_config(**changes), dtype).to(device)
    x, d_y = torch.randn(2, 29, 16, device=device).to(dtype)
    x.requires_grad_()
    y, stats = layer(x)
    assert y.dtype == dtype
    assert stats.aux_loss.dtype == stats.z_loss.dtype == torch.float32
    got = results(y, d_y, x, dict(layer.named_parameters()))
    compare(got, of_oracle(layer, x, d_y), TOLERANCE[dtype])


def test_baseline_of_eight_experts():
    """Hidden 1024, a batch of 32. Parameter gradients are compared at small sizes: a loop that
    indexes weights one expert at a time is slow to differentiate."""
    layer = MoELayer(small_config(hidden_size=1024, intermediate_size=512))
    x, d_y = torch.randn(2, 32, 1024)
    x.requires_grad_()
    y, stats = layer(x)
    assert stats.tokens_per_expert.sum() == 64
    exact, weights = leaf(x), {n: v.double() for n, v in layer.state_dict().items()}
    expected = results(oracle.moe_layer(exact, weights, layer.config), d_y.double(), exact, {})
    compare(results(y, d_y, x, {}), expected)


@pytest.mark.parametrize("num_experts", NOT_POWERS_OF_TWO)
def test_any_number_of_experts(num_experts, device):
    """Case BB-19"""
    config = small_config(num_experts=num_experts, top_k=min(4, num_experts), hidden_size=4)
    layer = random_layer(config).to(device)
    x, d_y = torch.randn(2, 10, 4, dtype=torch.float64, device=device)
    x.requires_grad_()
    y, stats = layer(x)
    assert stats.tokens_per_expert.sum() == 10 * config.top_k
    got = results(y, d_y, x, dict(layer.named_parameters()))
    compare(got, of_oracle(layer, x, d_y))


@pytest.mark.parametrize("shape", [(16,), (1, 16), (5, 16), (2, 3, 16), (2, 1, 3, 16)])
def test_any_leading_shape(shape):
    layer = random_layer(small_config(num_shared_experts=1))
    x = torch.randn(shape, dtype=torch.float64)
    y, _ = layer(x)
    assert y.shape == shape
    flat, _ = layer(x.reshape(-1, 16))
    assert torch.equal(y.reshape(-1, 16), flat)


@pytest.mark.parametrize("shape", [(0, 16), (0, 7, 16), (3, 0, 16)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_tokens_give_zero_gradients_not_none(dtype, masked, shape, device):
    config = small_config(
        num_shared_experts=1,
        mlp_bias=True,
        router_bias=True,
        learn_temperature=True,
        aux_loss_coef=0.1,
        z_loss_coef=0.1,
    )
    layer = random_layer(config, dtype).to(device)
    x = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    mask = torch.zeros(shape[:-1], dtype=torch.bool, device=device) if masked else None
    y, stats = layer(x, mask)
    assert y.shape == x.shape
    assert stats.tokens_per_expert.tolist() == [0] * 8
    (y.sum() + total_aux([stats])).backward()
    assert x.grad.shape == shape
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


def test_unused_experts_give_zero_gradients_not_none():
    """Case BB-103: one token; DDP and optimizers wait for the gradient of every expert."""
    layer = random_layer(small_config())
    y, stats = layer(torch.randn(1, 16, dtype=torch.float64))
    y.sum().backward()
    idle = stats.tokens_per_expert == 0
    assert idle.sum() == 6
    for name, parameter in layer.experts.named_parameters():
        assert (parameter.grad[idle] == 0).all(), name
        assert (parameter.grad[~idle] != 0).flatten(1).any(dim=1).all(), name


@pytest.mark.parametrize("activation", ["swiglu", "swiglu_clamped"])
@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
def test_nothing_under_the_padding_mask_reaches_anything(garbage, activation):
    """y, its gradients and the losses are those of the real tokens alone; y at padding is 0."""
    config = small_config(
        num_shared_experts=1,
        router_bias=True,
        activation=activation,
        aux_loss_coef=0.1,
        z_loss_coef=0.1,
    )
    layer = random_layer(config)
    parameters = dict(layer.named_parameters())
    mask = torch.tensor([[False, True, False], [True, False, False]])
    clean = torch.randn(2, 3, 16, dtype=torch.float64)
    x = clean.masked_fill(mask[..., None], garbage).requires_grad_()
    d_y = torch.randn(2, 3, 16, dtype=torch.float64)
    y, stats = layer(x, mask)
    assert (y[mask] == 0).all()
    loss = (y * d_y).sum() + total_aux([stats])
    got = torch.autograd.grad(loss, [x, *parameters.values()])
    assert (got[0][mask] == 0).all()

    alone = clean[~mask].requires_grad_()
    y_alone, stats_alone = layer(alone)
    assert_close(y[~mask], y_alone, name="y")
    loss = (y_alone * d_y[~mask]).sum() + total_aux([stats_alone])
    expected = torch.autograd.grad(loss, [alone, *parameters.values()])
    assert_close(got[0][~mask], expected[0], name="dx")
    for name, a, b in zip(parameters, got[1:], expected[1:], strict=True):
        assert_close(a, b, name=name)


def test_own_routing_equals_the_layer():
    """`moe` with what the router chose; then without a gate gradient, against the oracle."""
    layer = random_layer(small_config())
    x, d_y = torch.randn(2, 13, 16, dtype=torch.float64)
    x.requires_grad_()
    parameters = dict(layer.named_parameters())
    expected = results(layer(x)[0], d_y, x, parameters)
    routing, _ = layer.router(x, None)
    y = moe(x, routing, layer.experts, layer.transport)
    compare(results(y, d_y, x, parameters), expected)

    fixed = Routing(routing.ids.long(), routing.gate_weights.detach())
    y = moe(x, fixed, layer.experts, layer.transport)
    experts = {name: p for name, p in parameters.items() if name.startswith("experts.")}
    compare(results(y, d_y, x, experts), of_oracle(layer, x, d_y, routing=fixed))


def test_own_routing_may_leave_slots_empty():
    layer = random_layer(small_config())
    x = torch.randn(3, 16, dtype=torch.float64)
    ids = torch.tensor([[0, -1], [-1, 3], [-1, -1]], dtype=torch.int32)
    gates = torch.tensor([[0.5, math.nan], [math.nan, 2.0], [math.nan, math.nan]])
    y = moe(x, Routing(ids, gates), layer.experts, layer.transport)
    expected = oracle.moe_layer(
        x, layer.state_dict(), layer.config, routing=Routing(ids, gates.double())
    )
    assert_close(y, expected, name="y")
    assert (y[2] == 0).all()


@pytest.mark.parametrize("gate_on", ["output", "input"])
@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_scale_multiplies_the_routed_experts_once(numerics, gate_on):
    """Case BB-17: experts that are 1x and 2x, gates .6 and .4, scale 2.5, a shared expert 10x."""
    config = small_config(
        numerics=numerics,
        gate_on=gate_on,
        hidden_size=2,
        intermediate_size=2,
        num_experts=2,
        num_shared_experts=1,
        mlp_bias=True,
        routed_scaling_factor=2.5,
    )
    layer = MoELayer(config).double()
    x = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    constant = 1 / (1 + math.exp(-1.0))  # silu(1): with a gate of 1 an expert is linear
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
        layer.router.weight[:, 0] = torch.tensor([0.6, 0.4]).log()
        layer.experts.b_gate_up[:, :2] = 1.0
        layer.experts.w_gate_up[:, 2:] = torch.eye(2)
        layer.experts.w_down.copy_(torch.eye(2) / constant * torch.tensor([[[1.0]], [[2.0]]]))
        layer.shared_experts.w_gate_up[:2, 0] = 1.0  # times x[0] = 1
        layer.shared_experts.w_gate_up[2:] = torch.eye(2)
        layer.shared_experts.w_down.copy_(torch.eye(2) * 10 / constant)
    y, _ = layer(x)
    assert_close(y, 13.5 * x, name="y", tolerance=1e-6)
    for wrong in (18.75, 28.5, 11.4):  # twice, on the shared expert too, never
        with pytest.raises(AssertionError):
            assert_close(wrong * x, 13.5 * x, name="y", tolerance=1e-6)


LOSSES = {
    "sum": lambda y: y.sum(),
    "transposed": lambda y: (y.t() * torch.arange(13.0)).sum(),
    "sliced": lambda y: (y[:, ::2] ** 2).sum(),
    "concatenated": lambda y: (torch.cat([y, y * 2])[5:20] ** 2).sum(),
    "expanded": lambda y: (y[:1].expand(4, 16) ** 3).sum(),
    "only touched": lambda y: y.sum() * 0,
}


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_gradients_that_are_not_contiguous(loss, numerics):
    """Case BB-27"""
    layer = random_layer(small_config(num_shared_experts=1, numerics=numerics))
    x = torch.randn(13, 16, dtype=torch.float64, requires_grad=True)
    y, _ = layer(x)
    (d_y,) = torch.autograd.grad(loss(y), y, retain_graph=True)
    parameters = dict(layer.named_parameters())
    expected = results(y, d_y.clone(memory_format=torch.contiguous_format), x, parameters)
    got = torch.autograd.grad(loss(layer(x)[0]), [x, *parameters.values()])
    for name, value in zip(["x", *parameters], got, strict=True):
        assert_close(value, expected[name], name=name)


def test_frozen_parts_get_nothing_and_change_nothing():
    """All combinations of trained experts, router and input."""
    layer = random_layer(small_config(mlp_bias=True))
    x, d_y = torch.randn(2, 9, 16, dtype=torch.float64)
    parts = {
        "experts": dict(layer.experts.named_parameters()),
        "router": dict(layer.router.named_parameters()),
        "x": {"x": x.requires_grad_()},
    }
    leaves = {f"{part}.{name}": v for part, named in parts.items() for name, v in named.items()}
    expected = dict(
        zip(leaves, torch.autograd.grad(layer(x)[0], leaves.values(), d_y), strict=True)
    )
    for trained in itertools.product([False, True], repeat=3):
        for needs, named in zip(trained, parts.values(), strict=True):
            for value in named.values():
                value.grad = None
                value.requires_grad_(needs)
        y, _ = layer(x)
        assert y.requires_grad == any(trained)
        if y.requires_grad:
            y.backward(d_y)
        for needs, part in zip(trained, parts, strict=True):
            for name, value in parts[part].items():
                where = f"{part}.{name}, trained {trained}"
                assert (value.grad is not None) == needs, where
                if needs:
                    assert_close(value.grad, expected[f"{part}.{name}"], name=where)


def test_select_experts_and_moe_are_a_router_of_ones_own():
    """The public pieces, strung together by hand, are the layer."""
    layer = random_layer(small_config(scoring_func="sigmoid"))
    x = torch.randn(5, 16, dtype=torch.float64)
    routing = select_experts(x @ layer.router.weight.t(), layer.config)
    y = moe(x, routing, layer.experts, layer.transport)
    assert_close(y, layer(x)[0], name="y")


def test_one_rank_knows_how_many_rows_it_packs_at_most(monkeypatch):
    """Or a GPU would have to be asked."""
    pack, asked = ops.pack, []
    monkeypatch.setattr(ops, "pack", lambda *args: asked.append(args[2:]) or pack(*args))
    layer = random_layer(small_config(top_k=3))
    layer(torch.randn(5, 16, dtype=torch.float64))
    assert asked == [(5 * 3,)]


@pytest.mark.gpu
@pytest.mark.multigpu(2)
def test_a_layer_on_another_gpu_than_the_current_one(require_gpu):
    """Triton launches on the current device, wherever its pointers point."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    layer, results = random_layer(small_config(), torch.float32), []
    x = torch.randn(9, 16)
    for device in ("cuda:0", "cuda:1"):
        here = x.to(device).requires_grad_()
        y, _ = copy.deepcopy(layer).to(device)(here)
        y.square().sum().backward()
        results.append((y.cpu(), here.grad.cpu()))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
