"""The experts as modules: those that live on this rank, and those that every token meets."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ep_moe import ops
from ep_moe.config import MoEConfig
from ep_moe.exact import exact_gated, exact_linear
from ep_moe.expert_mlp import Parts, Weights, expert_mlp
from ep_moe.measure import in_stage
from ep_moe.parallel import ExpertParallel
from ep_moe.types import Arrived


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

    def forward(self, arrived: Arrived, parts: Parts | None = None) -> Tensor:
        """Arrived rows (A,H) -> (A,H): for each row the gate-weighted sum over its experts that
        live here."""
        weights = partial(self._weights, arrived.rows.dtype)
        with in_stage("experts"):
            return expert_mlp(arrived, weights, self.config, self.grad_scale, parts)

    def in_parts(self) -> Callable[[Arrived], Tensor]:
        """This layer for a call's rows that come in parts. The gradients of the weights are made
        when the backward has been through all parts, as products over the rows of all: those of a
        part would be written, and rounded, for each, and added. One backward goes through all."""
        parts = Parts()
        return lambda arrived: self(arrived, parts)

    def _weights(self, dtype: torch.dtype) -> Weights:
        """In the dtype that rows have, under autocast not that of the parameters."""
        return Weights(
            self.w_gate_up.to(dtype),
            self.w_down.to(dtype),
            None if self.b_gate_up is None else self.b_gate_up.to(dtype),
            None if self.b_down is None else self.b_down.to(dtype),
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
