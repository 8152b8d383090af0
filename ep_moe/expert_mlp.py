"""The expert MLP: gather, gate+up GEMM, activation, down GEMM, weighted sum, as ONE autograd
function.

One function, because its backward needs less than the sum of its parts: the gate gradient of a
packed row is <d_h without the gate, h> (+ <d_out, bias>), so the down projection's output is never
kept. It saves the arrived rows and gates, the pre-activation (unless it is to be computed again),
the weights and indices. Never sees where a row came from.

Rows that come in parts are so many calls of it, and the gradients of the weights still made once.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate, count
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ep_moe import ops
from ep_moe.config import MoEConfig
from ep_moe.kernels.device import leaving, left
from ep_moe.measure import in_stage
from ep_moe.types import Arrived, Packed


class Weights(NamedTuple):
    """Of the E_loc experts here, in the dtype of the rows; P = 2I with a gate half, else I."""

    w_gate_up: Tensor  # (E_loc,P,H)
    w_down: Tensor  # (E_loc,H,I)
    b_gate_up: Tensor | None  # (E_loc,P)
    b_down: Tensor | None  # (E_loc,H)


class Factors(NamedTuple):
    """Of the products that are the gradients of the weights."""

    rows: Tensor  # (A,H)
    d_out: Tensor  # (A,H)
    gates: Tensor  # (A,K)
    local_ids: Tensor  # (A,K)
    d_pre: Tensor  # (S,P)
    weighted_h: Tensor  # (S,I)
    packed: Packed


class Parts:
    """What the parts of one call have in common: handles on the weights, and the factors of those
    parts that the backward has been through, by number. A backward goes through all or none; one
    that does not ask for the weights leaves the factors to the graph, which it is not told."""

    def __init__(self) -> None:
        self.numbers = count()
        self.weights: Weights | None = None
        self.factors: dict[int, Factors] = {}

    def shared(self, weights: Callable[[], Weights], config: MoEConfig, scale: float) -> Weights:
        """Handles on what `weights` gives to the first part that asks."""
        if self.weights is None:
            handles = _WeightsOfParts.apply(self.factors, config, scale, *weights())
            self.weights = Weights(*handles)
        return self.weights


def expert_mlp(
    arrived: Arrived,
    weights: Callable[[], Weights],
    config: MoEConfig,
    grad_scale: float,
    parts: Parts | None = None,
) -> Tensor:
    """Arrived rows (A,H) -> (A,H). The gradients of the weights are multiplied by grad_scale."""
    return _ExpertMLP.apply(
        arrived.rows,
        arrived.gate_weights,
        *(weights() if parts is None else parts.shared(weights, config, grad_scale)),
        arrived.local_ids,
        arrived.max_packed,
        config,
        grad_scale,
        torch.is_grad_enabled(),
        None if parts is None else (next(parts.numbers), parts.factors),
    )


class _ExpertMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        gates: Tensor,
        w_gate_up: Tensor,
        w_down: Tensor,
        b_gate_up: Tensor | None,
        b_down: Tensor | None,
        local_ids: Tensor,
        max_packed: int | None,
        config: MoEConfig,
        grad_scale: float,
        keep: bool,
        part: tuple[int, dict[int, Factors]] | None,
    ) -> Tensor:
        with in_stage("permute"):
            packed = ops.pack(local_ids, len(w_gate_up), max_packed)
        keep = keep and config.experts_keep == "pre_activation"
        hidden = _hidden(rows, gates, w_gate_up, b_gate_up, packed, config, keep=keep)
        y = ops.grouped_gemm(hidden.h, w_down, packed.offsets, b_down, numerics=config.numerics)
        with in_stage("permute"):
            out_gates = gates if config.gate_on == "output" else None
            out = ops.weighted_sum(y, out_gates, packed.packed_of_arrived)
        weights = (w_gate_up, w_down, b_gate_up, b_down)
        indices = (
            packed.arrived_of_packed,
            packed.choice_of_packed,
            packed.packed_of_arrived,
            packed.offsets,
        )
        ctx.save_for_backward(rows, gates, local_ids, hidden.pre, *weights, *indices)
        ctx.config, ctx.grad_scale, ctx.left = config, grad_scale, left()
        ctx.part = part
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        # Rows move beside the backward, too, which runs in a thread that was told nothing.
        with in_stage("experts_backward"), leaving(ctx.left):
            return (*_gradients(ctx, d_out), *[None] * 6)


class _WeightsOfParts(torch.autograd.Function):
    """Handles on the weights. Autograd comes back here after all parts, which give it nothing: the
    gradients arise here. On the stream of the parts, for nothing else orders them after those."""

    @staticmethod
    def forward(
        ctx: Any,
        factors: dict[int, Factors],
        config: MoEConfig,
        grad_scale: float,
        *weights: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.factors, ctx.config, ctx.grad_scale, ctx.left = factors, config, grad_scale, left()
        ctx.set_materialize_grads(False)  # zeros as large as the weights
        return tuple(None if weight is None else weight.detach() for weight in weights)

    @staticmethod
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        # No gradient comes that would tell whether a second derivative is wanted.
        return _of_all_parts(ctx, torch.empty(0, requires_grad=torch.is_grad_enabled()))


@once_differentiable
def _of_all_parts(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad[3:]
    with in_stage("experts_backward"), leaving(ctx.left):
        return (*[None] * 3, *_of_weights(_joined(ctx.factors), needs, ctx.config, ctx.grad_scale))


def _joined(of_parts: dict[int, Factors]) -> Factors:
    """As if the rows of all parts had arrived together. Takes theirs out of the dict."""
    parts = [of_parts.pop(number) for number in sorted(of_parts)]
    local_ids = torch.cat([part.local_ids for part in parts])
    *firsts, slots = accumulate((len(part.d_pre) for part in parts), initial=0)
    packed = ops.pack(local_ids, len(parts[0].packed.offsets) - 1, slots)
    # Where each packed row stands in those of the parts, laid end to end.
    before = [
        part.packed.packed_of_arrived + first for part, first in zip(parts, firsts, strict=True)
    ]
    index = torch.cat(before)[packed.arrived_of_packed, packed.choice_of_packed]

    def reordered(pieces: list[Tensor]) -> Tensor:
        whole = pieces[0].new_empty(len(index), pieces[0].shape[1])
        for piece, first in zip(pieces, firsts, strict=True):
            ops.gather(piece, index, packed.offsets, first=first, into=whole)
        return whole

    return Factors(
        rows=torch.cat([part.rows for part in parts]),
        d_out=torch.cat([part.d_out for part in parts]),
        gates=torch.cat([part.gates for part in parts]),
        local_ids=local_ids,
        d_pre=reordered([part.d_pre for part in parts]),
        weighted_h=reordered([part.weighted_h for part in parts]),
        packed=packed,
    )


def _hidden(
    rows: Tensor,
    gates: Tensor,
    w_gate_up: Tensor,
    b_gate_up: Tensor | None,
    packed: Packed,
    config: MoEConfig,
    *,
    keep: bool,
) -> ops.Hidden:
    return ops.hidden(
        rows,
        w_gate_up,
        packed,
        b_gate_up,
        gates=gates if config.gate_on == "input" else None,
        activation=config.activation,
        keep=keep,
        numerics=config.numerics,
    )


def _gradients(ctx: Any, d_out: Tensor) -> list[Tensor | None]:
    """Of rows, gates, w_gate_up, w_down, b_gate_up and b_down, each only where it is needed."""
    config, numerics = ctx.config, ctx.config.numerics
    rows, gates, local_ids, pre, w_gate_up, w_down, b_gate_up, b_down, *indices = ctx.saved_tensors
    packed = Packed(*indices)
    needs_rows, needs_gates, *needs_weights = ctx.needs_input_grad[:6]
    on_output = config.gate_on == "output"

    if pre is None:
        again = _hidden(rows, gates, w_gate_up, b_gate_up, packed, config, keep=True)
        pre = cast(Tensor, again.pre)
    grads = ops.hidden_backward(
        d_out,
        w_down,
        packed,
        pre,
        b_down,
        gates=gates if on_output else None,
        activation=config.activation,
        numerics=numerics,
    )
    factors = Factors(rows, d_out, gates, local_ids, grads.pre, grads.weighted_h, packed)
    # Of two products beside each other one would take the multiprocessors that the other leaves.
    second = None if ctx.left or ctx.part is not None else ops.SecondStream(d_out.device)
    of_weights: list[Tensor | None] = [None] * 4
    if ctx.part is None:
        with nullcontext() if second is None else second.launch():
            of_weights = _of_weights(factors, needs_weights, config, ctx.grad_scale)
    elif any(needs_weights):
        number, of_parts = ctx.part
        # With create_graph d_out knows the way here, and would be a cycle.
        of_parts[number] = factors._replace(d_out=d_out.detach())
    d_rows, d_gates = None, grads.gate
    if needs_rows or (needs_gates and not on_output):
        d_packed = ops.grouped_gemm_dgrad(grads.pre, w_gate_up, packed.offsets, numerics=numerics)
        with in_stage("permute_backward"):
            if needs_rows:
                sent_on = None if on_output else gates
                d_rows = ops.weighted_sum(d_packed, sent_on, packed.packed_of_arrived)
            if not on_output:
                packed_rows = ops.gather(rows, packed.arrived_of_packed, packed.offsets)
                d_gate = ops.row_dot(d_packed, packed_rows, numerics=numerics)
                d_gates = ops.of_choice(d_gate, packed)
    if d_gates is not None:
        d_gates = d_gates.to(gates.dtype) if needs_gates else None
    if second is not None:
        second.join()
    return [d_rows, d_gates, *of_weights]


def _of_weights(
    factors: Factors, needs: Sequence[bool], config: MoEConfig, scale: float
) -> list[Tensor | None]:
    """Gradients of w_gate_up, w_down, b_gate_up and b_down."""
    index, offsets = factors.packed.arrived_of_packed, factors.packed.offsets
    needs_gate_up, needs_down, needs_b_gate_up, needs_b_down = needs
    on_output, numerics = config.gate_on == "output", config.numerics
    d_w_gate_up = d_w_down = d_b_gate_up = d_b_down = gate = None
    if needs_b_down or not on_output:
        gate = ops.gate_of_packed(factors.gates, factors.packed)
    if needs_down:
        d_w_down = ops.grouped_gemm_wgrad(
            factors.d_out,
            factors.weighted_h,
            offsets,
            arrived_of_packed=index,
            gathered="d_y",
            scale=scale,
            numerics=numerics,
        )
    if needs_b_down:
        d_b_down = ops.grouped_bias_grad(
            factors.d_out,
            offsets,
            arrived_of_packed=index,
            gate_of_packed=gate if on_output else None,
            scale=scale,
        )
    if needs_b_gate_up:
        d_b_gate_up = ops.grouped_bias_grad(factors.d_pre, offsets, scale=scale)
    if needs_gate_up:
        d_w_gate_up = ops.grouped_gemm_wgrad(
            factors.d_pre if gate is None or on_output else ops.gated(factors.d_pre, gate),
            factors.rows,
            offsets,
            arrived_of_packed=index,
            gathered="x",
            scale=scale,
            numerics=numerics,
        )
    return [d_w_gate_up, d_w_down, d_b_gate_up, d_b_down]
