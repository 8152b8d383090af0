"""The router: logits from tokens, selection, and what is reported about it."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ep_moe import ops
from ep_moe.config import MoEConfig
from ep_moe.routing import balance
from ep_moe.routing.forced import forced_ids
from ep_moe.routing.selection import (
    dense_probabilities,
    gate_weights,
    sanitize,
    select_experts,
)
from ep_moe.types import Routing, RoutingStats


class Router(nn.Module):
    """Tokens to Routing and RoutingStats.

    weight (E,H); bias (E,) with router_bias; log_temperature () with learn_temperature; expert_bias
    (E,) fp32 buffer with config.expert_bias. It is replicated: every rank of an expert-parallel
    group holds the same one.
    """

    expert_bias: Tensor | None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_parameter("bias", None)
        if config.router_bias:
            self.bias = nn.Parameter(torch.empty(config.num_experts))
        self.register_parameter("log_temperature", None)
        if config.learn_temperature:
            self.log_temperature = nn.Parameter(torch.empty(()))
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.config.hidden_size**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        if self.log_temperature is not None:
            nn.init.constant_(self.log_temperature, math.log(self.config.temperature))
        if self.expert_bias is not None:
            nn.init.zeros_(self.expert_bias)

    def forward(self, x: Tensor, padding_mask: Tensor | None) -> tuple[Routing, RoutingStats]:
        """x (T,H), padding_mask (T,) bool or None, True = not a token"""
        return self.route(self.logits(x), padding_mask)

    def logits(self, x: Tensor) -> Tensor:
        """(T,H) -> (T,E) fp32 (fp64 for fp64 x), after bias and temperature"""
        logits = _Logits.apply(x, self.weight)
        if self.bias is not None:
            logits = logits + self.bias
        if self.log_temperature is not None:
            return logits / self.log_temperature.to(logits.dtype).exp()
        return logits if self.config.temperature == 1.0 else logits / self.config.temperature

    def route(self, logits: Tensor, padding_mask: Tensor | None) -> tuple[Routing, RoutingStats]:
        """Selection, losses and counts; no branch here depends on data, so every rank builds the
        same graph."""
        config = self.config
        if config.forced_routing == "none":
            routing = select_experts(
                logits, config, expert_bias=self.expert_bias, padding_mask=padding_mask
            )
        else:
            routing = _forced(logits, config, padding_mask)
        clean = sanitize(logits, config, padding_mask)
        is_token = None if padding_mask is None else ~padding_mask
        n = balance.count_tokens(routing.ids, config.num_experts)
        aux = z = clean.new_zeros(())
        if config.aux_loss_coef:
            p = dense_probabilities(clean, config)
            tokens = len(p)
            if is_token is not None:
                p, tokens = p * is_token[:, None], is_token.sum()
            aux = balance.aux_loss(p, n, top_k=config.top_k, num_tokens=tokens)
        if config.z_loss_coef:
            z = balance.z_loss(clean, is_token=is_token)
        return routing, RoutingStats(n, aux * config.aux_loss_coef, z * config.z_loss_coef)

    def _apply(self, fn: Any, recurse: bool = True) -> "Router":
        """`layer.bfloat16()` must leave the selection bias in fp32: +0.001 on 1.0 is nothing in
        bf16."""
        kept = self.expert_bias
        super()._apply(fn, recurse)
        if kept is not None and self.expert_bias is not None:
            moved = (
                self.expert_bias if kept.is_meta else kept
            )  # a meta tensor has no values to keep
            self.expert_bias = moved.to(self.expert_bias.device, torch.float32)
        return self


class _Logits(torch.autograd.Function):
    """ops.router_logits with its backward. It keeps x itself, not an fp32 copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with torch.autocast(x.device.type, enabled=False):  # which would make the product bf16
            return ops.router_logits(x, weight)

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        with torch.profiler.record_function("ep_moe.route_backward"):
            grads = ops.router_logits_backward(
                d_logits, x, weight, needs_x=needs_x, needs_weight=needs_weight
            )
        return grads.x, grads.weight


def _forced(logits: Tensor, config: MoEConfig, padding_mask: Tensor | None) -> Routing:
    """Forced ids with the weights that the logits give them, so that gradients flow as in a real
    run."""
    ids = forced_ids(len(logits), config, logits.device)
    weights = gate_weights(sanitize(logits, config, padding_mask), ids, config)
    if padding_mask is not None:
        ids = ids.masked_fill(padding_mask[:, None], -1)
        weights = weights.masked_fill(padding_mask[:, None], 0.0)
    return Routing(ids.int(), weights)
