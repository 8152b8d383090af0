"""The local experts: gather, gate+up GEMM, activation, down GEMM, weighted sum, as ONE autograd
function.

One function, because its backward needs less than the sum of its parts: the gate gradient of a
packed row is <d_h without the gate, h> (+ <d_out, bias>), so the down projection's output is never
kept. It saves the arrived rows and gates, the pre-activation, the weights and indices. Never sees
where a row came from.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ep_moe import ops
from ep_moe.config import MoEConfig
from ep_moe.exact import exact_gated, exact_linear
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

    def forward(self, arrived: Arrived) -> Tensor:
        """Arrived rows (A,H) -> (A,H): for each row the gate-weighted sum over its experts that
        live here."""
        parameters = (self.w_gate_up, self.w_down, self.b_gate_up, self.b_down)
        with torch.profiler.record_function("ep_moe.experts"):
            return _ExpertMLP.apply(
                arrived.rows,
                arrived.gate_weights,
                *(p if p is None else p.to(arrived.rows.dtype) for p in parameters),  # autocast
                arrived.local_ids,
                self.config.activation,
                self.config.gate_on,
                self.grad_scale,
                self.config.numerics,
            )


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
        activation: str,
        gate_on: str,
        grad_scale: float,
        numerics: ops.Numerics,
    ) -> Tensor:
        with torch.profiler.record_function("ep_moe.permute"):
            packed = ops.pack(local_ids, len(w_gate_up))
            packed_rows = ops.gather(rows, packed.arrived_of_packed)
            if gate_on == "input":
                packed_rows = _gated(packed_rows, _gate_of_packed(gates, packed))
        offsets = packed.offsets
        pre = ops.grouped_gemm(packed_rows, w_gate_up, offsets, b_gate_up, numerics=numerics)
        h = ops.ACTIVATIONS[activation].forward(pre)
        y = ops.grouped_gemm(h, w_down, offsets, b_down, numerics=numerics)
        with torch.profiler.record_function("ep_moe.permute"):
            out_gates = gates if gate_on == "output" else None
            out = ops.weighted_sum(y, out_gates, packed.packed_of_arrived)
        indices = (
            packed.arrived_of_packed,
            packed.choice_of_packed,
            packed.packed_of_arrived,
            packed.offsets,
        )
        ctx.save_for_backward(rows, gates, pre, w_gate_up, w_down, b_down, *indices)
        ctx.activation = activation
        ctx.gate_on, ctx.grad_scale, ctx.numerics = gate_on, grad_scale, numerics
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        rows, gates, pre, w_gate_up, w_down, b_down, *indices = ctx.saved_tensors
        arrived_of_packed, choice_of_packed, packed_of_arrived, offsets = indices
        packed = Packed(
            arrived_of_packed=arrived_of_packed,
            choice_of_packed=choice_of_packed,
            packed_of_arrived=packed_of_arrived,
            offsets=offsets,
        )
        needs_rows, needs_gates, needs_gate_up, needs_down, needs_b_gate_up, needs_b_down = (
            ctx.needs_input_grad[:6]
        )
        scale = ctx.grad_scale
        activation, on_output = ops.ACTIVATIONS[ctx.activation], ctx.gate_on == "output"
        d_rows = d_gates = None
        d_w_gate_up = d_w_down = d_b_gate_up = d_b_down = None

        with torch.profiler.record_function("ep_moe.experts_backward"):
            with torch.profiler.record_function("ep_moe.permute_backward"):
                d_out_packed = ops.gather(d_out, packed.arrived_of_packed)
                gate = _gate_of_packed(gates, packed)
            h = activation.forward(pre)
            d_h = ops.grouped_gemm_dgrad(d_out_packed, w_down, offsets, numerics=ctx.numerics)
            d_h = d_h.to(torch.promote_types(gate.dtype, h.dtype))
            d_y = d_out_packed
            if on_output:
                # From d_h before the gate: y itself was never kept.
                d_gate = ops.row_dot(d_h, h.to(d_h.dtype), numerics=ctx.numerics)
                if b_down is not None:
                    bias = b_down[_expert_of_packed(offsets, len(h))]
                    d_gate += ops.row_dot(d_out_packed, bias, numerics=ctx.numerics)
                d_y, d_h = _gated(d_y, gate), gate * d_h
            if needs_down:
                d_w_down = ops.grouped_gemm_wgrad(
                    d_y, h, offsets, scale=scale, numerics=ctx.numerics
                )
            if needs_b_down:
                d_b_down = ops.grouped_bias_grad(d_y, offsets, scale=scale)
            d_pre = activation.backward(d_h, pre)
            if needs_b_gate_up:
                d_b_gate_up = ops.grouped_bias_grad(d_pre, offsets, scale=scale)
            if needs_gate_up or not on_output:
                with torch.profiler.record_function("ep_moe.permute_backward"):
                    packed_rows = ops.gather(rows, packed.arrived_of_packed)
            if needs_gate_up:
                seen = packed_rows if on_output else _gated(packed_rows, gate)
                d_w_gate_up = ops.grouped_gemm_wgrad(
                    d_pre, seen, offsets, scale=scale, numerics=ctx.numerics
                )
            if needs_rows or (needs_gates and not on_output):
                d_packed = ops.grouped_gemm_dgrad(d_pre, w_gate_up, offsets, numerics=ctx.numerics)
                if not on_output:
                    d_gate = ops.row_dot(d_packed, packed_rows, numerics=ctx.numerics)
                if needs_rows:
                    with torch.profiler.record_function("ep_moe.permute_backward"):
                        if on_output:
                            d_rows = ops.gather_backward(d_packed, packed_of_arrived)
                        else:
                            d_rows = ops.weighted_sum(d_packed, gates, packed_of_arrived)
            if needs_gates:
                with torch.profiler.record_function("ep_moe.permute_backward"):
                    d_gates = torch.zeros_like(gates)
                    d_gates[packed.arrived_of_packed, packed.choice_of_packed] = d_gate.to(
                        gates.dtype
                    )
        return d_rows, d_gates, d_w_gate_up, d_w_down, d_b_gate_up, d_b_down, *[None] * 5


def _gate_of_packed(gates: Tensor, packed: Packed) -> Tensor:
    """(A,K) -> (S,1)"""
    return gates[packed.arrived_of_packed, packed.choice_of_packed][:, None]


def _gated(rows: Tensor, gate: Tensor) -> Tensor:
    """The product in the gate's precision, rounded once.  (S,H), (S,1) -> (S,H)"""
    return (gate * rows).to(rows.dtype)


def _expert_of_packed(offsets: Tensor, num_rows: int) -> Tensor:
    """offsets [0,2,2,5] -> [0,0,2,2,2]"""
    rows = torch.arange(num_rows, device=offsets.device)
    return torch.searchsorted(offsets[1:].long(), rows, right=True)
