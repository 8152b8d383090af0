"""From d_h to d_pre in a pass of its own, for products whose ending would hold too much at once."""

import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.activation import activate, slopes

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
    _activation_backward[(triton.cdiv(slots, ROWS),)](
        d_h,
        pre,
        gates,
        arrived,
        choice,
        total,
        d_pre,
        weighted_h,
        d_gate,
        N=width,
        P=halves,
        TOP_K=1 if gates is None else gates.shape[1],
        ACTIVATION=activation,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        enable_fp_fusion=True,
    )


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
    row64 = row.to(tl.int64)[:, None]
    dot = tl.zeros([ROWS], tl.float32)
    for column in range(0, N, COLUMNS):
        c = column + tl.arange(0, COLUMNS)
        mask = owned[:, None] & (c < N)[None, :]
        of_pre, of_h = row64 * (P * N) + c[None, :], row64 * N + c[None, :]
        up = tl.load(pre + of_pre + (P - 1) * N, mask=mask, other=0.0).to(tl.float32)
        gate = up
        if P == 2:
            gate = tl.load(pre + of_pre, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(d_h + of_h, mask=mask, other=0.0).to(tl.float32)
        h = activate(gate, up, ACTIVATION)
        dot += tl.sum(d * h, axis=1)
        tl.store(weighted_h + of_h, (scale[:, None] * h).to(weighted_h.dtype.element_ty), mask=mask)
        d *= scale[:, None]
        by_gate, by_up = slopes(gate, up, ACTIVATION)
        dtype: tl.constexpr = d_pre.dtype.element_ty
        if P == 2:
            tl.store(d_pre + of_pre, (d * by_gate).to(dtype), mask=mask)
        tl.store(d_pre + of_pre + (P - 1) * N, (d * by_up).to(dtype), mask=mask)
    if d_gate is not None:
        tl.store(d_gate + row, dot, mask=owned)
