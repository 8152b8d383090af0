"""Scores of sqrt(softplus(logit)), DeepSeek-V4's: both ends of the number line, where the formula
as written underflows, overflows, or loses its digits."""

import math

import pytest
import torch

from ep_moe import SelectionConfig, oracle, select_experts
from ep_moe.routing import dense_probabilities
from ep_moe.testing import TOLERANCE, assert_close
from tests.helpers import DTYPES, leaf


def from_config(**changes):
    return SelectionConfig(**({"scoring_func": "sqrtsoftplus", "top_k": 3} | changes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_and_gradients(renormalize, dtype, device):
    config = from_config(
        renormalize=renormalize, routed_scaling_factor=1.5, num_expert_group=5, topk_group=2
    )
    logits = (torch.randn(17, 20, device=device) * 3).to(dtype).requires_grad_()
    routing = select_experts(logits, config)
    exact = leaf(logits)
    expected = oracle.route(exact, config)
    assert torch.equal(routing.ids, expected.ids)
    assert_close(routing.gate_weights, expected.gate_weights, name="weights")
    d_weights = torch.randn_like(routing.gate_weights)
    routing.gate_weights.backward(d_weights)
    expected.gate_weights.backward(d_weights.double())
    assert_close(logits.grad, exact.grad, name="d_logits")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_score_of_any_logit(dtype, device):
    """One expert, so that weight and gradient are those of its score; relative to each value, by
    Python's own log1p, which keeps the digits that 1 + exp(x) loses."""
    steps = torch.arange(-45.0, 45.0, 0.25, dtype=torch.float64).tolist()
    for x in [*steps, 88.8, 1e3, 1e30]:
        softplus = math.log1p(math.exp(x)) if x < 700 else x
        slope = 1 / (1 + math.exp(-x)) / (2 * math.sqrt(softplus))
        logit = torch.tensor([[x]], dtype=dtype, device=device, requires_grad=True)
        weight = select_experts(logit, from_config(top_k=1, renormalize=False)).gate_weights
        weight.backward()
        rounding = {"rel": 1e-12 if dtype == torch.float64 else 1e-5, "abs": 0.0}
        assert weight.item() == pytest.approx(math.sqrt(softplus), **rounding), x
        assert logit.grad.item() == pytest.approx(slope, **rounding), x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", [-20.0, -88.0, -104.0, -240.0, -1000.0])
def test_underflowing_scores_keep_their_ratio(level, dtype, device):
    """Far below zero a score is exp(x / 2): shares are a softmax of that, not 0/0."""
    config = from_config()
    logits = torch.tensor([[level, level - 1, level - 2, level - 500]], device=device).to(dtype)
    logits.requires_grad_()
    ids, weights = vars(select_experts(logits, config)).values()
    exact = leaf(logits)
    expected = (exact.gather(1, ids.long()) / 2).softmax(1)
    assert_close(weights, expected, name="weights", tolerance=1e-5)
    d_weights = torch.tensor([[1.0, -2.0, 3.0]], device=device)
    weights.backward(d_weights)
    expected.backward(d_weights.double())
    assert_close(logits.grad, exact.grad, name="d_logits", tolerance=TOLERANCE[dtype])
    p = dense_probabilities(logits.float(), config)
    assert_close(p, (logits.double() / 2).softmax(1), name="p of the balance loss")


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("value", [-math.inf, -1e30, 1e30])
def test_extreme_logits_beside_others_stay_finite(value, renormalize):
    """-inf too: an expert that is masked weighs nothing and harms nobody."""
    logits = torch.tensor([[0.5, value, -1.0, 2.0]], requires_grad=True)
    weights = select_experts(logits, from_config(renormalize=renormalize, top_k=4)).gate_weights
    weights.square().sum().backward()
    assert weights.isfinite().all()
    assert logits.grad.isfinite().all()


def test_the_selection_bias_only_selects(device):
    config = from_config(top_k=2)
    logits = torch.tensor([[3.0, 1.0, -2.0, -4.0]], dtype=torch.float64, device=device)
    bias = torch.tensor([0.0, 0.0, 0.0, 2.0], device=device)
    routing = select_experts(logits, config, expert_bias=bias)
    assert routing.ids.tolist() == [[3, 0]]
    scores = [math.sqrt(math.log1p(math.exp(x))) for x in (-4.0, 3.0)]
    expected = [s / sum(scores) for s in scores]
    assert routing.gate_weights[0].tolist() == pytest.approx(expected, rel=1e-12)
