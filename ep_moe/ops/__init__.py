"""What each step of the expert side computes: plain forward and backward functions in torch.

They are not autograd functions (`ep_moe.expert_mlp` is the one that strings them together), so
fusions may cross them. All accumulate in fp32, or fp64 when the input is fp64, and round once at
the end.
"""

from ep_moe.ops.activation import ACTIVATIONS, Activation
from ep_moe.ops.gather import gather
from ep_moe.ops.grouped_gemm import (
    grouped_bias_grad,
    grouped_gemm,
    grouped_gemm_dgrad,
    grouped_gemm_dgrad_ref,
    grouped_gemm_ref,
    grouped_gemm_wgrad,
    grouped_gemm_wgrad_ref,
)
from ep_moe.ops.hidden import (
    Hidden,
    HiddenGrads,
    gate_of_packed,
    hidden,
    hidden_backward,
    hidden_backward_ref,
    hidden_ref,
    of_choice,
)
from ep_moe.ops.load_loss import LoadLoss, load_loss, load_loss_ref
from ep_moe.ops.numerics import (
    ROW_BLOCK,
    Numerics,
    gated,
    matmul,
    row_dot,
    served_by_kernel,
    sigmoid,
    softmax,
    softplus,
)
from ep_moe.ops.pack import count, pack
from ep_moe.ops.router_logits import router_logits, router_logits_backward
from ep_moe.ops.second_stream import SecondStream
from ep_moe.ops.select import (
    SCORING,
    Selected,
    dense_probabilities,
    needs_logits,
    rank,
    sanitize,
    select,
    select_backward,
)
from ep_moe.ops.send import (
    HEAD,
    SendOrder,
    empty_blocks,
    open_blocks,
    open_blocks_ref,
    send_order,
    send_order_ref,
)
from ep_moe.ops.weighted_sum import weighted_sum, weighted_sum_backward, weighted_sum_ref

__all__ = [
    "ACTIVATIONS",
    "HEAD",
    "ROW_BLOCK",
    "SCORING",
    "Activation",
    "Hidden",
    "HiddenGrads",
    "LoadLoss",
    "Numerics",
    "SecondStream",
    "Selected",
    "SendOrder",
    "count",
    "dense_probabilities",
    "empty_blocks",
    "gate_of_packed",
    "gated",
    "gather",
    "grouped_bias_grad",
    "grouped_gemm",
    "grouped_gemm_dgrad",
    "grouped_gemm_dgrad_ref",
    "grouped_gemm_ref",
    "grouped_gemm_wgrad",
    "grouped_gemm_wgrad_ref",
    "hidden",
    "hidden_backward",
    "hidden_backward_ref",
    "hidden_ref",
    "load_loss",
    "load_loss_ref",
    "matmul",
    "needs_logits",
    "of_choice",
    "open_blocks",
    "open_blocks_ref",
    "pack",
    "rank",
    "router_logits",
    "router_logits_backward",
    "row_dot",
    "sanitize",
    "select",
    "select_backward",
    "send_order",
    "send_order_ref",
    "served_by_kernel",
    "sigmoid",
    "softmax",
    "softplus",
    "weighted_sum",
    "weighted_sum_backward",
    "weighted_sum_ref",
]
