"""The balance loss of counts and probabilities that are already summed, in one small program: as
ten of torch's it would take longer than the selection before it."""

import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.launch import bound, next_power_of_2


def load_loss(
    p_sum: Tensor,
    tokens_per_expert: Tensor,
    num_tokens: Tensor | None,
    counted_tokens: Tensor | None,
    *,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """p_sum (...,E) fp32, tokens_per_expert (...,E) int64, numbers of tokens (...) fp32 -> the loss
    (...) and its derivative by p_sum (...,E), fp32. Without counted_tokens sum(n) // K, without
    num_tokens as many as are counted."""
    *batch, experts = p_sum.shape
    loss, weight = p_sum.new_empty(batch), p_sum.new_empty(p_sum.shape)
    if loss.numel():
        rows = p_sum.reshape(-1, experts)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        tokens = (None if t is None else t.contiguous() for t in (num_tokens, counted_tokens))
        tensors = (rows, tokens_per_expert.contiguous(), *tokens, loss, weight)
        numbers = (rows.stride(0), float(top_k / experts), float(scale))
        constants = {
            "E": experts,
            "K": top_k,
            "EXPERTS": next_power_of_2(experts),
            "enable_fp_fusion": False,
        }
        _load_loss((loss.numel(), 1, 1), tensors, numbers, constants)
    return loss, weight


@bound
@triton.jit(do_not_specialize=["stride", "share", "scale"])
def _load_loss(
    p_sum,
    tokens_per_expert,
    num_tokens,
    counted_tokens,
    loss,
    weight,
    stride,
    share,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """A program a row. share = K / E."""
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, EXPERTS)
    n = tl.load(tokens_per_expert + row * E + e, mask=e < E, other=0)
    if counted_tokens is None:
        counted = (tl.sum(n) // K).to(tl.float32)
    else:
        counted = tl.load(counted_tokens + row)
    counted = tl.maximum(counted, 1.0)
    if num_tokens is None:
        tokens = counted
    else:
        tokens = tl.maximum(tl.load(num_tokens + row), 1.0)
    by_p = tl.div_rn(n.to(tl.float32), counted * tokens * share) * scale
    p = tl.load(p_sum + row * stride + e, mask=e < E, other=0.0)
    tl.store(weight + row * E + e, by_p, mask=e < E)
    tl.store(loss + row, tl.sum(by_p * p))
