"""The router: logits from tokens, selection, and what is reported about it."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ep_moe import ops
from ep_moe.config import MoEConfig
from ep_moe.errors import InputError
from ep_moe.measure import in_stage
from ep_moe.replay import in_backward, once, recorded
from ep_moe.routing import balance
from ep_moe.routing.forced import ForcedRouting
from ep_moe.routing.selection import select
from ep_moe.types import Routing, RoutingStats


class Router(nn.Module):
    """Tokens to Routing and RoutingStats.

    weight (E,H); bias (E,) with router_bias; log_temperature () with learn_temperature; expert_bias
    (E,) fp32 buffer with config.expert_bias. It is replicated: every rank of an expert-parallel
    group holds the same one.
    """

    expert_bias: Tensor | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        reduce: Callable[[Tensor], Tensor] = torch.clone,
        num_ranks: int = 1,
    ) -> None:
        super().__init__()
        self.config, self.reduce, self.num_ranks = config, reduce, num_ranks
        self.forced = None if config.forced_routing == "none" else ForcedRouting(config)
        # This rank's counts since the last optimizer step; kept once `balance_hook` is there to
        # clear them. Not a buffer: DDP would overwrite one rank's with another's.
        self.counting = False
        self.tokens_since_step: Tensor | None = None
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

    def forward(
        self, x: Tensor, padding_mask: Tensor | None, *, sequence_length: int | None = None
    ) -> tuple[Routing, RoutingStats]:
        """x (T,H); padding_mask (T,) bool or None, True = not a token; sequence_length: T is a
        number of sequences of that length (for aux_loss_scope sequence), by default one sequence"""
        return self.route(self.logits(x), padding_mask, sequence_length=sequence_length)

    def logits(self, x: Tensor) -> Tensor:
        """(T,H) -> (T,E) fp32 (fp64 for fp64 x), after bias and temperature"""
        logits = _Logits.apply(x, self.weight, self.config.numerics)
        if self.bias is not None:
            logits = logits + self.bias
        if self.log_temperature is not None:
            return logits / self.log_temperature.to(logits.dtype).exp()
        return logits if self.config.temperature == 1.0 else logits / self.config.temperature

    def route(
        self, logits: Tensor, padding_mask: Tensor | None, *, sequence_length: int | None = None
    ) -> tuple[Routing, RoutingStats]:
        """Selection, losses and counts; no branch here depends on data, so every rank builds the
        same graph."""
        config = self.config
        shape, device = (len(logits), config.top_k), logits.device
        length = max(len(logits) if sequence_length is None else sequence_length, 1)
        if len(logits) % length:
            rule = f"a divisor of the number of tokens, which is {len(logits)}"
            raise InputError("sequence_length", sequence_length, rule)
        segments = len(logits) // length if config.aux_loss_scope == "sequence" else 1
        choice, routing, p_sum, z_sum = select(
            logits,
            config,
            expert_bias=self.expert_bias,
            padding_mask=padding_mask,
            segments=segments if config.aux_loss_coef or config.z_loss_coef else None,
            forced=self.forced.ids(len(logits), device) if self.forced else None,
            decide=lambda choose: once(lambda: recorded(choose, shape, config.num_experts, device)),
        )
        n = balance.count_tokens(choice.wanted, config.num_experts)
        self._count(n)
        aux = z = None
        if config.aux_loss_coef and p_sum is not None:
            aux = self._aux_loss(p_sum, choice.wanted, n)
        if config.z_loss_coef and z_sum is not None:
            z = z_sum.sum() / self._tokens(n).clamp_min(1) * config.z_loss_coef
        dropped = n.sum() - choice.kept.sum() if choice.may_drop else n.new_zeros(())

        def or_zero(loss: Tensor | None) -> Tensor:
            dtype = routing.gate_weights.dtype
            return logits.new_zeros((), dtype=dtype) if loss is None else loss

        return routing, RoutingStats(n, dropped, or_zero(aux), or_zero(z))

    def _tokens(self, n: Tensor) -> Tensor:
        """Each has so many choices, before any is dropped."""
        return n.sum() // self.config.top_k

    def _count(self, n: Tensor) -> None:
        """Not in evaluation, and not a second time when a checkpoint recomputes."""
        if self.counting and self.training and torch.is_grad_enabled() and not in_backward():
            before = 0 if self.tokens_since_step is None else self.tokens_since_step.to(n.device)
            self.tokens_since_step = before + n

    def _aux_loss(self, p_sum: Tensor, wanted: Tensor, n: Tensor) -> Tensor:
        if self.config.aux_loss_scope == "sequence":
            return self._sequence(p_sum, wanted)
        if self.config.aux_loss_scope == "global":
            return self._global(p_sum, n)
        return self._load_loss(p_sum.squeeze(0), n)

    def _load_loss(self, p_sum: Tensor, n: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        top_k, scale = self.config.top_k, self.config.aux_loss_coef
        return balance.load_loss(p_sum, n, top_k=top_k, scale=scale, num_tokens=num_tokens)

    def _sequence(self, p_sum: Tensor, wanted: Tensor) -> Tensor:
        """Balance within each sequence; sum over this rank's, times ranks / all ranks' sequences:
        the mean over ranks depends neither on their number nor on micro-batching."""
        length = len(wanted) // max(len(p_sum), 1)
        wanted_BLK = wanted.view(len(p_sum), length, wanted.shape[1])
        per_sequence = self._load_loss(
            p_sum, balance.count_tokens(wanted_BLK, self.config.num_experts)
        )
        sequences = (wanted_BLK[..., 0] >= 0).any(dim=1).sum()
        all_sequences = once(lambda: self.reduce(sequences)).clamp_min(1)
        return per_sequence.sum() * self.num_ranks / all_sequences

    def _global(self, p_sum: Tensor, n: Tensor) -> Tensor:
        """Balance over all ranks and, when counting, the accumulation steps so far; the mean of the
        ranks' values is the global loss, for uneven and empty ranks too. Evaluation between two
        steps is no part of them."""
        so_far = self.tokens_since_step if self.training and torch.is_grad_enabled() else None
        counted = n if so_far is None else so_far
        local = torch.cat([counted, self._tokens(n)[None]])
        total = once(lambda: self.reduce(local))
        loss = self._load_loss(p_sum.squeeze(0), total[:-1], total[-1])
        return loss * self.num_ranks

    def _apply(self, fn: Any, recurse: bool = True) -> "Router":
        """`layer.bfloat16()` must leave the selection bias in fp32: +0.001 on 1.0 is nothing in
        bf16."""
        kept = self.expert_bias
        super()._apply(fn, recurse)
        if kept is not None and self.expert_bias is not None:
            # A meta tensor has no values to keep.
            moved = self.expert_bias if kept.is_meta else kept
            self.expert_bias = moved.to(self.expert_bias.device, torch.float32)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """`load_state_dict(assign=True)` takes the tensor of the file, whatever its dtype."""
        super()._load_from_state_dict(*args)
        if self.expert_bias is not None:
            self.expert_bias = self.expert_bias.float()


class _Logits(torch.autograd.Function):
    """ops.router_logits with its backward. It keeps x itself, not an fp32 copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, numerics: ops.Numerics) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.numerics = numerics
        with torch.autocast(x.device.type, enabled=False):  # which would make the product bf16
            return ops.router_logits(x, weight, numerics=numerics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        with (
            in_stage("route_backward"),
            torch.autocast(x.device.type, enabled=False),
        ):
            grads = ops.router_logits_backward(
                d_logits,
                x,
                weight,
                needs_x=needs_x,
                needs_weight=needs_weight,
                numerics=ctx.numerics,
            )
        return grads.x, grads.weight, None
