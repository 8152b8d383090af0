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
