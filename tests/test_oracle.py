"""The reference itself, in numbers worked by hand and against a formulation without a loop."""

import math
from dataclasses import replace

import pytest
import torch

from ep_moe import MoEConfig, Routing, SelectionConfig, oracle
from ep_moe.testing import assert_close
from tests.helpers import random_layer, small_config

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "scores,groups,kept,top_k,group_score,expected",
    [
        pytest.param([0.1, 0.8, 0.4, 0.3, 0.9, 0.7, 0.2, 0.6], 4, 2, 2, "max", [4, 1], id="groups"),
        pytest.param([3.0, -9.0, 2.0, 2.0], 2, 1, 2, "max", [0, 1], id="max"),
        pytest.param([3.0, -9.0, 2.0, 2.0], 2, 1, 2, "top2_sum", [2, 3], id="top-2 sum"),
        pytest.param([1.0, 2.0, 2.0, 1.0], 1, 1, 3, "max", [1, 2, 0], id="ties to the lowest id"),
        pytest.param([1.0, 2.0, 2.0, 1.0], 2, 1, 1, "max", [1], id="ties to the lowest group"),
        pytest.param([INF, NAN, -INF, NAN], 1, 1, 4, "max", [1, 3, 0, 2], id="NaN is greatest"),
        pytest.param([-INF, -INF, 1.0, -INF], 2, 1, 2, "max", [2, 3], id="-inf stays in its group"),
    ],
)
def test_choose(scores, groups, kept, top_k, group_score, expected):
    config = SelectionConfig(
        top_k=top_k, num_expert_group=groups, topk_group=kept, group_score=group_score
    )
    assert oracle.choose(scores, config) == expected


def test_route_by_hand():
    """Softmax of (ln 1, ln 2, ln 5) is 1/8, 2/8, 5/8."""
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0)]], dtype=torch.float64)
    for renormalize, weights in [(True, [5 / 7, 2 / 7]), (False, [5 / 8, 2 / 8])]:
        config = small_config(num_experts=3, renormalize=renormalize, routed_scaling_factor=3.0)
        routing = oracle.route(logits, config)
        assert routing.ids.tolist() == [[2, 1]]
        assert routing.gate_weights[0].tolist() == pytest.approx([3 * w for w in weights])
    config = small_config(num_experts=3, scoring_func="sigmoid")
    routing = oracle.route(logits, config, torch.tensor([9.0, 0.0, 0.0]))
    assert routing.ids.tolist() == [[0, 2]]
    sigmoids = [0.5, 5 / 6]
    assert routing.gate_weights[0].tolist() == pytest.approx([s / sum(sigmoids) for s in sigmoids])
    # softplus(ln(e^n - 1)) is n
    logits = torch.tensor([[math.log(math.e - 1), -9.0, math.log(math.e**4 - 1)]])
    routing = oracle.route(logits, small_config(num_experts=3, scoring_func="sqrtsoftplus"))
    assert routing.ids.tolist() == [[2, 0]]
    assert routing.gate_weights[0].tolist() == pytest.approx([2 / 3, 1 / 3])


@pytest.mark.parametrize(
    "activation,gate,up,h",
    [
        ("swiglu", 2.0, 3.0, 2 / (1 + math.exp(-2.0)) * 3),
        ("swiglu_clamped", 2.0, 3.0, 2 / (1 + math.exp(-3.404)) * 4),
        ("swiglu_clamped", 9.0, 9.0, 7 / (1 + math.exp(-1.702 * 7)) * 8),
        ("swiglu_clamped", -9.0, -9.0, -9 / (1 + math.exp(1.702 * 9)) * -6),
        ("geglu", 2.0, 3.0, 2 * 0.9772498680518208 * 3),  # the normal distribution's share below 2
        ("relu2", 3.0, None, 9.0),
        ("relu2", -3.0, None, 0.0),
    ],
)
def test_one_expert_by_hand(activation, gate, up, h):
    """Width 1, the token is 1: gate half first, then up (or nothing); down 10 and its bias 0.5."""
    first = [gate - 0.25] if up is None else [gate - 0.25, up]
    weights = {
        "e.w_gate_up": torch.tensor(first, dtype=torch.float64)[:, None],
        "e.b_gate_up": torch.tensor([0.25, 0.0], dtype=torch.float64)[: len(first)],
        "e.w_down": torch.tensor([[10.0]], dtype=torch.float64),
        "e.b_down": torch.tensor([0.5], dtype=torch.float64),
    }
    one = torch.ones(1, dtype=torch.float64)
    assert oracle.mlp(one, weights, "e", activation).item() == pytest.approx(10 * h + 0.5)


def test_layer_equals_all_experts_times_a_sparse_matrix_of_gates():
    config = small_config(num_shared_experts=1, mlp_bias=True, num_experts=5, top_k=3)
    weights = random_layer(config).state_dict()
    x = torch.randn(7, 16, dtype=torch.float64)
    scores = (x @ weights["router.weight"].t()).softmax(1)
    top = scores.topk(3)
    gates = torch.zeros_like(scores).scatter(1, top.indices, top.values)
    gates = gates / gates.sum(1, keepdim=True)

    def swiglu(pre):
        gate, up = pre.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    first = torch.einsum("th,eih->tei", x, weights["experts.w_gate_up"])
    h = swiglu(first + weights["experts.b_gate_up"])
    every = torch.einsum("tei,ehi->teh", h, weights["experts.w_down"]) + weights["experts.b_down"]
    shared = swiglu(x @ weights["shared_experts.w_gate_up"].t())
    expected = (gates[..., None] * every).sum(1) + shared @ weights["shared_experts.w_down"].t()
    assert_close(oracle.moe_layer(x, weights, config), expected, name="y")


@pytest.mark.parametrize("gate_on,expected", [("output", 8.0), ("input", 4.0)])
def test_where_the_gate_weight_multiplies(gate_on, expected):
    """An expert that squares, a token of 4, a gate weight of 1/2: 4^2 / 2, or (4 / 2)^2."""
    config = small_config(
        hidden_size=1, intermediate_size=1, num_experts=1, top_k=1, activation="relu2"
    )
    weights = {f"experts.{name}": torch.ones(1, 1, 1) for name in ("w_gate_up", "w_down")}
    half = Routing(torch.tensor([[0]]), torch.tensor([[0.5]]))
    config = replace(config, gate_on=gate_on)
    assert oracle.moe_layer(torch.tensor([[4.0]]), weights, config, routing=half) == expected


def test_shared_expert_gate_is_a_sigmoid_of_the_token():
    """A shared expert that squares, a token of 2: 4 times sigmoid(ln 3) = 3/4."""
    config = small_config(
        hidden_size=1, activation="relu2", num_shared_experts=1, shared_expert_gate=True
    )
    weights = {f"shared_experts.{name}": torch.ones(1, 1) for name in ("w_gate_up", "w_down")}
    weights["shared_experts.w_gate"] = torch.tensor([[math.log(3.0) / 2]])
    nowhere = Routing(torch.tensor([[-1, -1]]), torch.zeros(1, 2))
    y = oracle.moe_layer(torch.tensor([[2.0]]), weights, config, routing=nowhere)
    assert y.item() == pytest.approx(3.0)


def test_absent_choices_and_padding_add_nothing():
    config = MoEConfig(
        hidden_size=4, intermediate_size=3, num_experts=3, top_k=2, num_shared_experts=1
    )
    weights = random_layer(config).state_dict()
    x = torch.randn(3, 4, dtype=torch.float64)
    gates = torch.tensor([[0.5, 0.5], [1.0, NAN], [NAN, NAN]], dtype=torch.float64)
    routing = Routing(torch.tensor([[0, 2], [1, -1], [-1, -1]]), gates)
    y = oracle.moe_layer(x, weights, config, routing=routing, padding_mask=torch.arange(3) == 0)
    shared = [oracle.mlp(row, weights, "shared_experts", "swiglu") for row in x]
    assert (y[0] == 0).all()
    second = oracle.mlp(x[1], weights, "experts", "swiglu", 1)
    assert_close(y[1], second + shared[1], name="one choice")
    assert_close(y[2], shared[2], name="no choice")


def test_no_tokens():
    config = small_config()
    x = torch.zeros(0, 16, dtype=torch.float64)
    assert oracle.moe_layer(x, random_layer(config).state_dict(), config).shape == (0, 16)
