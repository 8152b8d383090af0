"""The router module: fp32 logits, losses and counts in its stats, and a bias that stays fp32."""

import copy
import math

import pytest
import torch
from torch import nn

from ep_moe import InputError, total_aux
from ep_moe.routing import Router
from ep_moe.testing import assert_close
from tests.helpers import leaf, small_config


def random_router(dtype=torch.float64, **changes):
    router = Router(small_config(**changes))
    with torch.no_grad():
        for value in router.state_dict().values():
            value.normal_(std=0.4)
    return router.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("learn_temperature", [False, True])
@pytest.mark.parametrize("router_bias", [False, True])
def test_logits(dtype, learn_temperature, router_bias, device):
    """(x W^T + b) / temperature, in fp32 from bf16 tokens, with every gradient."""
    router = random_router(
        dtype, router_bias=router_bias, learn_temperature=learn_temperature, temperature=0.5
    ).to(device)
    x = torch.randn(9, 16, device=device).to(dtype).requires_grad_()
    logits = router.logits(x)
    assert logits.dtype == torch.promote_types(dtype, torch.float32)
    exact = {name: leaf(value) for name, value in [("x", x), *router.named_parameters()]}
    expected = exact["x"] @ exact["weight"].t() + exact.get("bias", 0.0)
    expected = expected / (exact["log_temperature"].exp() if learn_temperature else 0.5)
    assert_close(logits, expected, name="logits")
    d_logits = torch.randn_like(logits)
    logits.backward(d_logits)
    expected.backward(d_logits.double())
    for name, value in [("x", x), *router.named_parameters()]:
        assert_close(value.grad, exact[name].grad, name=f"gradient of {name}")


def test_logits_stay_fp32_under_autocast():
    """Autocast would round them to bf16, where a third of all rows tie."""
    router, x = random_router(torch.float32), torch.randn(9, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = router.logits(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, router.logits(x))


def test_the_initial_temperature_is_the_configured_one():
    router = Router(small_config(learn_temperature=True, temperature=3.0))
    assert router.log_temperature.exp().item() == pytest.approx(3.0)


@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(nn.Module.bfloat16, id="bfloat16"),
        pytest.param(nn.Module.half, id="half"),
        pytest.param(nn.Module.double, id="double"),
        pytest.param(lambda m: m.to(torch.bfloat16), id="to(bfloat16)"),
        pytest.param(lambda m: copy.deepcopy(m.half()), id="a copy of half"),
        pytest.param(lambda m: m.to("meta").to_empty(device="cpu"), id="meta and back"),
    ],
)
def test_the_selection_bias_stays_fp32(convert):
    """Case BB-61/c: in bf16 1.0 + 0.001 is 1.0 and the balance stops moving."""
    router = Router(small_config(expert_bias=True))
    router.expert_bias.fill_(1.0)
    router = convert(router)
    router.expert_bias.fill_(1.0)
    router.expert_bias += 0.001
    assert router.expert_bias.dtype == torch.float32
    assert router.expert_bias.tolist() == pytest.approx([1.001] * 8, abs=1e-6)
    assert "expert_bias" in router.state_dict()
    assert "expert_bias" not in dict(router.named_parameters())


def test_converting_keeps_the_values_of_the_selection_bias():
    """Not a round trip through the other dtype."""
    router = Router(small_config(expert_bias=True))
    router.expert_bias.copy_(torch.linspace(0.001, 1.001, 8))
    before = router.expert_bias.clone()
    assert torch.equal(router.bfloat16().expert_bias, before)


def losses(logits, ids, scoring_func):
    """Balance and z-loss from their formulas, token by token."""
    tokens, num_experts = logits.shape
    scores = logits.softmax(1) if scoring_func == "softmax" else logits.sigmoid()
    p = scores / scores.sum(1, keepdim=True)
    n = [sum(e in row for row in ids.tolist()) for e in range(num_experts)]
    aux = sum(n[e] * p[t, e] for e in range(num_experts) for t in range(tokens))
    aux = aux * num_experts / (ids.shape[1] * tokens**2)
    return n, aux, (logits.exp().sum(1).log() ** 2).mean()


@pytest.mark.parametrize("expert_bias", [False, True])
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_stats(scoring_func, expert_bias):
    """Counts of all choices; losses times their coefficients; p is unbiased."""
    router = random_router(
        scoring_func=scoring_func, expert_bias=expert_bias, aux_loss_coef=0.01, z_loss_coef=0.001
    )
    x = torch.randn(13, 16, dtype=torch.float64)
    routing, stats = router(x, None)
    weight = leaf(router.weight)
    n, aux, z = losses(x @ weight.t(), routing.ids, scoring_func)
    assert stats.tokens_per_expert.tolist() == n
    assert stats.tokens_per_expert.dtype == torch.int64
    assert_close(stats.aux_loss, 0.01 * aux, name="aux")
    assert_close(stats.z_loss, 0.001 * z, name="z")
    total_aux([stats]).backward()
    (0.01 * aux + 0.001 * z).backward()
    assert_close(router.weight.grad, weight.grad, name="d_weight")


@pytest.mark.parametrize("coefficients", [{}, {"aux_loss_coef": 0.1}, {"z_loss_coef": 0.1}])
def test_a_loss_without_coefficient_is_zero(coefficients):
    _, stats = random_router(**coefficients)(torch.randn(5, 16, dtype=torch.float64), None)
    assert (stats.aux_loss != 0).item() == ("aux_loss_coef" in coefficients)
    assert (stats.z_loss != 0).item() == ("z_loss_coef" in coefficients)


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("nan_policy", ["propagate", "uniform"])
@pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid"])
def test_padding_counts_nowhere(scoring_func, nan_policy, garbage):
    """Stats and gradients of a padded batch are those of its real tokens alone."""
    router = random_router(
        scoring_func=scoring_func, nan_policy=nan_policy, aux_loss_coef=0.1, z_loss_coef=0.1
    )
    clean, mask = torch.randn(12, 8, dtype=torch.float64), torch.arange(12) >= 7
    padded = clean.masked_fill(mask[:, None], garbage).requires_grad_()
    alone = clean[~mask].requires_grad_()
    _, got = router.route(padded, mask)
    _, expected = router.route(alone, None)
    assert torch.equal(got.tokens_per_expert, expected.tokens_per_expert)
    assert_close(got.aux_loss, expected.aux_loss, name="aux")
    assert_close(got.z_loss, expected.z_loss, name="z")
    total_aux([got]).backward()
    total_aux([expected]).backward()
    assert_close(padded.grad[~mask], alone.grad, name="d_logits")
    assert (padded.grad[mask] == 0).all()


def test_rows_that_count_as_equal_do_so_in_the_losses():
    """nan_policy uniform: one broken row must not make the loss of the batch NaN."""
    changes = {"nan_policy": "uniform", "aux_loss_coef": 0.1, "z_loss_coef": 0.1}
    router = random_router(**changes)
    broken, equal = torch.randn(2, 5, 8, dtype=torch.float64)
    broken[1:] = equal[1:]
    broken[0], equal[0] = math.nan, 0.0
    _, got = router.route(broken.requires_grad_(), None)
    _, expected = router.route(equal, None)
    assert torch.equal(got.aux_loss, expected.aux_loss)
    assert torch.equal(got.z_loss, expected.z_loss)
    total_aux([got]).backward()
    assert broken.grad.isfinite().all()


@pytest.mark.parametrize("sequence_length", [5, 24])
def test_tokens_that_are_no_whole_sequences_are_refused(sequence_length):
    """12 tokens in 2 sequences of 5 would be 2 of 6."""
    router = random_router(aux_loss_coef=0.1, aux_loss_scope="sequence")
    with pytest.raises(InputError, match=r"sequence_length.*12"):
        router(torch.randn(12, 16).double(), None, sequence_length=sequence_length)


@pytest.mark.parametrize("mask", [None, torch.ones(3, dtype=torch.bool)])
def test_no_tokens(mask):
    """None at all, or nothing but padding: finite losses and zero gradients, not None."""
    router = random_router(
        aux_loss_coef=0.1, z_loss_coef=0.1, router_bias=True, learn_temperature=True
    )
    x = torch.randn(0 if mask is None else 3, 16, dtype=torch.float64)
    routing, stats = router(x, mask)
    assert stats.tokens_per_expert.tolist() == [0] * 8
    assert (stats.aux_loss.item(), stats.z_loss.item()) == (0.0, 0.0)
    (total_aux([stats]) + routing.gate_weights.sum()).backward()
    for name, parameter in router.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_aux_gradient_does_not_depend_on_micro_batching(micro_batches):
    """Case BB-59: logits (ln 4, 0), coefficient .01, equal micro-batches whose loss is averaged."""
    router = Router(
        small_config(hidden_size=1, num_experts=2, top_k=1, renormalize=False, aux_loss_coef=0.01)
    )
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[math.log(4.0)], [0.0]]))
    for _ in range(micro_batches):
        _, stats = router(torch.ones(1, 1), None)
        (total_aux([stats]) / micro_batches).backward()
    got, right = router.weight.grad[:, 0], torch.tensor([0.0032, -0.0032])
    assert_close(got, right, name="d_logits")
    for wrong in ([0.0128, -0.0128], [0.0, 0.0], [0.32, -0.32]):
        with pytest.raises(AssertionError):
            assert_close(torch.tensor(wrong), right, name="d_logits")
