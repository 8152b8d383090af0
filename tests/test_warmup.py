"""`layer.warmup()`: all is compiled and allocated, and nothing else has changed."""

import copy

import pytest
import torch
import torch.distributed as dist

from ep_moe import (
    BackendUnavailable,
    MoEConfig,
    MoELayer,
    balance_hook,
    record_routing,
    replay_routing,
)
from ep_moe.testing import run_ranks
from tests.dispatch.windows import ON_GPUS
from tests.graphs import Captured, replayed
from tests.test_layer import small_config


def random_state(device):
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state()] if device.type == "cuda" else states


@pytest.mark.parametrize("backward", [True, False])
def test_it_leaves_no_trace(backward, device):
    config = small_config(
        num_shared_experts=1,
        expert_bias=True,
        aux_loss_coef=0.01,
        aux_loss_scope="global",
        forced_routing="skewed",
        forced_skew=2.0,
    )
    layer = MoELayer(config).to(device)
    balance_hook(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    layer.router.weight.requires_grad_(False)
    x = torch.randn(6, config.hidden_size, device=device)
    y, stats = layer(x)
    (y.sum() + stats.aux_loss).backward()
    counted = layer.router.tokens_since_step.clone()
    values = copy.deepcopy(layer.state_dict())
    grads = {n: p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None}
    random = random_state(device)

    calls = []
    layer.experts.register_forward_hook(
        lambda module, args, out: calls.append((len(args[0].rows), out.requires_grad))
    )
    layer.warmup(3, 5, backward=backward)
    assert calls == [
        call for t in (3, 5) for call in ([(t, True), (t, False)] if backward else [(t, False)])
    ]
    for name, value in layer.state_dict().items():
        assert torch.equal(value, values[name]), name
    assert {n for n, p in layer.named_parameters() if p.grad is not None} == set(grads)
    for name, grad in grads.items():
        assert torch.equal(layer.get_parameter(name).grad, grad), name
    assert torch.equal(layer.router.tokens_since_step, counted)
    for before, after in zip(random, random_state(device), strict=True):
        assert torch.equal(before, after)


def test_it_may_be_called_in_inference_mode():
    layer, calls = MoELayer(small_config()), []
    layer.experts.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    with torch.inference_mode():
        layer.warmup(3)
    assert calls == [True, False]


def test_a_record_of_routing_does_not_hold_it():
    layer, x = MoELayer(small_config()), torch.randn(4, 16)
    with record_routing() as record:
        layer.warmup(3)
        layer(x)
    assert [len(choice.ids) for choice in record.choices] == [4]
    with replay_routing(record):
        layer.warmup(3)
        layer(x)


def test_nor_do_the_counts_when_it_fails():
    layer = MoELayer(small_config(expert_bias=True))
    balance_hook(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    layer(torch.randn(4, 16))
    counted = layer.router.tokens_since_step

    def fail(*_):
        if layer.router.tokens_since_step is not counted:
            raise RuntimeError("no memory")

    layer.experts.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no memory"):
        layer.warmup(3)
    assert layer.router.tokens_since_step is counted


def captured_at_once(rank):
    """The first call of the layer after warmup() is captured."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    config = MoEConfig(
        hidden_size=128,
        intermediate_size=64,
        num_experts=8,
        top_k=2,
        num_shared_experts=1,
        transport="symm",
        max_tokens_per_rank=40,
    )
    torch.manual_seed(0)
    layer = MoELayer(config, dist.group.WORLD).cuda().bfloat16()
    x = torch.randn(33, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *layer.parameters()]

    def step():
        y, _ = layer(x)
        return (y.detach(), *torch.autograd.grad(y.sum(), leaves))

    layer.warmup(33)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
        with pytest.raises(BackendUnavailable, match=r"warmup\(\).*call it before"):
            layer.warmup(33)
    return replayed([Captured(graph, outputs, step)], x)


@pytest.mark.gpu
def test_a_graph_can_be_captured_next(require_gpu):
    ranks = run_ranks(captured_at_once, 2, **ON_GPUS["symm"])
    assert all(all(same) for same in ranks)
