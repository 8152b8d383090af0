"""Packed rows times the weight of their expert, and what is fused behind it: the activation, or the
gradient through it.

One persistent kernel with three endings. Its rows may be arrived rows that it gathers as it reads
them: a packed copy of them need not exist.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.activation import GATED, activate, slopes
from ep_moe.kernels.activation_backward import activation_backward
from ep_moe.kernels.gather import gather
from ep_moe.kernels.launch import bound, cdiv, next_power_of_2
from ep_moe.kernels.tiles import (
    Tile,
    descriptor,
    load_rows,
    place_of,
    programs,
    ragged_descriptor,
    store_rows,
    takes_descriptors,
    tile_ends,
)
from ep_moe.types import Packed


class GradientParts(NamedTuple):
    pre: Tensor  # (S,P I)
    weighted_h: Tensor  # (S,I): gate * h
    gate: Tensor | None  # (blocks,S) fp32, to be summed over the blocks


def grouped_gemm(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    precision: str = "ieee",
    tile: Tile,
) -> Tensor:
    """(S,N_in) by weight (E,N_out,N_in) -> (S,N_out); `transposed`: (S,N_out) -> (S,N_in). Rows
    from offsets[-1] on are neither read nor written."""
    y = rows.new_empty(len(rows), 1, weight.shape[2 if transposed else 1])
    _launch(
        tile,
        rows,
        weight,
        offsets,
        bias=bias,
        y=y,
        TRANSPOSED=transposed,
        ENDING="product",
        PRECISION=precision,
    )
    return y[:, 0]


def hidden(
    rows: Tensor,
    weight: Tensor,
    packed: Packed,
    bias: Tensor | None = None,
    *,
    gates: Tensor | None = None,
    activation: str,
    keep: bool,
    precision: str = "ieee",
    tile: Tile,
) -> tuple[Tensor, Tensor | None]:
    """Arrived rows (A,H), weight (E,P I,H) -> h (S,I) and, if it is to be kept, the pre-activation
    (S,P I). gates (A,K) multiply the product, before the bias."""
    halves = 2 if GATED[activation] else 1
    width, slots = weight.shape[1] // halves, len(packed.arrived_of_packed)
    h = rows.new_empty(slots, 1, width)
    pre = rows.new_empty(slots, halves, width) if keep else None
    _launch(
        tile,
        rows,
        weight,
        packed.offsets,
        bias=bias,
        arrived_of_packed=packed.arrived_of_packed,
        choice_of_packed=packed.choice_of_packed,
        gates=gates,
        y=h,
        pre=pre,
        TRANSPOSED=False,
        ENDING="activation",
        ACTIVATION=activation,
        PRECISION=precision,
    )
    return h[:, 0], None if pre is None else pre.flatten(1)


def hidden_backward(
    d_out: Tensor,
    weight: Tensor,
    packed: Packed,
    pre: Tensor,
    *,
    gates: Tensor | None,
    activation: str,
    precision: str = "ieee",
    tile: Tile,
) -> GradientParts:
    """d_out of arrived rows (A,H), the down projection's weight (E,H,I), pre (S,P I). gates (A,K)
    multiply the expert's output, or are None; then nobody asks for their gradient."""
    halves = 2 if GATED[activation] else 1
    slots, width = len(pre), weight.shape[2]
    pre = pre.view(slots, halves, width)
    d_pre, weighted_h = torch.empty_like(pre), d_out.new_empty(slots, 1, width)
    if tile.specialize and halves == 1:  # so large a tile and its ending: only in `hopper_gradient`
        tile = tile._replace(step=0)
    d_gate = None
    if gates is not None:
        blocks = cdiv(width, tile.block_n) if tile.step else 1
        d_gate = d_out.new_empty(blocks, slots, dtype=torch.float32)
    index, choice = packed.arrived_of_packed, packed.choice_of_packed
    common = {"arrived_of_packed": index, "TRANSPOSED": True, "PRECISION": precision}
    if tile.step:
        _launch(
            tile,
            d_out,
            weight,
            packed.offsets,
            choice_of_packed=choice,
            gates=gates,
            y=weighted_h,
            pre=pre,
            d_pre=d_pre,
            d_gate=d_gate,
            ENDING="gradient",
            ACTIVATION=activation,
            **common,
        )
    else:
        d_h = torch.empty_like(weighted_h)
        _launch(tile, d_out, weight, packed.offsets, y=d_h, ENDING="product", **common)
        scale = None if gates is None else (gates.contiguous(), index, choice)
        total = packed.offsets[-1:]
        activation_backward(
            d_h, pre, scale, total, d_pre, weighted_h, d_gate, activation=activation
        )
    return GradientParts(d_pre.flatten(1), weighted_h[:, 0], d_gate)


def _launch(
    tile: Tile,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    arrived_of_packed: Tensor | None = None,
    choice_of_packed: Tensor | None = None,
    gates: Tensor | None = None,
    y: Tensor,
    pre: Tensor | None = None,
    d_pre: Tensor | None = None,
    d_gate: Tensor | None = None,
    TRANSPOSED: bool,
    ENDING: str,
    ACTIVATION: str = "",
    PRECISION: str,
) -> None:
    x, weight = x.contiguous(), weight.contiguous()
    bias, gates = (t if t is None else t.contiguous() for t in (bias, gates))
    slots, _, columns = y.shape
    experts = len(weight)
    halves = pre.shape[1] if pre is not None else weight.shape[1] // columns
    if ENDING == "gradient":
        weight_halves, depth = 1, weight.shape[1]
    elif TRANSPOSED:
        weight_halves, depth, halves = 1, weight.shape[1], 1
    else:
        weight_halves, depth = halves, weight.shape[2]
    most = min(cdiv(slots, tile.block_m) + experts, slots)
    most *= cdiv(columns, tile.block_n)
    if not slots:
        return
    gathered = arrived_of_packed is not None
    if gathered and tile.copy:
        x, gathered = gather(x, arrived_of_packed, offsets), False
    # A tile's two halves there are gate and up, or nothing stands behind the product.
    halved = ENDING == "product" or halves == 2
    if tile.specialize and bias is None and halved and (gates is None or ENDING == "gradient"):
        from ep_moe.kernels import hopper, hopper_gradient  # for NVIDIA alone

        if hopper.serves(x, weight, y, pre, d_pre, depth=depth if gathered else None):
            if ENDING == "gradient":
                hopper_gradient.hidden_backward(
                    tile,
                    x,
                    weight,
                    offsets,
                    gathered=gathered,
                    arrived_of_packed=arrived_of_packed,
                    choice_of_packed=choice_of_packed,
                    gates=gates,
                    pre=pre,
                    d_pre=d_pre,
                    weighted_h=y,
                    d_gate=d_gate,
                    activation=ACTIVATION,
                )
            else:
                hopper.grouped_gemm(
                    tile,
                    x,
                    weight,
                    offsets,
                    arrived_of_packed=arrived_of_packed if gathered else None,
                    y=y,
                    pre=pre,
                    transposed=TRANSPOSED,
                    activation=ACTIVATION or None,
                )
            return
    tma = tile.tma and takes_descriptors(weight, None if gathered else x, y, pre, d_pre)
    stores = tma and tile.tma_store
    step = min(tile.step, tile.block_n) if ENDING == "gradient" else tile.block_n
    operands: dict[str, Any] = {"x": x, "weight": weight, "y": y, "pre": pre, "d_pre": d_pre}
    if tma:
        m, n, k = tile.block_m, tile.block_n, tile.block_k
        if not gathered:
            operands["x"] = descriptor(x, m, k)
        if TRANSPOSED:
            operands["weight"] = descriptor(weight, 1, k, n)
        else:
            by_half = weight.view(experts, weight_halves, columns, depth)
            operands["weight"] = descriptor(by_half, 1, weight_halves, n, k)
    if stores:
        for name in ("y", "pre", "d_pre"):
            if operands[name] is not None and (name, ENDING) != ("pre", "gradient"):
                operands[name] = ragged_descriptor(operands[name], tile.block_m, step)
    x, weight, y, pre, d_pre = operands.values()
    index = (arrived_of_packed, choice_of_packed)
    tensors = (x, weight, bias, offsets, *index, gates, y, pre, d_pre, d_gate)
    constants = {
        "EXPERTS": next_power_of_2(experts),
        "K": depth,
        "N": columns,
        "P": halves,
        "TOP_K": 1 if gates is None else gates.shape[1],
        "TRANSPOSED": TRANSPOSED,
        "ENDING": ENDING,
        "ACTIVATION": ACTIVATION,
        "PRECISION": PRECISION,
        "GATHER": gathered,
        "TMA": tma,
        "TMA_STORE": stores,
        "FLATTEN": tile.flatten,
        "SWAP": tile.swap,
        "STEP": step,
        **tile.constants,
    }
    grid = (programs(tile, most, offsets.device), 1, 1)
    _grouped_gemm(grid, tensors, (slots, experts), constants)


@bound
@triton.jit(do_not_specialize=["slots", "experts"])
def _grouped_gemm(
    x,
    weight,
    bias,
    offsets,
    arrived_of_packed,
    choice_of_packed,
    gates,
    y,
    pre,
    d_pre,
    d_gate,
    slots,
    experts,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    TOP_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ENDING: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    GATHER: tl.constexpr,
    TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
    FLATTEN: tl.constexpr,
    SWAP: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """x (A or S,K) by weight (E,P N,K), transposed (E,K,N); y (S,1,N), pre and d_pre (S,P,N).

    A tile of a gated product holds the gate AND the up columns of one block of h.
    """
    WIDE: tl.constexpr = 2 * BLOCK_N if ENDING == "activation" and P == 2 else BLOCK_N
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    PACKED_TMA: tl.constexpr = TMA and not GATHER
    ends = tile_ends(offsets, experts, EXPERTS, BLOCK_M, COLUMNS)
    for tile in tl.range(tl.program_id(0), tl.max(ends), tl.num_programs(0), flatten=FLATTEN):
        expert, end, row, block = place_of(tile, ends, offsets, BLOCK_M, COLUMNS, GROUP_M)
        column = block * BLOCK_N
        # Beyond the expert's end the last row again: it is not stored.
        packed = tl.minimum(row + tl.arange(0, BLOCK_M), end - 1)
        arrived = packed
        if arrived_of_packed is not None:
            arrived = tl.load(arrived_of_packed + packed)
        if not PACKED_TMA:
            x_rows = x + (arrived if GATHER else packed).to(tl.int64)[:, None] * K
        if not TMA:
            j = tl.arange(0, WIDE)
            # Beyond the last column the first ones again: of N the compiler knows what divides it,
            # and loads many columns at once.
            w_column = j // BLOCK_N * N + (column + j % BLOCK_N) % N
            w_base = weight + expert.to(tl.int64) * (K * N * (WIDE // BLOCK_N))

        acc = tl.zeros([WIDE, BLOCK_M] if SWAP else [BLOCK_M, WIDE], tl.float32)
        for k in range(0, K, BLOCK_K):
            depth = k + tl.arange(0, BLOCK_K)
            if PACKED_TMA:
                a = x.load([row, k])
            elif K % BLOCK_K == 0:
                a = tl.load(x_rows + depth[None, :])
            else:
                a = tl.load(x_rows + depth[None, :], mask=(depth < K)[None, :], other=0.0)
            if TMA and TRANSPOSED:
                b = weight.load([expert, k, column]).reshape(BLOCK_K, WIDE)
            elif TMA:
                b = weight.load([expert, 0, column, k]).reshape(WIDE, BLOCK_K).T
            elif TRANSPOSED:
                from_ = w_base + depth.to(tl.int64)[:, None] * N + w_column[None, :]
                b = tl.load(from_, mask=(depth < K)[:, None], other=0.0)
            else:
                from_ = w_base + w_column.to(tl.int64)[None, :] * K + depth[:, None]
                b = tl.load(from_, mask=(depth < K)[:, None], other=0.0)
            if SWAP:
                acc = tl.dot(b.T, a.T, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if SWAP:
            acc = acc.T

        scale = 1.0
        if gates is not None:
            choice = tl.load(choice_of_packed + packed)
            scale = tl.load(gates + arrived.to(tl.int64) * TOP_K + choice).to(tl.float32)[:, None]
        if ENDING == "product":
            acc = _biased(acc, bias, expert, 0, column, 1, N, BLOCK_N)
            store_rows(y, acc, row, end, 0, column, 1, N, BLOCK_M, BLOCK_N, TMA_STORE)
        elif ENDING == "activation":
            acc *= scale
            if P == 2:
                gate, up = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
                gate = _biased(gate, bias, expert, 0, column, P, N, BLOCK_N)
                up = _biased(up, bias, expert, 1, column, P, N, BLOCK_N)
                if pre is not None:
                    store_rows(pre, gate, row, end, 0, column, P, N, BLOCK_M, BLOCK_N, TMA_STORE)
                    store_rows(pre, up, row, end, 1, column, P, N, BLOCK_M, BLOCK_N, TMA_STORE)
            else:
                up = _biased(acc, bias, expert, 0, column, P, N, BLOCK_N)
                gate = up
                if pre is not None:
                    store_rows(pre, up, row, end, 0, column, P, N, BLOCK_M, BLOCK_N, TMA_STORE)
            h = activate(gate, up, ACTIVATION)
            store_rows(y, h, row, end, 0, column, 1, N, BLOCK_M, BLOCK_N, TMA_STORE)
        else:
            tl.static_assert(ENDING == "gradient")
            ahead = _pre(pre, row, end, column, P, N, BLOCK_M, STEP)
            dot, ahead = _through_activation(
                acc, ahead, scale, pre, d_pre, y, row, end, column,
                P, N, ACTIVATION, BLOCK_M, BLOCK_N, STEP, TMA_STORE,
            )  # fmt: skip
            if d_gate is not None:
                r = row + tl.arange(0, BLOCK_M)
                tl.store(d_gate + block.to(tl.int64) * slots + r, dot, mask=r < end)


@triton.jit
def _biased(
    acc,
    bias,
    expert,
    half: tl.constexpr,
    column,
    P: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    if bias is None:
        return acc
    else:
        c = column + tl.arange(0, COLUMNS)
        of_expert = bias + expert.to(tl.int64) * (P * N) + half * N
        return acc + tl.load(of_expert + c, mask=c < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _pre(
    pre,
    row,
    end,
    column,
    P: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """-> gate, up; the same where there is no gate half"""
    up = load_rows(pre, row, end, P - 1, column, P, N, ROWS, COLUMNS, False)
    if P == 1:
        return up, up
    else:
        return load_rows(pre, row, end, 0, column, P, N, ROWS, COLUMNS, False), up


@triton.jit
def _through_activation(
    d_h,
    ahead,
    scale,
    pre,
    d_pre,
    weighted_h,
    row,
    end,
    column,
    P: tl.constexpr,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    TMA: tl.constexpr,
):
    """Store scale * h and d_pre; -> <d_h, h> of each row, what the gate's gradient is made of.

    STEP columns at a time, from left to right, for each needs several registers. `ahead` is the
    pre-activation of the first STEP columns; that of the STEP columns to the right is returned.
    """
    if COLUMNS > STEP:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = d_h.reshape(ROWS, 2, HALF).permute(0, 2, 1).split()
        dot, ahead = _through_activation(
            left, ahead, scale, pre, d_pre, weighted_h, row, end, column,
            P, N, ACTIVATION, ROWS, HALF, STEP, TMA,
        )  # fmt: skip
        more, ahead = _through_activation(
            right, ahead, scale, pre, d_pre, weighted_h, row, end, column + HALF,
            P, N, ACTIVATION, ROWS, HALF, STEP, TMA,
        )  # fmt: skip
        return dot + more, ahead
    else:
        gate, up = ahead[0].to(tl.float32), ahead[1].to(tl.float32)
        ahead = _pre(pre, row, end, column + STEP, P, N, ROWS, STEP)
        h = activate(gate, up, ACTIVATION)
        inside = column + tl.arange(0, COLUMNS) < N
        dot = tl.sum(tl.where(inside[None, :], d_h * h, 0.0), axis=1)
        store_rows(weighted_h, scale * h, row, end, 0, column, 1, N, ROWS, COLUMNS, TMA)
        d_h *= scale
        by_gate, by_up = slopes(gate, up, ACTIVATION)
        if P == 2:
            store_rows(d_pre, d_h * by_gate, row, end, 0, column, P, N, ROWS, COLUMNS, TMA)
        store_rows(d_pre, d_h * by_up, row, end, P - 1, column, P, N, ROWS, COLUMNS, TMA)
        return dot, ahead
