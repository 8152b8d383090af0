"""numerics: exact. To the last bit, y, dX and the experts' gradients know neither how many ranks
there are nor what else is in the batch."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ep_moe import MoEConfig, MoELayer
from ep_moe.testing import assert_close, run_ranks
from tests.helpers import random_layer

TOKENS, HIDDEN = 60, 1024
CONFIG = MoEConfig(
    hidden_size=HIDDEN,
    intermediate_size=192,
    num_experts=8,
    top_k=3,
    num_shared_experts=1,
    numerics="exact",
    loss_reduction="sum",
)
EXACT = ("y", "dx", "w_gate_up", "w_down")

# Narrow, and of sizes that end in the middle of a vector register and of a cache line.
SMALL = replace(CONFIG, hidden_size=40, intermediate_size=33, num_experts=20, num_shared_experts=0)
VARIANTS = {
    "a wider expert": {"intermediate_size": 191},
    "hidden size 33": {"hidden_size": 33},
    "all sizes 1": {"hidden_size": 1, "intermediate_size": 1},
    "geglu": {"activation": "geglu"},
    "relu2": {"activation": "relu2"},
    "swiglu_clamped": {"activation": "swiglu_clamped"},
    "softmax of all": {"renormalize": False},
    "softmax, one choice": {"renormalize": False, "top_k": 1},
    "sigmoid": {"scoring_func": "sigmoid"},
    "sigmoid as it is": {"scoring_func": "sigmoid", "renormalize": False, "top_k": 12},
    "sigmoid, one choice": {
        "scoring_func": "sigmoid",
        "renormalize": False,
        "top_k": 1,
        "temperature": 8.0,  # near 1 its last bit seldom moves
    },
    "sqrtsoftplus": {"scoring_func": "sqrtsoftplus"},
    "sqrtsoftplus as it is": {"scoring_func": "sqrtsoftplus", "renormalize": False},
    "sqrtsoftplus, one choice": {
        "scoring_func": "sqrtsoftplus",
        "renormalize": False,
        "top_k": 1,
    },
    "selection by biased score": {"scoring_func": "sigmoid", "expert_bias": True},
    "groups": {"num_expert_group": 5, "topk_group": 2},
    "groups by two scores": {
        "num_expert_group": 5,
        "topk_group": 2,
        "group_score": "top2_sum",
        "scoring_func": "sqrtsoftplus",
    },
    "gates on the input": {"gate_on": "input"},
    "expert biases": {"mlp_bias": True},
    "router bias and temperature": {"router_bias": True, "temperature": 0.7},
    "learned temperature": {"learn_temperature": True, "routed_scaling_factor": 2.5},
    "shared experts": {"num_shared_experts": 2, "activation": "geglu"},
    "gated shared experts": {"num_shared_experts": 1, "shared_expert_gate": True},
}
# On two ranks five experts each: an expert's matrices are aligned otherwise than on one.
COMBINED = {
    "geglu, sigmoid, biases": {
        "activation": "geglu",
        "scoring_func": "sigmoid",
        "renormalize": False,
        "mlp_bias": True,
        "hidden_size": 33,
    },
    "clamped, sqrtsoftplus, groups, gated shared": {
        "activation": "swiglu_clamped",
        "scoring_func": "sqrtsoftplus",
        "num_expert_group": 5,
        "topk_group": 2,
        "num_shared_experts": 1,
        "shared_expert_gate": True,
    },
    "one choice, gates on the input": {
        "top_k": 1,
        "renormalize": False,
        "gate_on": "input",
        "intermediate_size": 191,
        "hidden_size": 33,
    },
}


@pytest.fixture(autouse=True)
def _one_thread():
    """As the ranks have: the promise is for one number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TwoLayers(nn.Module):
    """Stacked: a last bit that the first layer gets wrong can flip a choice in the second."""

    def __init__(self, config, ep):
        super().__init__()
        self.first, self.second = MoELayer(config, ep=ep), MoELayer(config, ep=ep)

    def forward(self, x):
        h = x + self.first(x)[0]
        return h + self.second(h)[0]


def model_and_data(config, dtype, ep=None):
    torch.manual_seed(0)
    model = TwoLayers(config, ep).to(dtype)
    with torch.no_grad():
        for layer in (model.first, model.second):
            layer.router.weight[:3] += 0.02  # skewed: three experts are better known
    x = torch.randn(TOKENS, HIDDEN).to(dtype) + 0.2
    d_y = torch.randn(TOKENS, HIDDEN).to(dtype)
    return model, x.to(dtype), d_y


def results(model, x, d_y):
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(d_y)
    gathered = {"y": y.detach(), "dx": x.grad}
    for name in ("w_gate_up", "w_down"):
        layers = (model.first, model.second)
        gathered[name] = torch.stack([getattr(m.experts, name).grad for m in layers])
    return gathered


def rank_results(rank, config, dtype, shares, device="cpu"):
    model, x, d_y = model_and_data(config, dtype, dist.group.WORLD)
    first = sum(shares[:rank])
    mine = slice(first, first + shares[rank])
    got = results(model.to(device), x[mine].to(device), d_y[mine].to(device))
    return {name: value.cpu() for name, value in got.items()}


def joined(ranks):
    """The ranks' tokens one after the other, the ranks' experts one after the other."""
    return {
        name: torch.cat([got[name] for got in ranks], dim=0 if name in ("y", "dx") else 1)
        for name in EXACT
    }


def differing(got, expected):
    return {name for name in EXACT if not torch.equal(got[name], expected[name])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shares",
    [(60,), (47, 13), (0, 60), (15, 15, 15, 15), (1, 40, 0, 19), (1, 20, 0, 12, 5, 0, 19, 3)],
)
def test_the_number_of_ranks_does_not_matter(shares, dtype):
    ranks = run_ranks(rank_results, len(shares), CONFIG, dtype, shares)
    assert differing(joined(ranks), results(*model_and_data(CONFIG, dtype))) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shares", [(47, 13), (1, 40, 0, 19), (1, 20, 0, 12, 5, 0, 19, 3)])
def test_the_number_of_ranks_does_not_matter_on_a_gpu(shares, dtype, require_gpu):
    ranks = run_ranks(
        rank_results, len(shares), CONFIG, dtype, shares, "cuda", backend="nccl", timeout=180.0
    )
    model, x, d_y = model_and_data(CONFIG, dtype)
    expected = results(model.cuda(), x.cuda(), d_y.cuda())
    assert differing(joined(ranks), {n: v.cpu() for n, v in expected.items()}) == set()


def test_with_mean_reduction_too():
    """1/W is exact for a power of two."""
    config = replace(CONFIG, loss_reduction="mean")
    ranks = run_ranks(rank_results, 4, config, torch.float32, (1, 40, 0, 19))
    got = joined(ranks)
    got |= {name: got[name] * 4 for name in ("w_gate_up", "w_down")}
    assert differing(got, results(*model_and_data(config, torch.float32))) == set()


def test_fast_numerics_differ_somewhere():
    """Or the tests above could not fail: the same comparison, quantity by quantity."""
    config = replace(CONFIG, numerics="fast")
    ranks = run_ranks(rank_results, 4, config, torch.float32, (1, 40, 0, 19))
    expected = results(*model_and_data(config, torch.float32))
    assert differing(joined(ranks), expected) == set(EXACT)
    for name, value in joined(ranks).items():
        assert_close(value, expected[name], name=name, tolerance=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_alone_is_as_in_a_batch(dtype):
    model, x, d_y = model_and_data(CONFIG, dtype)
    whole = results(model, x, d_y)
    for t in (0, 1, TOKENS - 1):
        model.zero_grad()
        alone = results(model, x[t : t + 1], d_y[t : t + 1])
        for name in ("y", "dx"):
            assert torch.equal(alone[name][0], whole[name][t]), f"{name} of token {t}"


@pytest.mark.parametrize("gate_on", ["output", "input"])
def test_exact_is_close_to_fast(gate_on):
    config = replace(CONFIG, gate_on=gate_on)
    exact = results(*model_and_data(config, torch.float64))
    fast = results(*model_and_data(replace(config, numerics="fast"), torch.float64))
    for name in EXACT:
        assert_close(exact[name], fast[name], name=name)


def layer_and_data(config, dtype, ep=None):
    torch.manual_seed(0)
    layer = MoELayer(config, ep=ep)
    every_rank = random_layer(config, dtype)  # all experts, whatever the rank
    experts = slice(layer.experts.global_ids.start, layer.experts.global_ids.stop)
    with torch.no_grad():
        for name, value in layer.state_dict(keep_vars=True).items():
            source = every_rank.state_dict()[name]
            value.copy_(source[experts] if name.startswith("experts.") else source)
    x, d_y = (torch.randn(2, TOKENS, config.hidden_size) * 1.5).to(dtype)
    return layer.to(dtype), x, d_y


def layer_results(layer, x, d_y):
    """y, dx, and the gradients of the routed experts."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y, _ = layer(x)
    y.backward(d_y)
    parameters = {name: p.grad for name, p in layer.experts.named_parameters()}
    return {"y": y.detach(), "dx": x.grad, **parameters}


def rank_layer_results(rank, configs, dtype, shares, device="cpu"):
    first = sum(shares[:rank])
    mine = slice(first, first + shares[rank])
    results = []
    for config in configs:
        layer, x, d_y = layer_and_data(config, dtype, dist.group.WORLD)
        got = layer_results(layer.to(device), x[mine].to(device), d_y[mine].to(device))
        results.append({name: value.cpu() for name, value in got.items()})
    return results


def same_on_two_ranks(dtype, device="cpu", **ranks):
    configs = [replace(SMALL, num_experts=10, **changes) for changes in COMBINED.values()]
    ranks = run_ranks(rank_layer_results, 2, configs, dtype, (47, 13), device, **ranks)
    for name, config, *parts in zip(COMBINED, configs, *ranks, strict=True):
        layer, x, d_y = layer_and_data(config, dtype)
        expected = layer_results(layer.to(device), x.to(device), d_y.to(device))
        for quantity, value in expected.items():
            got = torch.cat([part[quantity] for part in parts])
            assert torch.equal(got, value.cpu()), f"{quantity} with {name}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_token_alone_is_as_in_a_batch_in_every_configuration(variant, dtype, device):
    alone_as_in_a_batch(variant, dtype, device)


def test_nor_with_two_threads_does_the_batch_matter():
    """Some functions share out the elements of a row where there are fewer rows than threads."""
    torch.set_num_threads(2)
    alone_as_in_a_batch("softmax of all", torch.float32, torch.device("cpu"))


def alone_as_in_a_batch(variant, dtype, device):
    layer, x, d_y = layer_and_data(replace(SMALL, **VARIANTS[variant]), dtype)
    layer, x, d_y = layer.to(device), x.to(device), d_y.to(device)
    whole = layer_results(layer, x, d_y)
    parts = [slice(t, t + 1) for t in range(TOKENS)] + [slice(3, 8), slice(20, 37)]
    found = [layer_results(layer, x[part], d_y[part]) for part in parts]
    for name in ("y", "dx"):
        other = [
            part
            for part, got in zip(parts, found, strict=True)
            if not torch.equal(got[name], whole[name][part])
        ]
        assert not other, f"{name} of {len(other)} parts, the first {other[0]}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_number_of_ranks_does_not_matter_in_other_configurations(dtype):
    same_on_two_ranks(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nor_on_a_gpu(dtype, require_gpu):
    same_on_two_ranks(dtype, "cuda", backend="nccl", timeout=180.0)
