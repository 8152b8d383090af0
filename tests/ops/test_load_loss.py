"""The balance loss from sums: numbers worked by hand, and what the router takes its gradient of."""

import pytest
import torch

from ep_moe import ops
from ep_moe.routing.balance import load_loss
from ep_moe.testing import assert_close


def test_worked_example(device):
    """All of two tokens to one of two experts, whose probability is 0.7 each time."""
    n, p_sum = torch.tensor([2, 0], device=device), torch.tensor([1.4, 0.6], device=device)
    loss, weight = ops.load_loss(p_sum, n, top_k=1)
    assert loss.item() == pytest.approx(1.4)
    assert weight.tolist() == [1.0, 0.0]
    wider = ops.load_loss(p_sum, torch.tensor([4, 4], device=device), top_k=1, num_tokens=2)
    assert wider.loss.item() == pytest.approx(1.0)
    assert ops.load_loss(p_sum, n, top_k=1, counted_tokens=4, scale=2.0).loss.item() == (
        pytest.approx(0.7)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [(), (3,), (2, 2), (0,)])
def test_is_the_formula(batch, dtype, device):
    K, E = 2, 5
    n = torch.randint(0, 20, (*batch, E), device=device)
    p_sum = torch.rand(*batch, E, device=device).to(dtype)
    tokens = torch.randint(0, 9, batch, device=device)
    loss, weight = ops.load_loss(p_sum, n, top_k=K, scale=0.5, num_tokens=tokens)
    counted = (n.sum(-1) // K).clamp_min(1).double()
    scale = 0.5 * E / (K * counted * tokens.clamp_min(1))
    expected = (n * p_sum.double()).sum(-1) * scale
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, 0.02)
    assert loss.dtype == weight.dtype == dtype
    assert_close(loss, expected, name="loss", tolerance=tolerance)
    assert_close(weight, n * scale[..., None], name="weight", tolerance=tolerance)


@pytest.mark.parametrize("kind", ["a number", "one for all", "every other"])
def test_numbers_of_tokens(kind, device):
    n, p_sum = torch.randint(1, 9, (3, 4), device=device), torch.rand(3, 4, device=device)
    tokens = torch.tensor([5, 7, 6, 7, 8], device=device)
    given = {"a number": 5, "one for all": tokens[0], "every other": tokens[::2]}[kind]
    each = [5, 6, 8] if kind == "every other" else [5, 5, 5]
    for name in ("num_tokens", "counted_tokens"):
        loss, _ = ops.load_loss(p_sum, n, top_k=2, **{name: given})
        for row, expected in enumerate(each):
            alone = ops.load_loss(p_sum[row], n[row], top_k=2, **{name: expected}).loss
            assert loss[row].item() == pytest.approx(alone.item(), rel=1e-6)


@pytest.mark.parametrize("p,n", [("bfloat16", "float32"), ("float32", "float64")])
def test_averaged_counts_leave_the_dtype_alone(p, n, device):
    p_sum = torch.tensor([1.5, 0.5], device=device, dtype=getattr(torch, p))
    counts = torch.tensor([1.5, 0.5], device=device, dtype=getattr(torch, n))
    loss, weight = ops.load_loss(p_sum, counts, top_k=1)
    assert loss.dtype == weight.dtype == p_sum.dtype
    assert loss.item() == pytest.approx(2 * (1.5 * 1.5 + 0.5 * 0.5) / 4)


def test_losses_may_be_added_in_place(device):
    n = torch.tensor([3, 5], device=device)
    p_sum = torch.rand(2, device=device).requires_grad_()
    loss = load_loss(p_sum, n, top_k=2, scale=0.1)
    loss += 1.0
    loss.backward()
    assert torch.equal(p_sum.grad, ops.load_loss(p_sum.detach(), n, top_k=2, scale=0.1).weight)


def test_gradient(device):
    n = torch.tensor([[3, 0, 5], [0, 0, 0]], device=device)
    for dtype in (torch.float64, torch.float32):
        p_sum = torch.rand(2, 3, device=device).to(dtype).requires_grad_()
        d_loss = torch.tensor([2.0, -1.0], device=device, dtype=dtype)
        tokens = torch.tensor([4, 0], device=device)
        loss = load_loss(p_sum, n, top_k=2, scale=0.1, num_tokens=tokens)
        (got,) = torch.autograd.grad(loss, p_sum, d_loss)
        reference = ops.load_loss_ref(p_sum, n, top_k=2, scale=0.1, num_tokens=tokens)
        (expected,) = torch.autograd.grad(reference.loss, p_sum, d_loss)
        assert torch.equal(got, expected)
