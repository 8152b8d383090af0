"""What the chosen experts weigh: float64 formulas, gradients, and the rows that have no answer."""

import math

import pytest
import torch

from ep_moe import SelectionConfig, select_experts
from ep_moe.routing import dense_probabilities
from ep_moe.routing.selection import select
from ep_moe.testing import assert_close
from tests.helpers import DTYPES, leaf

INF, NAN = math.inf, math.nan
SCORING = pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
RENORMALIZE = pytest.mark.parametrize("renormalize", [True, False])


def from_config(**changes):
    return SelectionConfig(**({"top_k": 2} | changes))


def formula(logits, ids, config):
    """Scores of all, then those of the chosen, their share, and the scale; differentiable."""
    scores = logits.softmax(1) if config.scoring_func == "softmax" else logits.sigmoid()
    weights = scores.gather(1, ids.long())
    if config.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return weights * config.routed_scaling_factor


@pytest.mark.parametrize("routed_scaling_factor", [1.0, 2.5])
@pytest.mark.parametrize("dtype", DTYPES)
@RENORMALIZE
@SCORING
def test_weights_and_gradients(scoring_func, renormalize, dtype, routed_scaling_factor, device):
    config = from_config(
        top_k=3,
        scoring_func=scoring_func,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        num_expert_group=5,
        topk_group=2,
    )
    logits = torch.randn(17, 20, device=device).to(dtype).requires_grad_()
    routing = select_experts(logits, config)
    assert routing.gate_weights.dtype == torch.promote_types(dtype, torch.float32)
    exact = leaf(logits)
    expected = formula(exact, routing.ids, config)
    assert_close(routing.gate_weights, expected, name="weights")
    d_weights = torch.randn_like(routing.gate_weights)
    routing.gate_weights.backward(d_weights)
    expected.backward(d_weights.double())
    assert_close(logits.grad, exact.grad, name="d_logits")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("segments", [None, 1, 2])
@RENORMALIZE
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_gradients_equal_finite_differences(scoring_func, renormalize, segments, masked):
    """Those of the weights, and with segments those of what the balance losses sum."""
    config = from_config(
        top_k=3, scoring_func=scoring_func, renormalize=renormalize, routed_scaling_factor=2.5
    )
    logits = torch.randn(4, 7, dtype=torch.float64)
    logits[0, :4] -= 40.0  # where a softplus is an exponential
    mask = torch.arange(4) == 2 if masked else None

    def outputs(leaf):
        found = select(leaf, config, padding_mask=mask, segments=segments)
        sums = () if segments is None else (found.p_sum, found.z_sum)
        return found.routing.gate_weights, *sums

    assert torch.autograd.gradcheck(outputs, logits.requires_grad_())


@SCORING
def test_a_scale_of_zero(scoring_func):
    config = from_config(scoring_func=scoring_func, routed_scaling_factor=0.0)
    logits = torch.randn(4, 7, requires_grad=True)
    weights = select_experts(logits, config).gate_weights
    weights.sum().backward()
    assert (weights == 0).all()
    assert (logits.grad == 0).all()


@pytest.mark.parametrize("changed", ["gate_weights", "ids"])
def test_what_the_backward_needs_is_not_changed_unnoticed(changed):
    routing = select_experts(torch.randn(4, 7, requires_grad=True), from_config())
    loss = (routing.gate_weights * 2).sum()
    with torch.no_grad():
        getattr(routing, changed).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_dtype_of_the_selection_bias_changes_nothing(device):
    """The key is an fp32 score, where these two tie."""
    bias = torch.tensor([1.0, 1.0 + 1e-9, 0.0], dtype=torch.float64, device=device)
    config = from_config(top_k=1, scoring_func="sigmoid")
    routing = select_experts(torch.zeros(1, 3, device=device), config, expert_bias=bias)
    assert routing.ids.tolist() == [[0]]


@RENORMALIZE
@SCORING
def test_invariants(scoring_func, renormalize, device):
    """Distinct valid ids in at most topk_group groups, weights by descending score, and their
    sum."""
    config = SelectionConfig(
        top_k=6,
        num_expert_group=8,
        topk_group=3,
        scoring_func=scoring_func,
        renormalize=renormalize,
        routed_scaling_factor=2.0,
    )
    routing = select_experts(torch.randn(50, 40, device=device), config)
    for ids in routing.ids.tolist():
        assert len(set(ids)) == 6
        assert all(0 <= i < 40 for i in ids)
        assert len({i // 5 for i in ids}) <= 3
    weights = routing.gate_weights
    assert (weights.diff(dim=1) <= 0).all()
    if renormalize:
        assert_close(weights.sum(1), torch.full((50,), 2.0, device=device), name="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", [-20.0, -88.0, -104.0, -120.0, -1000.0])
@pytest.mark.parametrize("scoring_func, power", [("sigmoid", 1.0), ("sqrtsoftplus", 0.5)])
def test_underflowing_scores_keep_their_ratio(scoring_func, power, level, dtype, device):
    """Far below zero a score is a power of an exponential: the shares are a softmax, not 0/0."""
    logits = torch.tensor([[level, level - 1, level - 2, level - 500]], device=device).to(dtype)
    logits.requires_grad_()
    ids, weights = vars(
        select_experts(logits, from_config(top_k=3, scoring_func=scoring_func))
    ).values()
    exact = leaf(logits)
    expected = (exact.gather(1, ids.long()) * power).softmax(1)
    assert_close(weights, expected, name="weights")
    d_weights = torch.tensor([[1.0, -2.0, 3.0]], device=device)
    weights.backward(d_weights)
    expected.backward(d_weights.double())
    assert_close(logits.grad, exact.grad, name="d_logits")


def test_one_choice_has_a_gradient_unless_renormalised(device):
    """Case BB-15: a score before the choice moves with all logits; its share of itself is 1."""
    row = [[math.log(2.0), 0.0, 0.0]]
    for renormalize, weight, gradient in [
        (False, 0.5, [[0.25, -0.125, -0.125]]),
        (True, 1.0, [[0.0, 0.0, 0.0]]),
    ]:
        logits = torch.tensor(row, device=device, requires_grad=True)
        weights = select_experts(logits, from_config(top_k=1, renormalize=renormalize)).gate_weights
        weights.sum().backward()
        assert weights.item() == pytest.approx(weight)
        assert_close(logits.grad, torch.tensor(gradient, device=device), name="d_logits")


@SCORING
def test_the_selection_bias_only_selects(scoring_func, device):
    config = from_config(scoring_func=scoring_func)
    logits = torch.randn(9, 6, device=device, requires_grad=True)
    bias = torch.randn(6, device=device, requires_grad=True)
    routing = select_experts(logits, config, expert_bias=bias)
    assert (routing.ids != select_experts(logits, config).ids).any()
    expected = formula(logits.double(), routing.ids, config)
    assert_close(routing.gate_weights, expected, name="weights", tolerance=1e-6)
    routing.gate_weights.sum().backward()
    assert bias.grad is None


@pytest.mark.parametrize("garbage", [0.0, NAN, INF, -INF])
@pytest.mark.parametrize("nan_policy", ["propagate", "uniform"])
@RENORMALIZE
@SCORING
def test_padding_goes_nowhere(scoring_func, renormalize, nan_policy, garbage, device):
    config = from_config(scoring_func=scoring_func, renormalize=renormalize, nan_policy=nan_policy)
    clean = torch.randn(6, 5, device=device)
    mask = torch.tensor([False, True, False, False, True, False], device=device)
    logits = clean.masked_fill(mask[:, None], garbage).requires_grad_()
    routing = select_experts(logits, config, padding_mask=mask)
    assert (routing.ids[mask] == -1).all()
    assert (routing.gate_weights[mask] == 0).all()
    alone = select_experts(clean[~mask], config)
    assert torch.equal(routing.ids[~mask], alone.ids)
    assert torch.equal(routing.gate_weights[~mask], alone.gate_weights)
    routing.gate_weights.backward(torch.randn_like(routing.gate_weights))
    assert (logits.grad[mask] == 0).all()
    assert logits.grad.isfinite().all()


BROKEN = pytest.mark.parametrize(
    "broken",
    [[0.0, 1.0, 2.0, NAN], [NAN] * 4, [0.0, 1.0, 2.0, INF], [0.0, INF, 0.0, INF], [-INF] * 4],
    ids=["a NaN", "all NaN", "a +inf", "two +inf", "nothing but -inf"],
)
KEYS = pytest.mark.parametrize(
    "changes,biased",
    [
        ({}, False),
        ({"renormalize": False}, False),
        ({}, True),
        ({"group_score": "top2_sum"}, False),
    ],
    ids=["logit", "logit, not renormalised", "score + bias", "top-2 sums"],
)


def with_finite_neighbours(broken, device):
    return torch.tensor([[3.0, 1.0, 2.0, 0.0], broken, [0.0, 1.0, 2.0, 3.0]], device=device)


@KEYS
@BROKEN
def test_rows_without_a_softmax_are_nan_and_alone(broken, changes, biased, device):
    config = from_config(num_expert_group=2, topk_group=2, **changes)
    bias = torch.zeros(4, device=device) if biased else None
    logits = with_finite_neighbours(broken, device).requires_grad_()
    routing = select_experts(logits, config, expert_bias=bias)
    assert len(set(routing.ids[1].tolist())) == 2
    assert routing.gate_weights[1].isnan().all()
    alone = select_experts(logits[[0, 2]], config, expert_bias=bias)
    assert torch.equal(routing.ids[[0, 2]], alone.ids)
    assert torch.equal(routing.gate_weights[[0, 2]], alone.gate_weights)
    routing.gate_weights.sum().backward()
    assert logits.grad.isnan().any(dim=1).tolist() == [False, True, False]


@KEYS
@BROKEN
@SCORING
def test_rows_without_a_softmax_may_count_as_equal(scoring_func, broken, changes, biased, device):
    """nan_policy uniform: as if all logits were 0, with no gradient."""
    config = from_config(scoring_func=scoring_func, nan_policy="uniform", **changes)
    bias = torch.zeros(4, device=device) if biased else None
    logits = with_finite_neighbours(broken, device).requires_grad_()
    routing = select_experts(logits, config, expert_bias=bias)
    zeros = torch.zeros(1, 4, device=device)
    expected = select_experts(zeros, config, expert_bias=bias)
    assert torch.equal(routing.ids[1:2], expected.ids)
    assert torch.equal(routing.gate_weights[1:2], expected.gate_weights)
    routing.gate_weights.backward(torch.randn_like(routing.gate_weights))
    assert (logits.grad[1] == 0).all()
    assert logits.grad.isfinite().all()


def test_a_minus_inf_logit_weighs_nothing(device):
    """Masked experts inside a finite row: not a broken row under either policy."""
    for nan_policy in ("propagate", "uniform"):
        config = from_config(nan_policy=nan_policy)
        logits = torch.tensor([[-INF, 2.0, -INF, -INF]], device=device, requires_grad=True)
        routing = select_experts(logits, config)
        assert routing.ids.tolist() == [[1, 0]]
        assert routing.gate_weights.tolist() == [[1.0, 0.0]]
        routing.gate_weights.sum().backward()
        assert logits.grad.isfinite().all()


@SCORING
def test_dense_probabilities(scoring_func, device):
    config = from_config(scoring_func=scoring_func, renormalize=False)
    logits = torch.randn(9, 5, dtype=torch.float64, device=device)
    scores = logits.softmax(1) if scoring_func == "softmax" else logits.sigmoid()
    got = dense_probabilities(logits, config)
    assert_close(got, scores / scores.sum(1, keepdim=True), name="p")
    underflowing = torch.full((1, 4), -1000.0, device=device)
    assert_close(
        dense_probabilities(underflowing, config),
        torch.full((1, 4), 0.25, device=device),
        name="p of equal logits",
    )
