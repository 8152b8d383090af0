"""The balance loss in one program against torch: its derivative to the last bit, its sum in another
order."""

import pytest
import torch

from ep_moe import ops
from ep_moe.kernels.load_loss import load_loss
from ep_moe.testing import assert_close

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def compare(p_sum, n, **options):
    numbers = [options.pop(f"{name}_tokens", None) for name in ("num", "counted")]
    loss, weight = load_loss(p_sum, n, *numbers, **options)
    names = ("num_tokens", "counted_tokens")
    expected = ops.load_loss_ref(p_sum, n, **options, **dict(zip(names, numbers, strict=True)))
    assert torch.equal(weight, expected.weight)
    assert_close(loss, expected.loss, name="loss", tolerance=1e-6)
    return loss


@pytest.mark.parametrize("given", ["", "num", "counted", "num counted"])
@pytest.mark.parametrize(
    "batch,E,K", [((0,), 4, 2), ((), 1, 1), ((1,), 128, 8), ((3,), 7, 2), ((2, 2), 160, 6)]
)
def test_against_torch(batch, E, K, given, device):
    n = torch.randint(0, 50, (*batch, E), device=device)
    sums = torch.rand(*batch, E + 1, device=device)  # rows begin where those of a wider tensor do
    tokens = {
        f"{name}_tokens": torch.randint(1, 90, batch, device=device).float()
        for name in given.split()
    }
    if n.numel() > E:  # no tokens
        for name, value in {"n": n, **tokens}.items():
            value[-1 if name == "num_tokens" else 0] = 0
    compare(sums[..., :E], n, top_k=K, scale=0.3, **tokens)


@pytest.mark.parametrize("strided", ["broadcast", "every other"])
def test_numbers_that_do_not_lie_side_by_side(strided, device):
    n = torch.randint(0, 50, (3, 4), device=device)
    tokens = torch.tensor([5.0, 7.0, 9.0, 11.0, 13.0], device=device)
    tokens = tokens[:1].expand(3) if strided == "broadcast" else tokens[::2]
    p_sum = torch.rand(4, 3, device=device).t()
    compare(p_sum, n, top_k=2, scale=1, num_tokens=tokens, counted_tokens=tokens)


def test_counts_that_fp32_cannot_add(device):
    """One beyond 2^24 times 300: in fp32 the ones would be lost, and a token with them."""
    n = torch.full((1, 300), 2**24 + 1, device=device)
    top_k = int(n.sum()) // 2  # so that there are two tokens, or one
    loss = compare(torch.ones(1, 300, device=device), n, top_k=top_k, scale=1.0)
    assert loss.item() == pytest.approx(300 / (top_k * 2 * 2) * 2 * top_k)
    large = torch.tensor([[2**33, 0]], device=device)
    loss = compare(torch.full((1, 2), 2.0**32, device=device), large, top_k=1, scale=1.0)
    assert loss.item() == 1.0
