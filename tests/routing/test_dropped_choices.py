"""What a capacity does to weights, outputs and gradients: a dropped choice has id -1, weighs
nothing, adds nothing and gets no gradient; the share of them is reported."""

import math

import pytest
import torch

from ep_moe import Routing, SelectionConfig, dropped_share, oracle, select_experts
from ep_moe.routing import Router
from ep_moe.testing import assert_close
from tests.helpers import leaf, random_layer, small_config
from tests.routing.capacity_cases import (
    EACH_POLICY,
    NO_WARNING,
    candidates,
    dropless,
    with_capacity,
)

pytestmark = NO_WARNING

INF, NAN = math.inf, math.nan
SCORING = pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid", "sqrtsoftplus"])


def formula(logits, chosen, kept, config):
    """float64 weights of the chosen experts, dropped ones among them; differentiable."""
    rows = [oracle.SCORES[config.scoring_func](row) for row in logits]
    weights = torch.stack(rows).gather(1, chosen)
    if config.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    stayed = weights.masked_fill(~kept, 0.0)
    if config.renormalize_after_drop:
        share = stayed / stayed.sum(1, keepdim=True).masked_fill(~kept.any(1, keepdim=True), 1.0)
        stayed = share * weights.sum(1, keepdim=True)
    return stayed * config.routed_scaling_factor


@EACH_POLICY
@pytest.mark.parametrize("renormalize_after_drop", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@SCORING
def test_weights_and_gradients(scoring_func, renormalize, renormalize_after_drop, policy):
    """By the switch, what remains of a token weighs what it did, or as much as all its choices. A
    dropped choice weighs nothing, and what comes back for it goes nowhere, not even a NaN."""
    config = with_capacity(
        0.6,
        policy,
        top_k=3,
        scoring_func=scoring_func,
        renormalize=renormalize,
        renormalize_after_drop=renormalize_after_drop,
        routed_scaling_factor=2.5,
    )
    logits = torch.randn(20, 6, dtype=torch.float64) + torch.linspace(3, 0, 6)
    logits[-1] = torch.linspace(0.3, 0, 6)  # last and least probable
    logits.requires_grad_()
    routing = select_experts(logits, config)
    kept = routing.ids >= 0
    assert (kept.any(1) & ~kept.all(1)).any()
    assert not kept[-1].any() or policy == "reroute"  # whose first round finds room for all

    chosen = routing.ids.long()
    if policy == "reroute":  # it was refused the best that it did not get
        for ids, ranked in zip(chosen, candidates(logits, config), strict=True):
            refused = [e for e in ranked if e not in ids]
            ids[ids < 0] = torch.tensor(refused[: (ids < 0).sum()], dtype=torch.int64)
    else:
        chosen = select_experts(logits, dropless(config)).ids.long()
    exact = leaf(logits)
    expected = formula(exact, chosen, kept, config)
    assert_close(routing.gate_weights, expected, name="weights")
    d_weights = torch.randn(20, 3, dtype=torch.float64)
    routing.gate_weights.backward(d_weights.masked_fill(~kept, NAN))
    expected.backward(d_weights)
    assert_close(logits.grad, exact.grad, name="d_logits")


def test_reroute_weighs_by_its_own_score():
    """Two tokens want expert 0; the second goes to expert 2, with what expert 2 scores."""
    config = with_capacity(1.0, "reroute", top_k=1, scoring_func="sigmoid", renormalize=False)
    logits = torch.tensor([[3.0, -1.0, 1.0], [2.0, -1.0, 1.0]], requires_grad=True)
    routing = select_experts(logits, config)
    assert routing.ids.tolist() == [[0], [2]]
    right = torch.tensor([[3.0], [1.0]]).sigmoid()
    assert_close(routing.gate_weights, right, name="weights")
    routing.gate_weights.sum().backward()
    assert (logits.grad != 0).tolist() == [[True, False, False], [False, False, True]]


def test_a_refused_choice_keeps_its_share():
    """Token 1 wants (0,1) and finds only 1: its weight is what it would be without a capacity,
    not that of expert 1 counted twice."""
    config = with_capacity(0.5, "reroute")
    logits = torch.tensor([[3.0, 0.0, 2.0], [3.0, 2.0, 0.0], [3.0, 0.0, 2.0]])
    routing = select_experts(logits, config)
    assert routing.ids.tolist() == [[0, -1], [1, -1], [2, -1]]
    right = select_experts(logits, SelectionConfig(top_k=2)).gate_weights[1, 1]
    assert_close(routing.gate_weights[1, 0], right, name="weight")
    with pytest.raises(AssertionError):
        assert_close(torch.tensor(0.5), right, name="weight")


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("low", [-120.0, -INF])
def test_what_remains_may_weigh_nothing(low, scoring_func):
    """Token 1 keeps an expert whose score is 0 in fp32 and loses the other: no 0/0."""
    config = with_capacity(0.5, scoring_func=scoring_func, renormalize_after_drop=True)
    logits = torch.tensor([[low, 2.0, 1.0], [low, 2.0, low]], requires_grad=True)
    routing = select_experts(logits, config)
    assert routing.ids.tolist() == [[1, 2], [-1, 0]]
    assert routing.gate_weights[1].tolist() == [0.0, 0.0 if low == -INF else 1.0]
    routing.gate_weights.sum().backward()
    assert logits.grad.isfinite().all()


def test_a_row_that_counts_as_equal_is_not_the_most_probable():
    """nan_policy uniform: its score is 1/E, not NaN, which would rank first."""
    config = with_capacity(1.0, "probability", top_k=1, renormalize=False, nan_policy="uniform")
    logits = torch.tensor([[NAN, 0.0, 0.0], [3.0, 0.0, 0.0]])
    assert select_experts(logits, config).ids.tolist() == [[-1], [0]]


@EACH_POLICY
@pytest.mark.parametrize("masked", [False, True])
def test_a_dropped_choice_adds_nothing(policy, masked):
    """y and the gradients are the oracle's on what was kept; a token without any expert left gets
    what the shared one says."""
    config = small_config(
        num_shared_experts=1, capacity_factor=0.5, capacity_policy=policy, router_bias=True
    )
    layer = random_layer(config)
    with torch.no_grad():
        layer.router.bias.copy_(torch.linspace(4, 0, 8))
    x, d_y = torch.randn(2, 20, 16, dtype=torch.float64)
    x.requires_grad_()
    mask = torch.arange(20) % 4 == 1 if masked else None
    y, _ = layer(x, mask)
    routing, stats = layer.router(x if mask is None else x.masked_fill(mask[:, None], 0.0), mask)
    kept = routing.ids >= 0
    assert stats.dropped_choices == (~kept if mask is None else ~kept[~mask]).sum() > 0

    experts = dict(layer.experts.named_parameters())
    exact = {f"experts.{name}": leaf(value) for name, value in experts.items()}
    fixed = Routing(routing.ids, routing.gate_weights.detach())
    weights = layer.state_dict() | exact
    expected = oracle.moe_layer(x.detach(), weights, config, routing=fixed, padding_mask=mask)
    assert_close(y, expected, name="y")
    got = torch.autograd.grad(y, list(experts.values()), d_y)
    right = torch.autograd.grad(expected, list(exact.values()), d_y)
    for name, a, b in zip(experts, got, right, strict=True):
        assert_close(a, b, name=name)

    alone = ~kept.any(1) if mask is None else ~kept.any(1) & ~mask
    assert alone.any() or policy == "reroute"
    assert_close(y[alone], layer.shared_experts(x)[alone], name="y of those without any expert")


@EACH_POLICY
def test_the_dropped_share_is_reported(policy):
    """Counts are of what was wanted; the share is of real tokens' choices."""
    config = small_config(num_experts=4, hidden_size=4, capacity_factor=0.5, capacity_policy=policy)
    router = Router(config)
    with torch.no_grad():
        router.weight.copy_(torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])))
    x, mask = torch.ones(12, 4), torch.arange(12) >= 8
    routing, stats = router(x, mask)
    assert stats.tokens_per_expert.tolist() == [8, 8, 0, 0]
    assert stats.dropped_choices.item() == (8 if policy == "reroute" else 12)  # capacity 2
    assert stats.dropped_choices.item() == 16 - (routing.ids >= 0).sum().item()
    assert dropped_share(stats).item() == stats.dropped_choices.item() / 16


def test_nothing_dropped_is_a_share_of_zero():
    config = small_config()
    for tokens in (5, 0):
        _, stats = Router(config)(torch.randn(tokens, 16), None)
        assert stats.dropped_choices.item() == 0
        assert dropped_share(stats).item() == 0.0


@EACH_POLICY
@pytest.mark.parametrize("tokens", [0, 3])
def test_no_tokens(tokens, policy):
    """None, or nothing but padding."""
    config = with_capacity(1.0, policy)
    logits, mask = torch.randn(tokens, 6), torch.ones(tokens, dtype=torch.bool)
    routing = select_experts(logits, config, padding_mask=mask)
    assert routing.ids.tolist() == [[-1, -1]] * tokens
    assert routing.gate_weights.tolist() == [[0.0, 0.0]] * tokens
