"""What stands between arrived rows and the down projection: gather, gate+up product, activation;
and the way back through it.

On a GPU one kernel each way (`ep_moe.kernels.grouped_gemm`): it reads arrived rows where they are,
so that no packed copy of them exists, and h and its gradients are made while the product is still
in registers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ep_moe.ops.activation import ACTIVATIONS
from ep_moe.ops.gather import gather
from ep_moe.ops.grouped_gemm import grouped_gemm_dgrad_ref, grouped_gemm_ref, kernel_options
from ep_moe.ops.numerics import (
    Numerics,
    gated,
    matmul,
    row_dot,
    served_by_kernel,
)
from ep_moe.types import Packed


class Hidden(NamedTuple):
    h: Tensor  # (S,I)
    pre: Tensor | None  # (S,P), P = 2I with a gate half, else I; None = not kept


class HiddenGrads(NamedTuple):
    pre: Tensor  # (S,P)
    weighted_h: Tensor  # (S,I): gate * h, what the gradient of the down projection is made of
    gate: Tensor | None  # (A,K), 0 at absent choices; None where the gate is on the input


def hidden(
    rows: Tensor,
    weight: Tensor,
    packed: Packed,
    bias: Tensor | None,
    *,
    gates: Tensor | None,
    activation: str,
    keep: bool,
    numerics: Numerics = "fast",
) -> Hidden:
    """pre[s] = weight[e] @ (gate * rows[arrived_of_packed[s]]) + bias[e], h = activation(pre).

    rows (A,H), weight (E_loc,P,H), bias (E_loc,P). gates (A,K) where they are on the input, else
    None.
    """
    if not served_by_kernel(rows):
        return hidden_ref(
            rows,
            weight,
            packed,
            bias,
            gates=gates,
            activation=activation,
            keep=keep,
            numerics=numerics,
        )
    from ep_moe.kernels import grouped_gemm as kernels

    experts, columns, depth = weight.shape
    mean = len(packed.arrived_of_packed) // experts
    how = kernel_options("hidden", rows, mean, depth, columns, numerics)
    options = {"gates": gates, "activation": activation, "keep": keep}
    return Hidden(*kernels.hidden(rows, weight, packed, bias, **options, **how))


def hidden_ref(
    rows: Tensor,
    weight: Tensor,
    packed: Packed,
    bias: Tensor | None,
    *,
    gates: Tensor | None,
    activation: str,
    keep: bool,
    numerics: Numerics = "fast",
) -> Hidden:
    packed_rows = gather(rows, packed.arrived_of_packed, packed.offsets)
    if gates is not None:
        packed_rows = gated(packed_rows, gate_of_packed(gates, packed))
    pre = grouped_gemm_ref(packed_rows, weight, packed.offsets, bias, numerics=numerics)
    return Hidden(ACTIVATIONS[activation].forward(pre), pre if keep else None)


def hidden_backward(
    d_out: Tensor,
    weight: Tensor,
    packed: Packed,
    pre: Tensor,
    bias: Tensor | None,
    *,
    gates: Tensor | None,
    activation: str,
    numerics: Numerics = "fast",
) -> HiddenGrads:
    """From the gradient of out[a] = sum_k gate[a,k] (weight[e] @ h + bias[e]) to that of pre and of
    the gate, which is <d_h without the gate, h> + <d_out, bias>: the down projection's output is
    not needed.

    d_out (A,H), weight (E_loc,H,I), pre (S,P), bias (E_loc,H) of the down projection. gates (A,K)
    where they are on the output, else None.
    """
    if not served_by_kernel(d_out):
        return hidden_backward_ref(
            d_out,
            weight,
            packed,
            pre,
            bias,
            gates=gates,
            activation=activation,
            numerics=numerics,
        )
    from ep_moe.kernels import grouped_gemm as kernels
    from ep_moe.kernels.weighted_sum import sum_parts

    experts, depth, columns = weight.shape
    how = kernel_options("gradient", pre, len(pre) // experts, depth, columns, numerics)
    options = {"gates": gates, "activation": activation}
    grads = kernels.hidden_backward(d_out, weight, packed, pre, **options, **how)
    if grads.gate is None:
        return HiddenGrads(grads.pre, grads.weighted_h, None)
    d_gate = sum_parts(grads.gate, packed.packed_of_arrived)
    if bias is not None:
        d_gate += _gate_grad_of_bias(d_out, bias, packed, numerics)
    return HiddenGrads(grads.pre, grads.weighted_h, d_gate)


def hidden_backward_ref(
    d_out: Tensor,
    weight: Tensor,
    packed: Packed,
    pre: Tensor,
    bias: Tensor | None,
    *,
    gates: Tensor | None,
    activation: str,
    numerics: Numerics = "fast",
) -> HiddenGrads:
    function = ACTIVATIONS[activation]
    d_out_packed = gather(d_out, packed.arrived_of_packed, packed.offsets)
    h = function.forward(pre)
    d_h = grouped_gemm_dgrad_ref(d_out_packed, weight, packed.offsets, numerics=numerics)
    if gates is None:
        return HiddenGrads(function.backward(d_h, pre), h, None)
    gate = gate_of_packed(gates, packed)
    d_h = d_h.to(torch.promote_types(gate.dtype, h.dtype))
    d_gate = row_dot(d_h, h.to(d_h.dtype), numerics=numerics)
    if bias is not None:
        of_row = bias[_expert_of_packed(packed.offsets, len(h))]
        d_gate += row_dot(d_out_packed, of_row, numerics=numerics)
    d_pre = function.backward(gate * d_h, pre)
    return HiddenGrads(d_pre, gated(h, gate), of_choice(d_gate, packed))


def gate_of_packed(gates: Tensor, packed: Packed) -> Tensor:
    """(A,K) -> (S,1)"""
    return gates[packed.arrived_of_packed, packed.choice_of_packed][:, None]


def of_choice(value: Tensor, packed: Packed) -> Tensor:
    """(S,) -> (A,K), 0 at absent choices"""
    index = packed.packed_of_arrived
    if not len(value):
        return value.new_zeros(index.shape)
    return value[index.clamp_min(0)].masked_fill(index < 0, 0.0)


def _gate_grad_of_bias(d_out: Tensor, bias: Tensor, packed: Packed, numerics: Numerics) -> Tensor:
    """<d_out[a], bias[e]> of each choice, from the product with all biases.  -> (A,K) fp32"""
    dots = d_out.new_empty(len(d_out), len(bias), dtype=torch.float32)
    matmul(d_out.float(), bias.float().t(), numerics=numerics, out=dots)
    index = packed.packed_of_arrived
    expert = torch.searchsorted(packed.offsets[1:], index, right=True, out_int32=True)
    return dots.gather(1, expert.long().clamp_max(len(bias) - 1)).masked_fill(index < 0, 0.0)


def _expert_of_packed(offsets: Tensor, num_rows: int) -> Tensor:
    """offsets [0,2,2,5], 6 rows -> [0,0,2,2,2,2]: a row that no expert owns has the last one"""
    rows = torch.arange(num_rows, device=offsets.device)
    return torch.searchsorted(offsets[1:-1].long(), rows, right=True)
