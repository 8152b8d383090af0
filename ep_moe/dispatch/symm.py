"""Our own transport for GPUs that reach each other's memory, such as those of one host on NVLink:
each rank writes rows where its peers will find them (`ep_moe.kernels.symm`). No host sync: buffers
have a fixed size, `max_tokens_per_rank` for each rank, and sizes stay on the device.

All layers of a group share one window of memory, as large as the largest of them needs.
"""

import os
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import check, ops
from ep_moe.dispatch.protocol import Caps, Sent
from ep_moe.errors import BackendUnavailable, ConfigError, DispatchTimeout, InputError
from ep_moe.parallel import ExpertParallel
from ep_moe.replay import in_backward
from ep_moe.types import Routing


@dataclass(frozen=True, eq=False)
class SymmPlan:
    """local_ids  (A,K) int32 of W * max_tokens_per_rank rows, -1 where none arrived.
    order      of the rows this rank sends.
    counts     (W,W) int32, rows from each rank to each.
    max_packed choices that may live here.
    """

    local_ids: Tensor
    order: ops.SendOrder
    counts: Tensor
    max_packed: int


@dataclass(eq=False)
class Window:
    """Memory that every rank of a group can write, and how far its moves have come."""

    memory: Tensor
    pointers: Tensor  # (W,) int64
    max_tokens: int
    row_bytes: int
    layout: Any
    count_epoch: Tensor  # (1,) int32
    epochs: Tensor  # (PROGRAMS,) int32
    failure: Tensor  # (3,) int32: what, the peer, the epoch; 0 = nothing
    seen: Tensor  # a copy of it on the host
    copied: torch.cuda.Event | None = field(default=None)
    captured: bool = False  # by a CUDA graph, which goes on using it
    kept: "Window | None" = None  # the one that was captured before it

    @classmethod
    @torch.inference_mode(False)  # it outlives the call, and training may follow
    def make(
        cls,
        ep: ExpertParallel,
        max_tokens: int,
        row_bytes: int,
        device: torch.device,
        before: "Window | None" = None,
    ) -> "Window":
        """Every rank comes here, and leaves when all windows are ready. A failure of the window
        before this one stays one."""
        from ep_moe.kernels import symm as kernels

        if device.type == "cuda":
            torch.cuda.synchronize(device)  # moves through the window before this one
        words = ep.peers.gather([max_tokens, row_bytes], "the windows")
        if words.count(words[0]) < len(words):
            raise ConfigError("max_tokens_per_rank", words, "the same on every rank")
        layout = kernels.layout(ep.size, max_tokens, row_bytes)
        memory, pointers = allocate(layout.total, ep, device)
        memory.zero_()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ep.peers.gather(0, "the windows, set to zero")
        ints = torch.zeros(kernels.PROGRAMS + 1, dtype=torch.int32, device=device)
        if before is None:
            failure = torch.zeros(3, dtype=torch.int32, device=device)
            seen = torch.zeros(3, dtype=torch.int32, pin_memory=device.type == "cuda")
            copied = kept = None
        else:
            failure, seen, copied = before.failure, before.seen, before.copied
            kept = before if before.captured else before.kept
        return cls(
            memory,
            torch.tensor(pointers, dtype=torch.int64, device=device),
            max_tokens,
            row_bytes,
            layout,
            count_epoch=ints[:1],
            epochs=ints[1:],
            failure=failure,
            seen=seen,
            copied=copied,
            kept=kept,
        )

    def serves(self, max_tokens: int, row_bytes: int) -> bool:
        return max_tokens * row_bytes <= self.max_tokens * self.row_bytes


def allocate(size: int, ep: ExpertParallel, device: torch.device) -> tuple[Tensor, list[int]]:
    """Bytes on every rank -> this rank's, and the addresses of all.

    Raises BackendUnavailable where torch cannot share memory among these GPUs.
    """
    # A multicast object, which nothing here needs, can put the GPUs of a host out of service.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if device.type != "cuda":
        raise BackendUnavailable(
            f"transport = 'symm' needs GPUs, and x is on {device}: use collective or auto"
        )
    from torch.distributed import _symmetric_memory as symmetric

    try:
        memory = symmetric.empty(size, dtype=torch.uint8, device=device)
        handle = symmetric.rendezvous(memory, cast(dist.ProcessGroup, ep.group))
    except RuntimeError as error:
        raise BackendUnavailable(
            "transport = 'symm' needs GPUs of one host that reach each other's memory, and torch "
            f"cannot share it among these: {error}. Use collective or auto"
        ) from error
    return memory, list(handle.buffer_ptrs)


class SymmTransport:
    name: ClassVar[str] = "symm"
    caps: ClassVar[Caps] = Caps(needs_group=True, max_ranks=8, deterministic=True, graphable=True)

    def __init__(self, ep: ExpertParallel, max_tokens_per_rank: int | None = None) -> None:
        if not max_tokens_per_rank:
            raise ConfigError(
                "max_tokens_per_rank",
                max_tokens_per_rank,
                "the most tokens that a rank has in a call: transport = 'symm' has buffers of a "
                "fixed size",
            )
        self.ep, self.max_tokens = ep, max_tokens_per_rank
        self.layer, self.calls, self.agreed = next(ep.peers.layers), 0, False

    def __deepcopy__(self, _: dict[int, Any]) -> "SymmTransport":
        return SymmTransport(self.ep, self.max_tokens)  # of a layer of its own

    def dispatch(self, x: Tensor, routing: Routing, num_experts: int) -> Sent:
        from ep_moe.kernels import symm as kernels

        if len(x) > self.max_tokens:
            rule = f"of at most max_tokens_per_rank = {self.max_tokens} tokens (or slots, if exact)"
            raise InputError("x", f"of {len(x)}", rule)
        self.calls += 1
        each, top_k = num_experts // self.ep.size, routing.ids.shape[1]
        order = ops.send_order(routing.ids, num_experts, self.ep.size)
        message = ops.message(routing.ids, routing.gate_weights, order, each)
        self._check("the counts")
        if not self.agreed and not _capturing():
            most = self.ep.peers.gather(self.max_tokens, f"the first call of layer {self.layer}")
            if most.count(most[0]) < len(most):
                raise ConfigError("max_tokens_per_rank", most, "the same on every rank")
            self.agreed = True
        window = self._window(_words(x), message)
        counts = kernels.exchange_counts(
            order.offsets,
            window.pointers,
            window.count_epoch,
            window.failure,
            rank=self.ep.rank,
            window=window.layout,
            timeout_ns=self._timeout_ns,
        )
        self._report(window, "the counts")
        rows = self.ep.size * self.max_tokens
        arrived = message.new_full((rows, message.shape[1]), -1)
        self._move(counts, message, None, arrived, "ids and gates out")
        gates = arrived[:, top_k:].clone(memory_format=torch.contiguous_format)
        local_ids = arrived[:, :top_k].contiguous()
        plan = SymmPlan(local_ids, order, counts, rows * top_k)
        return Sent(plan, self.replay(plan, x), gates.view(routing.gate_weights.dtype))

    def replay(self, plan: SymmPlan, x: Tensor) -> Tensor:
        return self._out(plan, x, "rows out")

    def replay_gates(self, plan: SymmPlan, gates: Tensor) -> Tensor:
        return self._out(plan, gates, "gates out")

    def combine(self, plan: SymmPlan, rows: Tensor) -> Tensor:
        return self._back(plan, rows, "rows back")

    def combine_gates(self, plan: SymmPlan, gates: Tensor) -> Tensor:
        return self._back(plan, gates, "gates back")

    def _out(self, plan: SymmPlan, values: Tensor, what: str) -> Tensor:
        arrived = values.new_empty(self.ep.size * self.max_tokens, values.shape[1])
        index = plan.order.token_of_sent
        self._move(plan.counts, _words(values), index, _words(arrived), what)
        return arrived

    def _back(self, plan: SymmPlan, values: Tensor, what: str) -> Tensor:
        returned = values.new_empty(len(plan.order.token_of_sent), values.shape[1])
        self._move(plan.counts, _words(values), None, _words(returned), what)
        return ops.weighted_sum(returned, None, plan.order.sent_of_token)

    def _move(
        self, counts: Tensor, values: Tensor, index: Tensor | None, out: Tensor, what: str
    ) -> None:
        """Rows of words into `out`."""
        from ep_moe.kernels import symm as kernels

        self._check(what)
        window = self._window(values)
        kernels.move(
            values,
            index,
            counts,
            out,
            window.pointers,
            window.epochs,
            window.failure,
            rank=self.ep.rank,
            back=what.endswith("back"),
            window=window.layout,
            timeout_ns=self._timeout_ns,
        )
        self._report(window, what)

    def _stage(self, what: str) -> str:
        direction = "backward" if in_backward() else "forward"
        return f"layer {self.layer}, call {self.calls}, {direction}, {what}"

    def _check(self, what: str) -> None:
        """With EP_MOE_CHECK=1: is every rank about to make this move? What a graph holds is not
        looked at."""
        if check.wanted() and not _capturing():
            check.same_exchange(self.ep.peers, self._stage(what))

    @property
    def _timeout_ns(self) -> int:
        return int(min(self.ep.peers.timeout * 1e9, 2**62))

    def _window(self, *rows: Tensor) -> Window:
        """The group's, made or made larger where it must be."""
        shared = self.ep.peers.shared
        row_bytes = max(value.shape[1] * value.element_size() for value in rows)
        window = shared.get(self.name)
        if window is None or not window.serves(self.max_tokens, row_bytes):
            device = rows[0].device
            if _capturing():
                raise BackendUnavailable(
                    "transport = 'symm' cannot make its buffers while a CUDA graph is captured: "
                    "run the layer once before, forward and backward"
                )
            window = Window.make(self.ep, self.max_tokens, row_bytes, device, window)
            shared[self.name] = window
        return window

    def _report(self, window: Window, what: str) -> None:
        """Raise DispatchTimeout for a wait that took too long, in this call or a later one: nobody
        waits here for the device, nor for a graph that is replayed."""
        if window.failure.is_cuda:
            if _capturing():
                window.captured = True
                return
            if window.copied is None:
                window.copied = torch.cuda.Event()
            elif not window.copied.query():
                return
            failed = window.seen.tolist()
            window.seen.copy_(window.failure, non_blocking=True)
            window.copied.record()
        else:
            failed = window.failure.tolist()
        if failed[0]:
            ranks, kind = self.ep.peers.ranks, ("", "counts", "rows, ids or gates")[failed[0]]
            stage = f"{self._stage(what)}, or before it"
            why = (
                f"waited {self.ep.peers.timeout:g} s at {stage}, for the {kind} of rank "
                f"{ranks[failed[1]]} (epoch {failed[2]})"
            )
            here = ranks[self.ep.rank]
            raise DispatchTimeout(here, here, stage=stage, why=why)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _words(rows: Tensor) -> Tensor:
    """As int32."""
    if rows.shape[1] * rows.element_size() % 4:
        got = f"{rows.shape[1]} numbers of {rows.element_size()} bytes"
        raise InputError("a row", got, "a multiple of 4 bytes with transport = 'symm'")
    rows = rows.contiguous()
    if rows.storage_offset() * rows.element_size() % 4:  # begins in the middle of a word
        rows = rows.clone()
    return rows.view(torch.int32)
