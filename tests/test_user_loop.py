"""What a loop does around a layer: autocast, no_grad, inference mode, accumulation, compile."""

import copy
from dataclasses import replace

import pytest
import torch

import ep_moe
from ep_moe import ops
from ep_moe.testing import assert_close

CONFIG = ep_moe.MoEConfig(
    hidden_size=16,
    intermediate_size=24,
    num_experts=8,
    top_k=2,
    num_shared_experts=1,
    shared_expert_gate=True,
    mlp_bias=True,
    aux_loss_coef=0.01,
)


def layer_and_x(device, numerics="fast"):
    layer = ep_moe.MoELayer(replace(CONFIG, numerics=numerics)).to(device)
    return layer, torch.randn(12, 16, device=device)


def backward(layer, x, autocast=None):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with torch.autocast(x.device.type, dtype=autocast, enabled=autocast is not None):
        y, stats = layer(x)
    (y.float().square().sum() + ep_moe.total_aux([stats]).float()).backward()
    return y, x.grad, {name: p.grad for name, p in layer.named_parameters()}


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype_and_keeps_fp32_gradients(dtype, numerics, device):
    layer, x = layer_and_x(device, numerics)
    y, dx, grads = backward(layer, x, autocast=dtype)
    assert y.dtype == dtype
    assert {g.dtype for g in (dx, *grads.values())} == {torch.float32}
    y_fp32, dx_fp32, grads_fp32 = backward(layer, x)
    assert_close(y, y_fp32, name="y")
    assert_close(dx, dx_fp32, name="dx", tolerance=3e-2)
    for name, value in grads_fp32.items():
        assert_close(grads[name], value, name=name, tolerance=5e-2)


def test_autocast_takes_the_experts_in_the_same_dtype_as_a_cast_layer(device):
    layer, x = layer_and_x(device)
    routing, _ = layer.router(x, None)
    low = copy.deepcopy(layer).bfloat16()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = ep_moe.moe(x, routing, layer.experts, layer.transport)
    expected = ep_moe.moe(x.bfloat16(), routing, low.experts, low.transport)
    assert torch.equal(got, expected)


def test_no_grad_and_inference_mode_give_the_same_y(device):
    layer, x = layer_and_x(device)
    y, _ = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x)[0], y)
    with torch.inference_mode():
        assert torch.equal(layer(x)[0], y)
    assert torch.equal(layer(x)[0], y)  # nothing of inference mode is left behind


def test_accumulated_gradients_are_the_sum(device):
    layer, x = layer_and_x(device)
    layer.zero_grad()
    for part in x.split(3):
        layer(part)[0].square().sum().backward()
    summed = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    layer(x)[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert_close(summed[name], parameter.grad, name=name)


def test_code_around_the_layer_compiles(device):
    """The layer itself is a graph break; what stands around it is compiled, and nothing changes."""
    layer, x = layer_and_x(device)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), Block(layer)).to(device)
    expected = model(x)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        got = compiled(x)
        assert_close(got.detach(), expected.detach(), name="y")
    got.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    expected.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert_close(grads[name], parameter.grad, name=name)


@pytest.mark.parametrize("layers", [1, 3])
def test_one_graph_break_and_no_graph_for_every_number_of_tokens(layers):
    """Two graphs, before and behind the layer, which blocks share; one more of each for a T of
    any size, and that is all."""
    layer, x = layer_and_x(torch.device("cpu"))
    model = torch.nn.Sequential(*(Block(copy.deepcopy(layer)) for _ in range(layers)))
    graphs = []

    def backend(graph, _):
        graphs.append([n.target for n in graph.graph.nodes if n.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        assert torch._dynamo.explain(model)(x).graph_break_count == 1
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=backend)
        for tokens in (12, 5, 7, 8, 9, 10, 11):
            assert_close(compiled(x[:tokens]), model(x[:tokens]), name=f"y of {tokens} tokens")
    assert len(graphs) == 4
    assert all(len(operations) == 1 for operations in graphs), graphs  # silu, or the addition
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, backend=backend, fullgraph=True)(x)


class Block(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y, _ = self.layer(torch.nn.functional.silu(x))
        return x + y


@pytest.mark.parametrize("frozen", ["w_gate_up", "w_down", "experts", "router", "nothing"])
def test_no_weight_gradient_is_computed_in_vain(frozen, monkeypatch):
    layer, x = layer_and_x(torch.device("cpu"))
    for name, parameter in layer.named_parameters():
        if frozen in name:
            parameter.requires_grad_(False)
    computed = []
    wgrad, router = ops.grouped_gemm_wgrad, ops.router_logits_backward

    def spy_wgrad(*args, **options):
        computed.append("expert")
        return wgrad(*args, **options)

    def spy_router(*args, **options):
        computed.extend(["router"] * options["needs_weight"])
        return router(*args, **options)

    monkeypatch.setattr(ops, "grouped_gemm_wgrad", spy_wgrad)
    monkeypatch.setattr(ops, "router_logits_backward", spy_router)
    backward(layer, x)
    matrices = {"w_gate_up": 1, "w_down": 1, "experts": 0}.get(frozen, 2)
    assert computed.count("expert") == matrices
    assert computed.count("router") == (frozen != "router")
