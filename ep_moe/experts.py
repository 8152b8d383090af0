"""The local experts: gather, gate+up GEMM, activation, down GEMM, weighted sum, as ONE autograd
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
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ep_moe import ops
from ep_moe.config import MoEConfig
from ep_moe.exact import exact_gated, exact_linear
from ep_moe.kernels.device import leaving, left
from ep_moe.measure import in_stage
from ep_moe.parallel import ExpertParallel
from ep_moe.types import Arrived, Packed


class Experts(nn.Module):
    """The experts of this rank, E_loc = num_experts / ranks of them, as plain local parameters.

    w_gate_up (E_loc,2I,H), gate half first, or (E_loc,I,H) for an activation without one; w_down
    (E_loc,H,I); with config.mlp_bias b_gate_up (E_loc,2I) and b_down (E_loc,H). `global_ids` says
    which experts of the model they are.
    """

    def __init__(self, config: MoEConfig, ep: ExpertParallel) -> None:
        super().__init__()
        self.config, self.ep = config, ep
        self.global_ids = ep.local_experts(config.num_experts)
        e, h, i = len(self.global_ids), config.hidden_size, config.intermediate_size
        pre = config.pre_activation_size
        self.w_gate_up = nn.Parameter(torch.empty(e, pre, h))
        self.w_down = nn.Parameter(torch.empty(e, h, i))
        self.register_parameter("b_gate_up", None)
        self.register_parameter("b_down", None)
        if config.mlp_bias:
            self.b_gate_up = nn.Parameter(torch.empty(e, pre))
            self.b_down = nn.Parameter(torch.empty(e, h))
        # Each rank's loss is a mean over its tokens and ranks are averaged: an expert, which sees
        # the tokens of all ranks, would get the SUM of their gradients. This is the only place
        # where that is put right.
        self.grad_scale = 1 / ep.size if config.loss_reduction == "mean" else 1.0
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal with std 1/sqrt(inputs). One seed per global expert, drawn alike on all ranks that
        were seeded alike: a model has the same experts on any number of ranks."""
        device = self.w_gate_up.device
        if device.type == "meta":
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        for local, expert in enumerate(self.global_ids):
            generator = torch.Generator(device).manual_seed(seed + expert)
            for weight in (self.w_gate_up, self.w_down):
                weight[local].normal_(std=weight.shape[2] ** -0.5, generator=generator)
        for bias in (self.b_gate_up, self.b_down):
            if bias is not None:
                bias.zero_()

    def forward(self, arrived: Arrived, part: "Part | None" = None) -> Tensor:
        """Arrived rows (A,H) -> (A,H): for each row the gate-weighted sum over its experts that
        live here."""
        with in_stage("experts"):
            return _ExpertMLP.apply(
                arrived.rows,
                arrived.gate_weights,
                *(self._weights(arrived.rows.dtype) if part is None else part.weights),
                arrived.local_ids,
                arrived.max_packed,
                self.config,
                self.grad_scale,
                torch.is_grad_enabled(),
                part,
            )

    def in_parts(self, dtype: torch.dtype) -> Callable[[Arrived], Tensor]:
        """This layer for rows of that dtype that come in parts. The gradients of the weights are
        made when the backward has been through all parts, as products over the rows of all: those
        of a part would be written, and rounded, for each, and added."""
        factors: dict[int, _Factors] = {}
        weights = _WeightsOfParts.apply(
            factors, self.config, self.grad_scale, *self._weights(dtype)
        )
        numbers = count()
        return lambda arrived: self(arrived, Part(next(numbers), weights, factors))

    def _weights(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """In the dtype that rows have, under autocast not that of the parameters."""
        parameters = (self.w_gate_up, self.w_down, self.b_gate_up, self.b_down)
        return tuple(None if p is None else p.to(dtype) for p in parameters)


class SharedExperts(nn.Module):
    """The experts that every token meets: one dense MLP, replicated. w_gate_up (2J,H) or, without a
    gate half, (J,H); w_down (H,J); with shared_expert_gate w_gate (1,H)."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.activation, self.numerics = config.activation, config.numerics
        pre = config.pre_activation_size // config.intermediate_size * config.shared_size
        self.w_gate_up = nn.Parameter(torch.empty(pre, config.hidden_size))
        self.w_down = nn.Parameter(torch.empty(config.hidden_size, config.shared_size))
        self.register_parameter("w_gate", None)
        if config.shared_expert_gate:
            self.w_gate = nn.Parameter(torch.empty(1, config.hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(T,H) -> (T,H)"""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        linear = F.linear if self.numerics == "fast" else exact_linear
        hidden = ops.ACTIVATIONS[self.activation].forward(linear(x, self.w_gate_up))
        out = linear(hidden, self.w_down)
        if self.w_gate is None:
            return out
        gate = ops.sigmoid(linear(x, self.w_gate))
        return out * gate if self.numerics == "fast" else exact_gated(out, gate)


class _Factors(NamedTuple):
    """Of the products that are the gradients of the weights."""

    rows: Tensor  # (A,H)
    d_out: Tensor  # (A,H)
    gates: Tensor  # (A,K)
    local_ids: Tensor  # (A,K)
    d_pre: Tensor  # (S,P)
    weighted_h: Tensor  # (S,I)
    packed: Packed
    left: int  # multiprocessors, to moves beside the products


class Part(NamedTuple):
    """One of the parts that a call's rows come in; the rest of it is one object for all of them."""

    number: int
    weights: tuple[Tensor | None, ...]  # handles on them
    factors: dict[int, _Factors]  # of the parts that the backward has been through, by number


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
        part: Part | None,
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
        ctx.number, ctx.factors = (0, None) if part is None else (part.number, part.factors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        # Rows move beside the backward, too, which runs in a thread that was told nothing.
        with in_stage("experts_backward"), leaving(ctx.left):
            return (*_gradients(ctx, d_out), *[None] * 6)


class _WeightsOfParts(torch.autograd.Function):
    """Handles on the weights. Autograd comes back here after all parts, which give it nothing: the
    gradients arise here. What moves then are the first part's gradients, on their way home."""

    @staticmethod
    def forward(
        ctx: Any,
        factors: dict[int, _Factors],
        config: MoEConfig,
        grad_scale: float,
        *weights: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.factors, ctx.config, ctx.grad_scale = factors, config, grad_scale
        ctx.set_materialize_grads(False)  # zeros as large as the weights
        return tuple(None if weight is None else weight.detach() for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: None) -> tuple[Tensor | None, ...]:
        parts = [ctx.factors[number] for number in sorted(ctx.factors)]
        ctx.factors.clear()
        needs = ctx.needs_input_grad[3:]
        with in_stage("experts_backward"), leaving(parts[0].left):
            return (*[None] * 3, *_of_weights(_joined(parts), needs, ctx.config, ctx.grad_scale))


def _joined(parts: Sequence[_Factors]) -> _Factors:
    """As if the rows of all parts had arrived together."""
    columns = list(zip(*parts, strict=True))
    rows, d_out, gates, local_ids = map(torch.cat, columns[:4])
    *firsts, slots = accumulate((len(part.d_pre) for part in parts), initial=0)
    packed = ops.pack(local_ids, len(parts[0].packed.offsets) - 1, slots)
    # Where each packed row stands in those of the parts, laid end to end.
    before = [
        part.packed.packed_of_arrived + first for part, first in zip(parts, firsts, strict=True)
    ]
    index = torch.cat(before)[packed.arrived_of_packed, packed.choice_of_packed]
    d_pre, weighted_h = (like.new_empty(len(index), like.shape[1]) for like in parts[0][4:6])
    for part, first in zip(parts, firsts, strict=True):
        ops.gather(part.d_pre, index, packed.offsets, first=first, into=d_pre)
        ops.gather(part.weighted_h, index, packed.offsets, first=first, into=weighted_h)
    return _Factors(rows, d_out, gates, local_ids, d_pre, weighted_h, packed, parts[0].left)


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
    factors = _Factors(rows, d_out, gates, local_ids, grads.pre, grads.weighted_h, packed, ctx.left)
    # Of two products beside each other one would take the multiprocessors that the other leaves.
    second = None if ctx.left else ops.SecondStream(d_out.device)
    of_weights: list[Tensor | None] = [None] * 4
    if ctx.factors is None:
        with nullcontext() if second is None else second.launch():
            of_weights = _of_weights(factors, needs_weights, config, ctx.grad_scale)
    elif any(needs_weights):
        ctx.factors[ctx.number] = factors
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
    factors: _Factors, needs: Sequence[bool], config: MoEConfig, scale: float
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
