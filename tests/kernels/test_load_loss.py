"""The balance loss in one program against torch: its derivative to the last bit, its sum in another
order."""

import pytest
import torch

from ep_moe import ops
from ep_moe.kernels.load_loss import load_loss
from ep_moe.testing import assert_close

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("given", ["", "num", "counted", "num counted"])
@pytest.mark.parametrize("B,E,K", [(0, 4, 2), (1, 1, 1), (1, 128, 8), (3, 7, 2), (2, 160, 6)])
def test_against_torch(B, E, K, given, device):
    n = torch.randint(0, 50, (B, E), device=device)
    if B > 1:
        n[0] = 0  # no tokens
    sums = torch.rand(B, E + 1, device=device)  # rows begin where those of a wider tensor do
    tokens = {
        f"{name}_tokens": torch.randint(0, 90, (B,), device=device).float()
        for name in given.split()
    }
    options = {"top_k": K, "scale": 0.3}
    numbers = [tokens.get(f"{name}_tokens") for name in ("num", "counted")]
    loss, weight = load_loss(sums[:, :E], n, *numbers, **options)
    expected = ops.load_loss_ref(sums[:, :E], n, **options, **tokens)
    assert torch.equal(weight, expected.weight)
    assert_close(loss, expected.loss, name="loss", tolerance=1e-6)


def test_more_tokens_than_fp32_counts(device):
    """2^24 + 1 is no fp32 number, its square no int64 one beyond 2^63."""
    n = torch.tensor([[2**33 + 2**9, 0, 2**33 - 2**9, 0]], device=device)
    loss, _ = load_loss(torch.full((1, 4), 2.0**32, device=device), n, None, None, top_k=1, scale=1)
    assert loss.tolist() == [1.0]
