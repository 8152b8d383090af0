"""The layer: route, dispatch, experts, combine."""

import contextvars
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ep_moe import check, ops
from ep_moe.config import MoEConfig
from ep_moe.dispatch import (
    Transport,
    combine,
    dispatch,
    dispatch_beside,
    make_transport,
    pipelined,
)
from ep_moe.errors import BackendUnavailable, ConfigError, InputError
from ep_moe.exact import split_slots, sum_slots
from ep_moe.experts import Experts, SharedExperts
from ep_moe.measure import in_stage
from ep_moe.parallel import ExpertParallel, Ranks
from ep_moe.replay import refuse_reentrant_checkpoint
from ep_moe.routing import Router
from ep_moe.types import Routing, RoutingStats

F = TypeVar("F", bound=Callable[..., Any])


def graph_break(function: F) -> F:
    """Code around it compiles; it is left alone, for its sizes are data. Keeps the signature for
    type checkers, which torch's own decorators do not.

    Not torch.compiler.disable, which imports torch._dynamo at once: half of the time that importing
    this package takes. This one, torch's own for its optimizers and DDP, imports it in a call.
    """
    return cast(F, _disable_dynamo(function))


class MoELayer(nn.Module):
    """An expert-parallel Mixture-of-Experts layer.

    ep = None (all experts here), a ProcessGroup or a DeviceMesh (its ranks share the experts; every
    rank must call the layer equally often, in the same order, and have y in its loss: `y.sum() *
    0` suffices). Give the experts a group of their own (`process.new_group()`, `dist.new_group()`)
    beside DistributedDataParallel(find_unused_parameters=True) on ranks that take different
    branches: within one group its all-reduce on one rank would meet an all-to-all of another.

    balance_over: the ranks over which the sequence and global losses and the bias update count, of
    a DeviceMesh all its ranks, whatever its dimensions; by default those of ep, replicas of the
    experts included. Give the whole data-parallel world when it is larger.

    Raises ConfigError when the experts do not divide among the ranks or the transport is unknown or
    cannot serve them.
    """

    def __init__(
        self,
        config: MoEConfig,
        ep: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        balance_over: dist.ProcessGroup | DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ep = ExpertParallel.resolve(ep)
        most = config.max_tokens_per_rank
        if most is not None and config.numerics == "exact":
            most *= config.top_k  # each slot travels as a token of its own
        if most is not None:
            most = -(-most // config.pipeline_chunks)  # of a part
        self.transport = make_transport(config.transport, self.ep, max_tokens_per_rank=most)
        _require_suitable(config, self.transport)
        balance = Ranks.resolve(self.ep if balance_over is None else balance_over)
        self.router = Router(config, reduce=balance.sum, num_ranks=balance.size)
        self.experts = Experts(config, self.ep)
        self.shared_experts = SharedExperts(config) if config.shared_size else None
        self._known_wrapper: weakref.ref[nn.Module] | None = None  # an id may come again

    @graph_break
    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, RoutingStats]:
        """x (..., H) in the dtype of the parameters, or any float under autocast; padding_mask
        (...) bool, True = padding, goes nowhere.

        Returns y of x's shape and the RoutingStats, whose losses the caller adds to its own
        (`total_aux`). y at padding is 0, from the shared experts too. Raises InputError for a
        wrong shape, dtype or device.
        """
        with torch.cuda.device_of(x):  # where Triton launches, whatever device is current
            return self._forward(x, padding_mask)

    def _forward(self, x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, RoutingStats]:
        x_TH, mask_T = self._flatten(x, padding_mask)
        refuse_reentrant_checkpoint()
        self._refuse_ddp_on_experts()
        with in_stage("route"):
            length = x.shape[-2] if x.ndim > 2 else None
            routing, stats = self.router(x_TH, mask_T, sequence_length=length)
        shared = None if self.shared_experts is None else partial(self._shared, x_TH)
        y_TH = _moe(x_TH, routing, self.experts, self.transport, shared)
        return y_TH.view(x.shape), stats

    def _shared(self, x_TH: Tensor) -> Tensor:
        with in_stage("shared"):
            return cast(SharedExperts, self.shared_experts)(x_TH)

    def warmup(self, *tokens: int, backward: bool = True) -> None:
        """Compile and allocate what calls with these numbers of tokens need, so that a CUDA graph
        of them can be captured next; without backward, what inference needs. Call it under the
        autocast of the capture, on every rank of `ep` and `balance_over` alike, and before FSDP
        wraps the layer. Parameters, gradients, counts, records of routing and random numbers stay
        as they are; hooks of parameters and of parts of the layer run.

        Raises BackendUnavailable inside a capture.
        """
        weight = self.experts.w_gate_up
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            raise BackendUnavailable(
                "layer.warmup() compiles and allocates, which the capture of a CUDA graph cannot "
                "hold: call it before"
            )
        counted = self.router.tokens_since_step
        call = partial(contextvars.Context().run, self._call)  # no tape, no record of routing
        try:
            with torch.random.fork_rng([weight.device] if weight.is_cuda else []):
                for number in tokens:
                    x = torch.randn(number, self.config.hidden_size).to(weight)
                    call(x, backward=backward)
        finally:
            self.router.tokens_since_step = counted

    def _call(self, x: Tensor, *, backward: bool) -> None:
        if backward:  # first: inference then makes do with what training has made
            with torch.inference_mode(False), torch.enable_grad():
                leaves = [x.clone().requires_grad_(), *self.parameters()]
                y, stats = self.forward(leaves[0])
                results = [y, stats.aux_loss, stats.z_loss]
                results = [result for result in results if result.requires_grad]
                wanted = [leaf for leaf in leaves if leaf.requires_grad]
                ones = [torch.ones_like(result) for result in results]
                torch.autograd.grad(results, wanted, ones, allow_unused=True)
        with torch.no_grad():
            self.forward(x)

    def _refuse_ddp_on_experts(self) -> None:
        """Once per wrapper: walking all parameters in each call would cost more than it."""
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is None or self.ep.size == 1 or self._is_known(wrapper):
            return
        mine = {id(parameter) for parameter in self.experts.parameters(recurse=False)}
        for name, parameter in wrapper.module.named_parameters():
            if id(parameter) in mine and name not in wrapper.parameters_to_ignore:
                raise ConfigError(
                    "DistributedDataParallel",
                    name,
                    "built after ep_moe.ddp_ignore(the module it wraps), and the experts set "
                    "again: it has overwritten them with those of another rank",
                )
        self._known_wrapper = weakref.ref(wrapper)

    def _is_known(self, wrapper: nn.Module) -> bool:
        return self._known_wrapper is not None and self._known_wrapper() is wrapper

    def _flatten(self, x: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(..., H) -> (T,H), with zeros at padding: its NaNs must not reach a weight gradient."""
        hidden = self.config.hidden_size
        if x.ndim < 1 or x.shape[-1] != hidden:
            raise InputError(
                "x", f"of shape {tuple(x.shape)}", f"(..., {hidden}): hidden_size last"
            )
        _require_same_device(x, self.experts)
        x_TH = x.reshape(-1, hidden)
        if padding_mask is None:
            return x_TH, None
        if padding_mask.dtype != torch.bool or padding_mask.shape != x.shape[:-1]:
            got = f"{padding_mask.dtype} of shape {tuple(padding_mask.shape)}"
            raise InputError("padding_mask", got, f"torch.bool of shape {tuple(x.shape[:-1])}")
        mask_T = padding_mask.reshape(-1)
        return x_TH.masked_fill(mask_T[:, None], 0.0), mask_T


@graph_break
def moe(x: Tensor, routing: Routing, experts: Experts, transport: Transport) -> Tensor:
    """The layer for callers with their own router: x (T,H), routing of T tokens -> y (T,H).

    `transport` comes from `make_transport(name, experts.ep)`. If x or the gate weights need a
    gradient on one rank, one of them must on every rank: without, a rank has no dispatch in its
    backward, and the others wait for it. Checks the routing; its ids on a CPU,
    with a transport that waits for the device anyway, and with EP_MOE_CHECK=1. Otherwise an id that
    is no expert stops the GPU (a device-side assertion).
    """
    if x.ndim != 2 or x.shape[1] != experts.config.hidden_size:
        rule = f"(tokens, {experts.config.hidden_size})"
        raise InputError("x", f"of shape {tuple(x.shape)}", rule)
    _require_same_device(x, experts)
    _require_suitable(experts.config, transport)
    look = not (x.is_cuda and transport.caps.graphable) or check.wanted()
    if routing.ids.device != x.device:
        raise InputError("routing.ids", f"on {routing.ids.device}", f"on {x.device}, as x")
    routing.validate(len(x), experts.config.num_experts, values=look)
    with torch.cuda.device_of(x):
        return _moe(x, routing, experts, transport)


def _moe(
    x: Tensor,
    routing: Routing,
    experts: Experts,
    transport: Transport,
    shared: Callable[[], Tensor] | None = None,
) -> Tensor:
    """shared: gives more of y, and rows may travel while it does."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        _require_graphable(x, transport)
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))  # the experts' weights follow
    elif x.dtype != experts.w_gate_up.dtype:
        rule = (
            f"{experts.w_gate_up.dtype}, as the expert parameters: cast x, or the layer with .to()"
        )
        raise InputError("x", x.dtype, rule)
    config, far = experts.config, transport.caps.max_ranks != 1
    exact, gate_on = config.numerics == "exact", config.gate_on
    sent, sent_routing = split_slots(x, routing, gate_on=gate_on) if exact else (x, routing)
    to = (sent, sent_routing, config.num_experts, transport)
    overlap = config.shared_expert_overlap and far
    if config.pipeline_chunks > 1 and far:
        _require_room(x, config, transport)
        beside = shared if overlap else None
        work = experts.in_parts()
        y, shared_y = pipelined(*to, work, chunks=config.pipeline_chunks, beside=beside)
        if shared is not None and beside is None:
            shared_y = shared()
    else:
        if shared is None:
            arrived, shared_y = dispatch(*to), None
        elif overlap:
            arrived, shared_y = dispatch_beside(*to, shared)
        else:
            arrived, shared_y = dispatch(*to), shared()
        y = combine(experts(arrived), arrived.plan, transport)
    if exact:
        y = sum_slots(y, routing, gate_on=gate_on)
    return y if shared_y is None else y + shared_y


def _require_same_device(x: Tensor, experts: Experts) -> None:
    """Kernels take addresses as they are."""
    if x.device != experts.w_gate_up.device:
        rule = f"on {experts.w_gate_up.device}, as the expert parameters: move x, or the layer"
        raise InputError("x", f"on {x.device}", rule)


def _require_suitable(config: MoEConfig, transport: Transport) -> None:
    if config.pipeline_chunks > 1 and not transport.caps.backward:
        rule = (
            f"1 with transport = {transport.name!r}, which is for calls of few tokens and has room "
            "for one: to pipeline take symm, deepep, collective or auto"
        )
        raise ConfigError("pipeline_chunks", config.pipeline_chunks, rule)
    if transport.caps.weighs and config.gate_on == "input":
        rule = (
            f"output with transport = {transport.name!r}, which multiplies by the gate weights at "
            "the token's own rank: for gates on the experts' inputs take another transport"
        )
        raise ConfigError("gate_on", config.gate_on, rule)


def _require_room(x: Tensor, config: MoEConfig, transport: Transport) -> None:
    """In words of the whole call: buffers of a fixed size have room for a part of it."""
    most = config.max_tokens_per_rank
    if transport.caps.fixed_size and most is not None and len(x) > most:
        rule = f"of at most max_tokens_per_rank = {most} tokens"
        raise InputError("x", f"of {len(x)}", rule)


def _require_graphable(x: Tensor, transport: Transport) -> None:
    if transport.caps.graphable and ops.served_by_kernel(x):
        return
    what = f"transport = {transport.name!r}" if not transport.caps.graphable else f"{x.dtype}"
    raise BackendUnavailable(
        f"with {what} an ep_moe layer cannot be captured in a CUDA graph: it reads sizes on the "
        "host. Capture the parts around it, or a layer on one rank in bfloat16, float16 or float32"
    )
