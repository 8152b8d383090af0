"""What peers leave to their callers to write in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(repr=lambda _: "silu_mul")
def silu_mul(gate_up):
    """silu(gate) * up in fp32, gate and up interleaved.  (M,2N) -> (M,N)"""
    pairs = tl.reshape(gate_up.to(tl.float32), (gate_up.shape[0], gate_up.shape[1] // 2, 2))
    gate, up = tl.split(pairs)
    return gate / (1 + tl.exp(-gate)) * up


def expert_bits(ids: Tensor, num_experts: int) -> Tensor:
    """Bit b of word w of a token is set where it chose expert 32 w + b.  ids (T,K) -> (T,W) uint32,
    a view of words that lie by columns."""
    tokens, top_k = ids.shape
    words = triton.cdiv(num_experts, 32)
    by_column = torch.empty(
        words, 32 * triton.cdiv(tokens, 32), dtype=torch.uint32, device=ids.device
    )
    _expert_bits_kernel[(triton.cdiv(tokens, 128), words)](
        ids, by_column, tokens, by_column.shape[1], K=top_k, BLOCK=128
    )
    return by_column.t()[:tokens]


@triton.jit
def _expert_bits_kernel(ids_ptr, bits_ptr, T, stride, K: tl.constexpr, BLOCK: tl.constexpr):
    """Program (t, w) writes word w of a block of tokens.

    ids [[1, 33]], w=0 -> 2, w=1 -> 2
    """
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.program_id(1)
    bits = tl.zeros((BLOCK,), tl.uint32)
    for k in tl.static_range(K):
        expert = tl.load(ids_ptr + t * K + k, mask=t < T, other=0).to(tl.uint32)
        one = tl.full((BLOCK,), 1, tl.uint32)
        bits |= tl.where(expert // 32 == w, one << (expert % 32), 0)
    tl.store(bits_ptr + w * stride + t, bits, mask=t < T)
