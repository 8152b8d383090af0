"""Our own transport for GPUs that reach each other's memory, such as those of one host on NVLink:
each rank writes rows where its peers will find them (`ep_moe.kernels.symm`). No host sync: buffers
have a fixed size, `max_tokens_per_rank` for each rank, and sizes stay on the device.

All layers of a group share one window of memory, as large as the largest of them needs. Where
nothing keeps them for a backward, arrived rows are read where they arrived, and may be until this
rank's next move. In a backward they are always copied: recomputing a checkpoint moves other rows
between their arrival and their use.
"""

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ep_moe import check
from ep_moe.dispatch.moves import agree, capturing, stage
from ep_moe.dispatch.protocol import Caps, Sent
from ep_moe.errors import BackendUnavailable, ConfigError, DispatchTimeout, InputError
from ep_moe.parallel import ExpertParallel
from ep_moe.types import Routing

if TYPE_CHECKING:  # Triton is imported where it is used
    from ep_moe.kernels.window import Link

SMS, MOST_SMS = 16, 128  # multiprocessors that a move takes


@dataclass(frozen=True, eq=False)
class SymmPlan:
    """local_ids  (A,K) int32 of W * max_tokens_per_rank rows, -1 where none arrived.
    order      which rows this rank sends and gets, a `kernels.window.Order`.
    max_packed choices that may live here.
    """

    local_ids: Tensor
    order: Any
    max_packed: int


@dataclass(eq=False)
class Window:
    """Memory that every rank of a group can write, and how far its moves have come.

    peers    (W+1,) int64: addresses of the windows and of `seen`
    epochs   (MOST_SMS,) int32
    failure  (4,) int32: what, the peer, the move, 1; all 0 = nothing
    seen     (3,) int32: the same on the host, where the device writes it
    captured by a CUDA graph, which goes on using it
    kept     the one that was captured before it
    views    of its rows, made once each: a view costs the host microseconds
    """

    memory: Tensor
    peers: Tensor
    epochs: Tensor
    failure: Tensor
    seen: Tensor
    captured: bool = False
    kept: "Window | None" = None
    views: dict[tuple, Tensor] = field(default_factory=dict)

    @classmethod
    @torch.inference_mode(False)  # it outlives the call, and training may follow
    def make(
        cls, ep: ExpertParallel, size: int, device: torch.device, before: "Window | None" = None
    ) -> "Window":
        """Every rank comes here, and leaves when all windows are ready. A failure of the window
        before this one stays one."""
        from ep_moe.kernels.window import layout

        if device.type == "cuda":
            torch.cuda.synchronize(device)  # moves through the window before this one
        sizes = ep.peers.gather(size, "the windows")
        if sizes.count(sizes[0]) < len(sizes):
            raise ConfigError("the buffers", sizes, "as large on every rank: equal layers and rows")
        memory, pointers = allocate(size, ep, device)
        memory[: layout(ep.size, 0, 0).rows].zero_()  # flags
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        ep.peers.gather(0, "the windows, set to zero")
        if before is None:
            failure = torch.zeros(4, dtype=torch.int32, device=device)
            seen = torch.zeros(3, dtype=torch.int32, pin_memory=device.type == "cuda")
            kept = None
        else:
            failure, seen = before.failure, before.seen
            kept = before if before.captured else before.kept
        peers = torch.tensor([*pointers, seen.data_ptr()], dtype=torch.int64, device=device)
        epochs = torch.zeros(MOST_SMS, dtype=torch.int32, device=device)
        return cls(memory, peers, epochs, failure, seen, kept=kept)

    def rows(self, ranks: int, most: int, like: Tensor) -> Tensor:
        """(W * most, H): where rows arrive, in the dtype and of the width of `like`."""
        from ep_moe.kernels.window import layout

        form = ranks, most, like.shape[1], like.dtype
        if form not in self.views:
            places = layout(ranks, most, like.shape[1] * like.element_size())
            end = places.rows + ranks * most * like.shape[1] * like.element_size()
            rows = self.memory[places.rows : end].view(like.dtype).view(-1, like.shape[1])
            self.views[form] = rows
        return self.views[form]

    def close(self) -> None:
        """Give the memory back. No rank may use it again."""
        self.memory = self.memory.new_empty(0)
        self.views.clear()

    def holds(self, values: Tensor) -> bool:
        return 0 <= values.data_ptr() - self.memory.data_ptr() < max(self.memory.numel(), 1)


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
    caps: Caps = Caps(
        needs_group=True,
        max_ranks=8,
        deterministic=True,
        graphable=True,
        in_place=True,
        fixed_size=True,
    )

    def __init__(self, ep: ExpertParallel, max_tokens_per_rank: int | None = None) -> None:
        assert max_tokens_per_rank is not None  # `make_transport` has seen to it
        self.ep, self.max_tokens = ep, max_tokens_per_rank
        self.sms = SMS  # may be set before the first call, alike on every rank
        self.layer, self.calls, self.agreed = next(ep.peers.layers), 0, False

    def __deepcopy__(self, _: dict[int, Any]) -> "SymmTransport":
        copy = SymmTransport(self.ep, self.max_tokens)  # of a layer of its own
        copy.sms = self.sms
        return copy

    def dispatch(self, x: Tensor, routing: Routing, num_experts: int, *, keep: bool = True) -> Sent:
        from ep_moe.kernels import symm as kernels

        if x.shape[0] > self.max_tokens:
            rule = f"of at most max_tokens_per_rank = {self.max_tokens} tokens (or slots, if exact)"
            raise InputError("x", f"of {len(x)}", rule)
        self.calls += 1
        what, ids, gates = "rows out", routing.ids, routing.gate_weights
        self._check(what)
        self._agree()
        window = self._window(x, ids.shape[1], gates.element_size())
        rows, link = window.rows(self.ep.size, self.max_tokens, x), self._link(window)
        out = torch.empty_like(rows) if keep else rows.detach()
        order, local_ids, arrived_gates = kernels.dispatch(
            self._outside(window, x), ids, gates, out, link, num_experts=num_experts
        )
        if keep:
            kernels.take(rows, out, order, link)
        self._report(window, what)
        return Sent(SymmPlan(local_ids, order, local_ids.numel()), out, arrived_gates)

    def replay(self, plan: SymmPlan, x: Tensor, *, keep: bool = True) -> Tensor:
        return self._out(plan, x, "rows out again", keep=keep)

    def replay_gates(self, plan: SymmPlan, gates: Tensor) -> Tensor:
        return self._out(plan, gates, "gates out", keep=True)

    def combine(self, plan: SymmPlan, rows: Tensor) -> Tensor:
        return self._back(plan, rows, "rows back")

    def combine_gates(self, plan: SymmPlan, gates: Tensor) -> Tensor:
        return self._back(plan, gates, "gates back")

    def _out(self, plan: SymmPlan, values: Tensor, what: str, *, keep: bool) -> Tensor:
        from ep_moe.kernels import symm as kernels

        self._check(what)
        window = self._window(values)
        rows, link = window.rows(self.ep.size, self.max_tokens, values), self._link(window)
        out = torch.empty_like(rows) if keep else rows.detach()
        kernels.replay(self._outside(window, values), out, plan.order, link)
        if keep:
            kernels.take(rows, out, plan.order, link)
        self._report(window, what)
        return out

    def _back(self, plan: SymmPlan, values: Tensor, what: str) -> Tensor:
        from ep_moe.kernels.symm_back import combine

        self._check(what)
        window = self._window(values)
        summed = combine(self._outside(window, values), plan.order, self._link(window))
        self._report(window, what)
        return summed

    def _outside(self, window: Window, values: Tensor) -> Tensor:
        """Not in memory that peers write while these are read."""
        return values.clone() if window.holds(values) else values

    def _stage(self, what: str) -> str:
        return stage(self.layer, self.calls, what)

    def _check(self, what: str) -> None:
        """With EP_MOE_CHECK=1: is every rank about to make this move? What a graph holds is not
        looked at."""
        if check.wanted() and not capturing():
            check.same_exchange(self.ep.peers, self._stage(what))

    def _agree(self) -> None:
        """In the first call: have all ranks been told the same?"""
        if self.agreed or capturing():
            return
        if not 1 <= self.sms <= MOST_SMS:
            raise ConfigError("sms", self.sms, f"1 to {MOST_SMS}")
        told = {"max_tokens_per_rank": self.max_tokens, "sms": self.sms}
        agree(self.ep.peers, self.layer, told)
        self.agreed = True

    def _link(self, window: Window) -> "Link":
        from ep_moe.kernels.window import Link

        timeout_ns = int(min(self.ep.peers.timeout * 1e9, 2**62))
        where = window.peers, window.epochs, window.failure
        return Link(*where, self.ep.rank, self.max_tokens, self.sms, timeout_ns)

    def _window(self, rows: Tensor, top_k: int = 0, gate_bytes: int = 0) -> Window:
        """The group's, made or made larger where it must be."""
        from ep_moe.kernels.window import layout

        shared = self.ep.peers.shared
        row_bytes = rows.shape[1] * rows.element_size()
        size = layout(self.ep.size, self.max_tokens, row_bytes, top_k, gate_bytes).total
        window = shared.get(self.name)
        if window is None or window.memory.numel() < size:
            if capturing():
                raise BackendUnavailable(
                    "transport = 'symm' cannot make its buffers while a CUDA graph is captured: "
                    "run it before, forward and backward, or call layer.warmup(tokens)"
                )
            window = shared[self.name] = Window.make(self.ep, size, rows.device, window)
        return window

    def _report(self, window: Window, what: str) -> None:
        """Raise DispatchTimeout for a wait that took too long, in this call or a later one: nobody
        waits here for the device, nor for a graph that is replayed."""
        window.captured |= capturing()
        failed, peer, move = window.seen.tolist()
        if failed:
            ranks, kind = self.ep.peers.ranks, ("", "to begin", "for what it sends")[failed]
            stage = f"{self._stage(what)}, or before it"
            why = (
                f"waited {self.ep.peers.timeout:g} s at {stage}, for rank {ranks[peer]} {kind} "
                f"(move {move})"
            )
            here = ranks[self.ep.rank]
            raise DispatchTimeout(here, here, stage=stage, why=why)
