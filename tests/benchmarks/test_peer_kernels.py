import pytest
import torch
from torch.nn import functional as F

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from benchmarks.peers.kernels import expert_bits, silu_mul  # noqa: E402


@pytest.mark.parametrize("tokens, num_experts, top_k", [(1, 8, 1), (77, 100, 5), (300, 256, 8)])
def test_expert_bits(device, tokens, num_experts, top_k):
    ids = torch.rand(tokens, num_experts, device=device).topk(top_k).indices
    bits = expert_bits(ids.int(), num_experts).to(torch.int64)
    found = (bits[:, :, None] >> torch.arange(32, device=device) & 1).bool().flatten(1)
    expected = torch.zeros_like(found).scatter_(1, ids, True)
    assert torch.equal(found, expected)


@triton.jit
def _apply(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    row, column = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    pairs = tl.load(x_ptr + row * (2 * N) + tl.arange(0, 2 * N)[None, :])
    tl.store(out_ptr + row * N + column, silu_mul(pairs))


def test_silu_mul_takes_gate_and_up_interleaved(device):
    x, out = torch.randn(4, 16, device=device), torch.empty(4, 8, device=device)
    _apply[(1,)](x, out, M=4, N=8)
    torch.testing.assert_close(out, F.silu(x[:, ::2]) * x[:, 1::2])
