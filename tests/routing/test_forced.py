"""Forced routings for benchmarks: distinct experts, exact balance, and the skew asked for."""

import copy

import pytest
import torch

from ep_moe import max_vio
from ep_moe.routing import Router, count_tokens, forced
from ep_moe.testing import assert_close
from tests.helpers import small_config

MODES = pytest.mark.parametrize("forced_routing", ["balanced", "skewed"])
SIZES = pytest.mark.parametrize("num_experts,top_k", [(1, 1), (8, 2), (7, 7), (60, 4), (64, 8)])


def route(tokens, mask=None, **changes):
    config = small_config(**changes)
    x = torch.randn(tokens, config.hidden_size, dtype=torch.float64)
    return Router(config).double()(x, mask)


@MODES
@SIZES
@pytest.mark.parametrize("tokens", [0, 1, 53])
def test_experts_of_a_token_are_distinct(tokens, num_experts, top_k, forced_routing):
    sizes = {"num_experts": num_experts, "top_k": top_k}
    routing, _ = route(tokens, forced_routing=forced_routing, **sizes)
    assert routing.ids.shape == (tokens, top_k)
    assert routing.ids.dtype == torch.int32
    for ids in routing.ids.tolist():
        assert len(set(ids)) == top_k
        assert all(0 <= i < num_experts for i in ids)


@SIZES
def test_balanced_is_exact(num_experts, top_k):
    """Whenever T is a multiple of E; less than K apart otherwise."""
    sizes = {"num_experts": num_experts, "top_k": top_k, "forced_routing": "balanced"}
    for tokens in (num_experts, 3 * num_experts):
        _, stats = route(tokens, **sizes)
        assert (stats.tokens_per_expert == tokens * top_k // num_experts).all()
    _, stats = route(3 * num_experts + 1, **sizes)
    n = stats.tokens_per_expert
    assert n.max() - n.min() <= 1


def test_balanced_is_no_pattern():
    """A token meets as many ranks as by chance: neighbours in id would keep it on one."""
    routing, _ = route(64, forced_routing="balanced", num_experts=64, top_k=8)
    assert (routing.ids.diff(dim=1) != 1).float().mean() > 0.9


@pytest.mark.parametrize(
    "num_experts,top_k,skew", [(8, 2, 1.0), (8, 2, 2.0), (8, 2, 4.0), (64, 8, 5.0), (60, 4, 15.0)]
)
def test_skewed_reaches_its_factor(num_experts, top_k, skew):
    sizes = {"num_experts": num_experts, "top_k": top_k}
    _, stats = route(20_000, forced_routing="skewed", forced_skew=skew, **sizes)
    assert max_vio(stats.tokens_per_expert).item() + 1 == pytest.approx(skew, rel=0.03)
    if skew > 1:
        assert stats.tokens_per_expert.argmax() == 0


@MODES
def test_the_same_tokens_get_the_same_experts(forced_routing):
    """Whatever the logits and the global random state are."""
    first, _ = route(40, forced_routing=forced_routing)
    second, _ = route(40, forced_routing=forced_routing)
    assert torch.equal(first.ids, second.ids)


@MODES
def test_drawn_once_a_size_and_kept_on_the_router(forced_routing, monkeypatch):
    """A benchmark calls with the same T again and again; nothing is shared between layers."""
    drawn, draw = [], getattr(forced, f"_{forced_routing}")

    def counted(num_tokens, *args):
        drawn.append(num_tokens)
        return draw(num_tokens, *args)

    monkeypatch.setattr(forced, f"_{forced_routing}", counted)
    routers = [Router(small_config(forced_routing=forced_routing)) for _ in "ab"]
    for tokens in (40, 40, 8, 8, 40):
        for router in routers:
            router(torch.randn(tokens, 16), None)
    assert drawn == [40, 40, 8, 8, 40, 40]
    twin = copy.deepcopy(routers[0])
    assert torch.equal(*(r(torch.randn(40, 16), None)[0].ids for r in (twin, routers[0])))


@MODES
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_weights_are_those_of_the_logits(forced_routing, scoring_func):
    """So that gradients flow as in a real run."""
    config = small_config(forced_routing=forced_routing, scoring_func=scoring_func)
    router = Router(config).double()
    x = torch.randn(30, config.hidden_size, dtype=torch.float64)
    routing, _ = router(x, None)
    logits = x @ router.weight.t()
    scores = logits.softmax(1) if scoring_func == "softmax" else logits.sigmoid()
    chosen = scores.gather(1, routing.ids.long())
    expected = chosen / chosen.sum(1, keepdim=True)
    assert_close(routing.gate_weights, expected, name="weights")
    routing.gate_weights[:, 0].sum().backward()
    assert (router.weight.grad != 0).any()


@MODES
def test_padding_goes_nowhere(forced_routing):
    mask = torch.arange(30) % 3 == 0
    routing, stats = route(30, mask, forced_routing=forced_routing)
    assert (routing.ids[mask] == -1).all()
    assert (routing.gate_weights[mask] == 0).all()
    assert torch.equal(stats.tokens_per_expert, count_tokens(routing.ids[~mask], 8))
