"""Over which tokens the balance loss is taken: those of a call, of each sequence, of all ranks."""

import pytest
import torch

from ep_moe import total_aux
from ep_moe.routing import Router
from ep_moe.testing import assert_close
from tests.helpers import random_layer, small_config
from tests.routing.capacity_cases import NO_WARNING, POLICIES

SCOPES = pytest.mark.parametrize("scope", ["micro_batch", "sequence", "global"])


def router_of(scope, **changes):
    return Router(small_config(aux_loss_scope=scope, aux_loss_coef=0.1, **changes)).double()


def of(router, logits, mask=None, length=None):
    """The loss and its gradient."""
    logits = logits.detach().requires_grad_()
    loss = total_aux([router.route(logits, mask, sequence_length=length)[1]])
    return loss.detach(), torch.autograd.grad(loss, logits)[0]


def skewed_logits(*shape):
    """Each sequence prefers other experts, so that its own balance is not that of the batch."""
    return torch.randn(*shape, 8, dtype=torch.float64) + 2 * torch.randn(
        shape[0], 1, 8, dtype=torch.float64
    )


@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("padded", [False, True])
def test_sequences_count_one_by_one(padded, scoring_func):
    """The mean over sequences that hold a token of the loss on each one's tokens alone."""
    batch = skewed_logits(5, 6)
    mask = torch.zeros(5, 6, dtype=torch.bool)
    if padded:
        mask = torch.arange(6) >= torch.tensor([[6], [4], [0], [1], [5]])
    alone = router_of("micro_batch", scoring_func=scoring_func)
    each = [of(alone, rows[~m]) for rows, m in zip(batch, mask, strict=True) if not m.all()]
    whole = router_of("sequence", scoring_func=scoring_func)
    loss, d_logits = of(whole, batch.view(30, 8), mask.view(30), 6)
    assert_close(loss, torch.stack([a for a, _ in each]).mean(), name="loss")
    expected = torch.cat([g for _, g in each]) / len(each)
    assert_close(d_logits[~mask.view(30)], expected, name="d_logits")
    assert (d_logits[mask.view(30)] == 0).all()
    pooled, _ = of(alone, batch.view(30, 8), mask.view(30))
    assert abs(pooled - loss) > 0.1 * loss, "the two scopes must be told apart here"


@pytest.mark.parametrize("micro_batches", [2, 4])
def test_sequence_scope_does_not_depend_on_micro_batching(micro_batches):
    router, batch = router_of("sequence"), skewed_logits(8, 5)
    loss, d_logits = of(router, batch.view(40, 8), None, 5)
    parts = [of(router, b.reshape(-1, 8), None, 5) for b in batch.chunk(micro_batches)]
    assert_close(torch.stack([a for a, _ in parts]).mean(), loss, name="loss")
    assert_close(torch.cat([g for _, g in parts]) / micro_batches, d_logits, name="d_logits")


@pytest.mark.parametrize(
    "shape,length", [((12,), 12), ((3, 4), 4), ((2, 3, 2), 2), ((12, 1), 1), ((1, 12), 12)]
)
def test_a_layer_finds_its_sequences_in_the_shape_of_x(shape, length):
    """The dimension before the hidden one; a batch without it is one sequence."""
    layer = random_layer(small_config(aux_loss_scope="sequence", aux_loss_coef=0.1))
    x = torch.randn(12, 16, dtype=torch.float64)
    _, stats = layer(x.view(*shape, 16))
    _, expected = layer.router(x, None, sequence_length=length)
    assert torch.equal(stats.aux_loss, expected.aux_loss)


def test_one_token_is_a_sequence():
    layer = random_layer(small_config(aux_loss_scope="sequence", aux_loss_coef=0.1))
    x = torch.randn(16, dtype=torch.float64)
    assert torch.equal(layer(x)[1].aux_loss, layer(x[None])[1].aux_loss)


def test_global_scope_of_one_rank_is_the_batch():
    batch, mask = skewed_logits(3, 7).view(21, 8), torch.arange(21) % 4 == 1
    for m in (None, mask):
        expected = of(router_of("micro_batch"), batch, m)
        for got, value in zip(of(router_of("global"), batch, m), expected, strict=True):
            assert_close(got, value, name="loss and gradient")


@NO_WARNING
@SCOPES
@pytest.mark.parametrize("policy", POLICIES)
def test_dropping_does_not_hide_imbalance(policy, scope):
    """Case BB-57, its whole kind: the loss counts what tokens wanted, whatever the capacity."""
    batch = skewed_logits(4, 6).view(24, 8)
    loss, d_logits = of(router_of(scope), batch, None, 6)
    for factor in (0.25, 1.0, 1.5):
        router = router_of(scope, capacity_factor=factor, capacity_policy=policy)
        routing, stats = router.route(batch, None, sequence_length=6)
        assert (stats.dropped_choices > 0) == (routing.ids < 0).any()
        for got, value in zip(of(router, batch, None, 6), (loss, d_logits), strict=True):
            assert torch.equal(got, value)
    assert router_of(scope, capacity_factor=0.25).route(batch, None)[1].dropped_choices > 0


@NO_WARNING
def test_dropping_in_worked_numbers():
    """Case BB-57: four tokens want expert 0 with .7, two fit; counted after dropping it is .7."""
    sizes = {"num_experts": 2, "top_k": 1, "renormalize": False}
    router = router_of("micro_batch", capacity_factor=1.0, **sizes)
    logits = torch.tensor([[0.7, 0.3]], dtype=torch.float64).log().expand(4, 2)
    routing, stats = router.route(logits, None)
    assert (routing.ids >= 0).sum() == 2
    right = torch.tensor(0.1 * 1.4, dtype=torch.float64)
    assert_close(stats.aux_loss, right, name="aux")
    with pytest.raises(AssertionError):
        assert_close(right / 2, right, name="aux")


@SCOPES
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_collapse_costs_more_than_balance(scoring_func, top_k, scope):
    """Cases BB-51 and BB-53, their kind: near 1 at balance for any K, more when all tokens want
    the same, with a gradient that pushes them apart."""
    router = router_of(scope, scoring_func=scoring_func, top_k=top_k, renormalize=False)
    t = torch.arange(16)[:, None]
    liked = torch.zeros(16, 8, dtype=torch.float64)
    balanced = liked.scatter(1, (t + torch.arange(top_k)) % 8, 2.0)
    collapsed = liked.scatter(1, torch.arange(top_k).expand(16, top_k), 2.0)
    even, _ = of(router, balanced)
    uneven, d_logits = of(router, collapsed)
    assert even.item() == pytest.approx(0.1)
    assert uneven > 1.2 * even
    assert (d_logits[:, :top_k] > 0).all()
    assert (d_logits[:, top_k:] < 0).all()
