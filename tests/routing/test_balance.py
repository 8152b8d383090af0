"""Balance losses and figures in numbers worked by hand, with the answers that others gave."""

import math

import pytest
import torch

from ep_moe import (
    InputError,
    RoutingStats,
    busiest_rank,
    dead_experts,
    load_change,
    max_vio,
    total_aux,
)
from ep_moe.routing import aux_loss, count_tokens, updated_bias, z_loss
from ep_moe.testing import assert_close

UNIFORM = [0.25] * 4
AUX_CASES = {  # probabilities of every token, ids, the loss, a wrong loss
    "BB-51 balanced": (UNIFORM, [[0, 1], [2, 3]] * 2, 1.0, None),
    "BB-51/b collapsed": ([0.4, 0.4, 0.1, 0.1], [[0, 1]] * 4, 1.6, 1.0),
    "BB-53 divided by K": (UNIFORM, [[0, 1], [2, 3]], 1.0, 2.0),
    "BB-57 counted before dropping": ([0.7, 0.3], [[0]] * 4, 1.4, 0.7),
}


def aux_of(probabilities, ids):
    p, ids = torch.tensor(probabilities), torch.tensor(ids, dtype=torch.int32)
    p = p.expand(len(ids), -1)
    n = count_tokens(ids, p.shape[1])
    return aux_loss(p, n, top_k=ids.shape[1], num_tokens=len(ids))


@pytest.mark.parametrize("p,ids,expected,wrong", AUX_CASES.values(), ids=AUX_CASES.keys())
def test_aux_cases(p, ids, expected, wrong):
    got = aux_of(p, ids)
    assert_close(got, torch.tensor(expected), name="aux")
    if wrong is not None:
        with pytest.raises(AssertionError):
            assert_close(torch.tensor(wrong), torch.tensor(expected), name="aux")


def stats(aux, z=0.0):
    return RoutingStats(torch.zeros(2), torch.zeros(()), torch.as_tensor(aux), torch.as_tensor(z))


def test_layers_are_averaged_after_the_product():
    """Case BB-55: two layers collapsed to opposite experts; pooled first, they look balanced."""
    first, second = aux_of([0.9, 0.1], [[0]] * 2), aux_of([0.1, 0.9], [[1]] * 2)
    assert_close(total_aux([stats(first), stats(second)]), torch.tensor(1.8), name="aux")
    pooled = torch.tensor([[0.9, 0.1]] * 2 + [[0.1, 0.9]] * 2)
    wrong = aux_loss(pooled, torch.tensor([2, 2]), top_k=1, num_tokens=4)
    assert wrong.item() == pytest.approx(1.0)


@pytest.mark.parametrize("nothing", [[], ()])
def test_total_aux_of_no_layer_is_named(nothing):
    with pytest.raises(InputError, match=r"^stats is empty, but it must be the RoutingStats"):
        total_aux(nothing)


def test_total_aux_adds_both_losses():
    assert total_aux([stats(1.0, 0.5), stats(3.0, 0.25)]).item() == 4.75 / 2


@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_aux_is_one_at_balance_for_any_k(top_k):
    ids = (torch.arange(16)[:, None] + torch.arange(top_k)) % 8
    p = torch.full((16, 8), 1 / 8)
    assert aux_loss(p, count_tokens(ids, 8), top_k=top_k, num_tokens=16).item() == 1.0


@pytest.mark.parametrize("num_tokens", [50_000, torch.tensor(50_000, dtype=torch.int32)])
def test_aux_of_more_tokens_than_int32_can_square(num_tokens):
    p = torch.full((50_000, 2), 0.5)
    n = torch.tensor([50_000, 0])
    assert aux_loss(p, n, top_k=1, num_tokens=num_tokens).item() == pytest.approx(1.0)


def test_counts_of_a_wider_scope():
    """n from 6 tokens, of which these 2 are part: E / (K * 6 * 2) * sum_i n_i * sum_t p_ti."""
    p = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.0, 0.5, 0.25, 0.25]])
    n = torch.tensor([5, 4, 3, 0])
    got = aux_loss(p, n, top_k=2, num_tokens=2, counted_tokens=6)
    assert got.item() == pytest.approx(4 / (2 * 6 * 2) * (5 * 0.5 + 4 * 0.75 + 3 * 0.5))


def test_counts_are_of_the_same_tokens_unless_told():
    """n averaged over two batches of 4 and 2 tokens, p of 4."""
    p, n = torch.full((4, 2), 0.5), torch.tensor([2, 1])
    assert aux_loss(p, n, top_k=1, num_tokens=4).item() == pytest.approx(2 / 16 * 3 * 2)


def test_each_sequence_by_itself():
    """Leading dimensions are independent; rows of zeros are padding."""
    p = torch.tensor([[[0.7, 0.3], [0.7, 0.3]], [[0.2, 0.8], [0.0, 0.0]]])
    n, tokens = torch.tensor([[2, 0], [0, 1]]), torch.tensor([2, 1])
    got = aux_loss(p, n, top_k=1, num_tokens=tokens)
    assert got.tolist() == pytest.approx([1.4, 1.6])
    ids = torch.tensor([[[0], [0]], [[1], [-1]]])
    assert torch.equal(count_tokens(ids, 2), n)


def test_no_tokens_are_no_loss():
    logits = torch.zeros(0, 4, requires_grad=True)
    n = count_tokens(torch.zeros(0, 2, dtype=torch.int32), 4)
    assert n.tolist() == [0, 0, 0, 0]
    aux, z = aux_loss(logits.softmax(1), n, top_k=2, num_tokens=0), z_loss(logits)
    masked = z_loss(torch.zeros(3, 4), is_token=torch.zeros(3, dtype=torch.bool))
    assert (aux.item(), z.item(), masked.item()) == (0.0, 0.0, 0.0)
    (aux + z).backward()
    assert logits.grad.shape == (0, 4)


def test_aux_pushes_towards_balance():
    """Only p carries the gradient, and following it makes the busy expert less likely."""
    logits = torch.randn(50, 6, dtype=torch.float64)
    logits[:, 2] += 2.0
    logits.requires_grad_()
    n = count_tokens(logits.topk(2).indices, 6)
    aux_loss(logits.softmax(1), n, top_k=2, num_tokens=50).backward()
    assert (logits.grad[:, 2] > 0).all()
    assert logits.grad.sum(1).abs().max() < 1e-12


def test_z_loss():
    logits = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    rows = [math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()]
    assert z_loss(logits).item() == pytest.approx(sum(rows) / 7, rel=1e-12)
    is_token = torch.tensor([True, False, True, True, False, False, True])
    masked = z_loss(logits, is_token=is_token)
    assert masked.item() == pytest.approx((rows[0] + rows[2] + rows[3] + rows[6]) / 4, rel=1e-12)
    masked.backward()
    assert ((logits.grad != 0).any(dim=1) == is_token).all()
    assert torch.autograd.gradcheck(z_loss, logits)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_count_tokens(dtype, device):
    """-1 counts nowhere and the last, empty experts are there."""
    ids = torch.tensor([[0, 2], [2, -1], [-1, -1], [2, 0]], dtype=dtype, device=device)
    n = count_tokens(ids, 5)
    assert n.tolist() == [2, 0, 3, 0, 0]
    assert n.dtype == torch.int64


@pytest.mark.parametrize(
    "tokens,expected,dead",
    [
        ([4, 4, 4, 4], 0.0, 0),
        ([16, 0, 0, 0], 3.0, 3),
        ([6, 2, 4, 4], 0.5, 0),
        ([1, 0, 0, 0], 3.0, 3),
        ([0, 0, 0, 0], 0.0, 4),
        ([7], 0.0, 0),
    ],
)
def test_figures(tokens, expected, dead):
    n = torch.tensor(tokens)
    assert max_vio(n).item() == expected
    assert dead_experts(n).item() == dead


@pytest.mark.parametrize(
    "tokens,ranks,expected",
    [
        ([4, 4, 4, 4], 2, 1.0),
        ([16, 0, 0, 0], 1, 1.0),
        ([16, 0, 0, 0], 2, 2.0),
        ([16, 0, 0, 0], 4, 4.0),
        ([8, 0, 8, 0], 2, 1.0),  # each rank has one busy expert: nobody waits
        ([6, 2, 4, 4], 2, 1.0),
        ([6, 2, 4, 4], 4, 1.5),
        ([1, 0, 0, 0], 4, 4.0),
        ([0, 0, 0, 0], 4, 0.0),
    ],
)
def test_busiest_rank(tokens, ranks, expected):
    """What the others wait for, over what each would do if all did the same."""
    assert busiest_rank(torch.tensor(tokens), ranks).item() == expected


@pytest.mark.parametrize(
    "before,after,expected",
    [
        ([4, 4, 0, 0], [4, 4, 0, 0], 0.0),
        ([4, 4, 0, 0], [40, 40, 0, 0], 0.0),  # shares, whatever the sizes of the batches
        ([8, 0, 0, 0], [0, 8, 0, 0], 1.0),
        ([4, 4, 0, 0], [0, 4, 4, 0], 0.5),
        ([0, 0, 0, 0], [1, 1, 1, 1], 0.0),
        ([4, 0, 0, 0], [0, 0, 0, 0], 0.75),
        ([0, 0, 0, 0], [0, 0, 0, 0], 0.0),
    ],
)
def test_load_change(before, after, expected):
    before, after = torch.tensor(before), torch.tensor(after)
    assert load_change(before, after).item() == expected
    assert load_change(after, before).item() == expected


@pytest.mark.parametrize(
    "tokens,steps",
    [
        pytest.param([6, 2, 4, 4], [-1, 1, 0, 0], id="BB-61: at the mean nothing moves"),
        pytest.param([9, 1, 1, 1], [-1, 1, 1, 1], id="BB-61/b: not recentred"),
        pytest.param([0, 0, 0, 0], [0, 0, 0, 0], id="no tokens"),
        pytest.param([5, 5, 5, 5], [0, 0, 0, 0], id="balance"),
        pytest.param([3, 3, 4, 0], [-1, -1, -1, 1], id="a mean between two integers"),
        pytest.param([2**40 + 1, 2**40 - 1, 2**40, 2**40], [-1, 1, 0, 0], id="counts beyond fp32"),
    ],
)
@pytest.mark.parametrize("rate", [0.001, 0.25])
def test_bias_update(tokens, steps, rate):
    before = torch.tensor([0.5, -1.0, 0.0, 2.0])
    after = updated_bias(before, torch.tensor(tokens), rate)
    assert after.tolist() == (before + rate * torch.tensor(steps)).tolist()
    assert before.tolist() == [0.5, -1.0, 0.0, 2.0]


def test_bias_update_in_fp32():
    """Case BB-61/c: a bf16 bias of 1 would not move by .001."""
    after = updated_bias(torch.ones(2, dtype=torch.bfloat16), torch.tensor([0, 2]), 0.001)
    assert after.dtype == torch.float32
    right = torch.tensor([1.001, 0.999])
    assert_close(after, right, name="bias")
    with pytest.raises(AssertionError):
        assert_close(right.bfloat16().float(), right, name="bias")
