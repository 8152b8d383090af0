"""DeepEP's low-latency path, of V1 and still in V2, as a transport for decode: few tokens, no
gradients.

A row goes out once for each of a token's experts, into a block of the expert that has room for
every token of every rank, and the token's own rank multiplies what comes back by the gate weights:
here gates stay at home. Widths that DeepEP compiles no kernel for are padded to the next one. No
host sync.

DeepEP has memory for two results, and the third is written over the first: arrived rows may be read
until the next dispatch of the group. What combine gives is in memory of its own.

Layers of a group share a buffer where they are alike. Where bound, width or experts differ the
parts of a buffer lie elsewhere, and a rank that is still reading would be overwritten by one that
is already at the next layer: such layers have buffers of their own.

Source: https://github.com/deepseek-ai/DeepEP, deep_ep/buffer.py and what is said of it there.
"""

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from ep_moe.dispatch import deepep_buffers as buffers
from ep_moe.dispatch.deepep_buffers import MAKING, MOVED, cut, padded
from ep_moe.dispatch.moves import agree, capturing, stage
from ep_moe.dispatch.needs import V1_RANKS
from ep_moe.dispatch.protocol import Caps, Sent
from ep_moe.errors import BackendUnavailable, ConfigError, InputError
from ep_moe.parallel import ExpertParallel
from ep_moe.types import Routing

WIDTHS = (2048, 2560, 4096, 5120, 6144, 7168, 8192)  # that its kernels are compiled for
WIDTHS_V2 = tuple(sorted((*WIDTHS, 3072)))
MOST_CHOICES = 11
DEPTH = "NVSHMEM_QP_DEPTH"  # of its send queues, in messages, of which a token takes two

log = logging.getLogger("ep_moe")


class Layout(NamedTuple):
    """What lies where in a buffer follows from it. bound: tokens of a rank."""

    bound: int
    columns: int
    experts: int


class Shared(NamedTuple):
    """Of a group: `deep_ep`, which was looked for once, and the buffers that it made."""

    library: ModuleType
    buffers: dict[Layout, Any]


@dataclass(frozen=True, eq=False)
class LowLatencyPlan:
    """local_ids   (A,1) int32 of E_loc * W * bound rows, an expert's together; -1 where none
                arrived.
    ids, gates  (T,K) of DeepEP's integers and fp32, of this rank's tokens.
    buffer, handle what DeepEP learned, and its buffer.
    max_packed  rows that may arrive.
    """

    local_ids: Tensor
    ids: Tensor
    gates: Tensor
    buffer: Any
    handle: Any
    max_packed: int
    call: int  # the number of this dispatch among those of its layer


class LowLatencyTransport:
    name: ClassVar[str] = "deepep_low_latency"
    caps: Caps = Caps(
        needs_group=True,
        max_ranks=max(V1_RANKS),
        # Rows of an expert arrive in any order, whatever is asked for. y does not show it: a row's
        # place does not change it, and combine adds in the order of the choices.
        deterministic=False,
        graphable=True,
        in_place=True,
        fixed_size=True,
        dtypes=(MOVED,),
        max_choices=MOST_CHOICES,
        backward=False,
        weighs=True,
    )
    sms: int = 0  # its kernels take as many as they like, and no work is beside them

    def __init__(self, ep: ExpertParallel, max_tokens_per_rank: int | None = None) -> None:
        assert max_tokens_per_rank is not None  # `make_transport` has seen to it
        if ep.size not in V1_RANKS:
            known = ", ".join(map(str, V1_RANKS))
            rule = f"another for {ep.size} rank(s), such as auto: this one serves {known}"
            raise ConfigError("transport", self.name, rule)
        self.ep, self.max_tokens = ep, max_tokens_per_rank
        self.bound = _bound(max_tokens_per_rank)
        self.layer, self.calls, self.agreed = next(ep.peers.layers), 0, False

    def __deepcopy__(self, _: dict[int, Any]) -> "LowLatencyTransport":
        return LowLatencyTransport(self.ep, self.max_tokens)  # of a layer of its own

    def dispatch(self, x: Tensor, routing: Routing, num_experts: int, *, keep: bool = True) -> Sent:
        """Raises BackendUnavailable where rows are to be kept, as for a backward."""
        if keep:
            self._no_backward()
        buffers.check_call(self.name, x, routing, tokens=self.max_tokens, choices=MOST_CHOICES)
        self.calls += 1
        self._agree()
        columns, buffer = self._buffer(x, num_experts)
        # Copies, for a plan outlives the call, and its ids and gates may not.
        library = self.ep.peers.shared[self.name].library
        ids_dtype = getattr(library, "topk_idx_t", torch.int64)  # of its build; v1 knows no other
        ids = routing.ids.to(ids_dtype, copy=True).contiguous()
        gates = routing.gate_weights.clone(memory_format=torch.contiguous_format)
        with self._move(self.calls, "rows out"):
            blocks, counts, handle, _, _ = buffer.low_latency_dispatch(
                padded(x, columns), ids, self.bound, num_experts, use_fp8=False
            )
        experts, room = blocks.shape[:2]
        expert = torch.arange(experts, dtype=torch.int32, device=x.device)
        arrived = torch.arange(room, device=x.device) < counts[:, None]
        local_ids = torch.where(arrived, expert[:, None], -1).view(-1, 1)
        most = room * min(ids.shape[1], experts)
        plan = LowLatencyPlan(local_ids, ids, gates, buffer, handle, most, self.calls)
        rows = cut(blocks.view(experts * room, -1), x.shape[1])
        return Sent(plan, rows, gates.new_ones(len(rows), 1))

    def combine(self, plan: LowLatencyPlan, rows: Tensor) -> Tensor:
        """(A,H) -> (T,H): the sum of a token's rows times its gate weights."""
        *_, columns, num_experts = plan.handle
        blocks = padded(rows, columns).view(num_experts // self.ep.size, -1, columns)
        y = rows.new_empty(len(plan.ids), columns)
        with self._move(plan.call, "rows back"):
            plan.buffer.low_latency_combine(blocks, plan.ids, plan.gates, plan.handle, out=y)
        return cut(y, rows.shape[1])

    def replay(self, plan: LowLatencyPlan, x: Tensor, *, keep: bool = True) -> NoReturn:
        self._no_backward()

    def replay_gates(self, plan: LowLatencyPlan, gates: Tensor) -> NoReturn:
        self._no_backward()

    def combine_gates(self, plan: LowLatencyPlan, gates: Tensor) -> NoReturn:
        self._no_backward()

    def _no_backward(self) -> NoReturn:
        raise BackendUnavailable(
            f"transport = {self.name!r} has no backward, so it runs with autograd off only: call "
            "the layer under torch.no_grad() or torch.inference_mode(), and layer.warmup(tokens, "
            "backward=False); to train, take symm, deepep, collective or auto"
        )

    def _move(self, call: int, what: str) -> AbstractContextManager[None]:
        if capturing():
            return nullcontext()
        return self.ep.waiting(stage(self.layer, call, what))

    def _agree(self) -> None:
        """In the first call: have all ranks been told the same?"""
        if self.agreed or capturing():
            return
        told = {"max_tokens_per_rank, as a power of two,": self.bound}
        agree(self.ep.peers, self.layer, told)
        self.agreed = True

    def _buffer(self, x: Tensor, num_experts: int) -> tuple[int, Any]:
        """The group's for this layout, and how wide its rows are. Every rank comes here alike, for
        it is with all of them that one is made."""
        shared: Shared | None = self.ep.peers.shared.get(self.name)
        if shared is None:
            self._refuse_capture()
            shared = Shared(buffers.load(self.name, self.ep.size, x.device), {})
            self.ep.peers.shared[self.name] = shared
        layout = Layout(self.bound, _width(x.shape[1], shared.library), num_experts)
        if layout not in shared.buffers:
            self._refuse_capture()
            shared.buffers[layout] = self._make(shared.library.Buffer, layout)
        return layout.columns, shared.buffers[layout]

    def _refuse_capture(self) -> None:
        if capturing():
            raise BackendUnavailable(
                f"transport = {self.name!r} cannot make its buffer while a CUDA graph is captured: "
                "run it before, or call layer.warmup(tokens, backward=False)"
            )

    def _make(self, kind: Any, layout: Layout) -> Any:
        bound, columns, experts = layout
        size = kind.get_low_latency_rdma_size_hint(bound, columns, self.ep.size, experts)
        log.info("transport %s: a buffer of %.3g GB, for %s", self.name, size / 1e9, layout)
        with self.ep.waiting(MAKING):
            return kind(
                self.ep.group,
                num_rdma_bytes=size,
                low_latency_mode=True,
                num_qps_per_rank=experts // self.ep.size,
                explicitly_destroy=True,  # its destructor would wait for the other ranks
            )


def _bound(most: int) -> int:
    """The power of two from `most` on, so that few sizes are compiled, or what its queues hold, if
    that is less; an even number, as it asks for."""
    messages = int(os.environ.get(DEPTH, "1024"))
    room = (messages // 2 - 1) // 2 * 2
    if most > room:
        raise ConfigError(
            "max_tokens_per_rank",
            most,
            f"at most {room} with transport = 'deepep_low_latency' (slots, if exact): its queues "
            f"hold {messages} messages. Set {DEPTH} to {2 * most + 4} or more, or take symm or "
            "deepep, which are for more tokens",
        )
    return min(max(2, 1 << (most - 1).bit_length()), room)


def _width(columns: int, library: ModuleType) -> int:
    """The least that DeepEP compiles and that has room for a row."""
    widths = WIDTHS_V2 if hasattr(library, "ElasticBuffer") else WIDTHS
    if columns > widths[-1]:
        rule = (
            f"at most {widths[-1]} with transport = 'deepep_low_latency', whose kernels are "
            "compiled for no more: take symm, deepep or collective"
        )
        raise InputError("hidden_size", columns, rule)
    return next(width for width in widths if width >= columns)
