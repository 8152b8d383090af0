"""From d_h to d_pre in a pass of its own, for products whose ending would hold too much at once."""

import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.activation import activate, slopes
from ep_moe.kernels.launch import bound, cdiv

ROWS, COLUMNS = 4, 256


def activation_backward(
    d_h: Tensor,
    pre: Tensor,
    scale_of_packed: tuple[Tensor, Tensor, Tensor] | None,
    total: Tensor,
    d_pre: Tensor,
    weighted_h: Tensor,
    d_gate: Tensor | None,
    *,
    activation: str,
) -> None:
    """d_h (S,1,I), pre (S,P,I) -> d_pre (S,P,I), weighted_h (S,1,I) and, where it is given, <d_h,
    h> of each row into d_gate (1,S). scale_of_packed: gates (A,K), arrived_of_packed and
    choice_of_packed, None for ones. Rows from `total` (1,) on are neither read nor written."""
    slots, halves, width = pre.shape
    gates, arrived, choice = scale_of_packed or (None, None, None)
    gates = None if gates is None else gates.contiguous()
    constants = {
        "N": width,
        "P": halves,
        "TOP_K": 1 if gates is None else gates.shape[1],
        "ACTIVATION": activation,
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "enable_fp_fusion": True,
    }
    tensors = (d_h, pre, gates, arrived, choice, total, d_pre, weighted_h, d_gate)
    _activation_backward((cdiv(slots, ROWS), 1, 1), tensors, (), constants)


@bound
@triton.jit
def _activation_backward(
    d_h,
    pre,
    gates,
    arrived_of_packed,
    choice_of_packed,
    total,
    d_pre,
    weighted_h,
    d_gate,
    N: tl.constexpr,
    P: tl.constexpr,
    TOP_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (blocks of packed rows,)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    owned = row < tl.load(total)
    scale = tl.full([ROWS], 1.0, tl.float32)
    if gates is not None:
        arrived = tl.load(arrived_of_packed + row, mask=owned, other=0).to(tl.int64)
        choice = tl.load(choice_of_packed + row, mask=owned, other=0)
        scale = tl.load(gates + arrived * TOP_K + choice, mask=owned, other=0.0).to(tl.float32)
    rows64 = row.to(tl.int64)[:, None]
    pre_rows, h_rows = pre + rows64 * (P * N), d_h + rows64 * N
    weighted_rows, d_pre_rows = weighted_h + rows64 * N, d_pre + rows64 * (P * N)
    dots = tl.zeros([ROWS, COLUMNS], tl.float32)
    ahead = _operands(h_rows, pre_rows, owned, 0, N, P, COLUMNS)
    for column in range(0, N, COLUMNS):
        d, gate, up = ahead
        # The next columns are under way while these are worked on.
        ahead = _operands(h_rows, pre_rows, owned, column + COLUMNS, N, P, COLUMNS)
        d, gate, up = d.to(tl.float32), gate.to(tl.float32), up.to(tl.float32)
        c = (column + tl.arange(0, COLUMNS))[None, :]
        mask = owned[:, None] & (c < N)
        h = activate(gate, up, ACTIVATION)
        dots += d * h
        tl.store(weighted_rows + c, (scale[:, None] * h).to(weighted_h.dtype.element_ty), mask=mask)
        d *= scale[:, None]
        by_gate, by_up = slopes(gate, up, ACTIVATION)
        dtype: tl.constexpr = d_pre.dtype.element_ty
        if P == 2:
            tl.store(d_pre_rows + c, (d * by_gate).to(dtype), mask=mask)
        tl.store(d_pre_rows + (P - 1) * N + c, (d * by_up).to(dtype), mask=mask)
    if d_gate is not None:
        tl.store(d_gate + row, tl.sum(dots, axis=1), mask=owned)


@triton.jit
def _operands(
    h_rows, pre_rows, owned, column, N: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr
):
    """-> d_h, gate, up; the same where there is no gate half"""
    c = (column + tl.arange(0, COLUMNS))[None, :]
    mask = owned[:, None] & (c < N)
    d = tl.load(h_rows + c, mask=mask, other=0.0)
    up = tl.load(pre_rows + (P - 1) * N + c, mask=mask, other=0.0)
    if P == 1:
        return d, up, up
    else:
        return d, tl.load(pre_rows + c, mask=mask, other=0.0), up
