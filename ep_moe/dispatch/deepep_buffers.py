"""One face for the three incompatible libraries that are all imported as `deep_ep`.

They differ in the name of their class, in what they return, and in who may be left out of what:
V1 `Buffer`, V2.0 and V2.1 `ElasticBuffer`, V2.5 `EPBuffer`. All are called without a host sync, so
that sizes stay on the device: outputs have room for the most rows that could arrive, and how many
did is a tensor.

Source: https://github.com/deepseek-ai/DeepEP, its Python files and what they were seen to do.
"""

import os
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from ep_moe import check
from ep_moe.dispatch.moves import capturing
from ep_moe.dispatch.needs import needs_of, unmet
from ep_moe.errors import BackendUnavailable, InputError
from ep_moe.host import BUFFERS, Host
from ep_moe.parallel import ExpertParallel
from ep_moe.types import Routing

MOVED = torch.bfloat16  # it can add up nothing else
WIDTH = 256  # columns of a row come in multiples of it: combine is compiled for no other
MOST_CHOICES = 32  # of a token, in all generations
WIDEST_V1 = 7936  # half a row, and 8 bytes more, must fit its 8 KiB of shared memory; else it traps
MAKING = "the making of DeepEP's buffer"


class Room(NamedTuple):
    """What a buffer is made for: tokens of a rank at most, columns of a row, choices of a token."""

    tokens: int
    columns: int
    top_k: int

    def holds(self, other: "Room") -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def with_room_for(self, other: "Room") -> "Room":
        return Room(*map(max, self, other))


class Received(NamedTuple):
    """Of W * most rows each, of which the first `count` arrived.

    rows    (A,H)
    ids     (A,K), counted from this rank's first expert; -1 = elsewhere
    gates   (A,K) fp32, anything where an expert is elsewhere
    count   scalar, on the device
    handle  what the way back and the next way out need
    """

    rows: Tensor
    ids: Tensor
    gates: Tensor
    count: Tensor
    handle: Any


class Buffer(Protocol):
    """bytes    of memory that it holds on this GPU.
    ordered  rows of a rank arrive in the order of its tokens.
    """

    room: Room
    bytes: int
    ordered: bool

    def dispatch(
        self, x: Tensor, ids: Tensor, gates: Tensor, num_experts: int, most: int
    ) -> Received:
        """x (T,H), ids (T,K) int64 that nobody changes, gates (T,K) fp32. T is `most` at most, on
        every rank: no more than the room's tokens."""
        ...

    def replay(self, handle: Any, x: Tensor) -> Tensor:
        """(T,H), of any two-byte dtype and as wide as the room or less -> (A,H)"""
        ...

    def combine(self, handle: Any, rows: Tensor, gates: Tensor | None = None) -> Any:
        """bf16 (A,H) -> (T,H), the sum over ranks, and so for gates (A,K) fp32, 0 where an expert
        is elsewhere -> (T,K) or None"""
        ...

    def close(self) -> None:
        """Give the memory back, with all other ranks. No plan may use it again."""
        ...


def check_call(name: str, x: Tensor, routing: Routing, *, tokens: int, choices: int) -> None:
    """Refuse what DeepEP would meet with an assertion of its own, or a trap on the device."""
    ids, gates = routing.ids, routing.gate_weights
    if len(x) > tokens:
        rule = f"of at most max_tokens_per_rank = {tokens} tokens (or slots, if exact)"
        raise InputError("x", f"of {len(x)}", rule)
    if x.dtype != MOVED or gates.dtype != torch.float32:
        raise InputError(
            "x and gate_weights",
            f"{x.dtype} and {gates.dtype}",
            f"{MOVED} and torch.float32 with transport = {name!r}: cast the layer with "
            ".to(torch.bfloat16), use autocast, or take symm or collective",
        )
    if ids.shape[1] > choices:
        rule = f"of at most {choices} experts a token with transport = {name!r}"
        raise InputError("routing.ids", f"of {ids.shape[1]}", rule)
    fills = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore
    if fills and torch.are_deterministic_algorithms_enabled():
        raise BackendUnavailable(
            "DeepEP refuses to run with torch.use_deterministic_algorithms(True) while torch "
            "fills new memory: set torch.utils.deterministic.fill_uninitialized_memory = False"
        )
    if check.wanted() and not capturing():
        _refuse_duplicates(name, ids)


def padded(values: Tensor, columns: int) -> Tensor:
    """(n,H) -> (n,columns), with zeros."""
    missing = columns - values.shape[1]
    return F.pad(values, (0, missing)) if missing else values.contiguous()


def cut(values: Tensor, columns: int) -> Tensor:
    """And back."""
    return values if values.shape[1] == columns else values[:, :columns].contiguous()


def _refuse_duplicates(name: str, ids: Tensor) -> None:
    """An expert that a token names twice stops the kernel of v2, and with it the process."""
    ordered = ids.sort(1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(twice.any()):
        token = int(twice.any(1).nonzero()[0])
        got = f"{ids[token].tolist()} for token {token}"
        raise InputError("routing.ids", got, f"different experts, with transport = {name!r}")


class Pool:
    """What the layers of a group share. Buffers that have become too small stay: plans and CUDA
    graphs use them, and only a call of all ranks would give their memory back."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def find(self, room: Room, *, ordered: bool) -> Buffer | None:
        """The newest that is large enough. Where rows need no order, one with it will do."""
        newest_first = reversed(self.buffers)
        enough = [b for b in newest_first if b.room.holds(room) and b.ordered >= ordered]
        return min(enough, key=lambda buffer: buffer.ordered, default=None)

    def make(
        self,
        library: ModuleType,
        ep: ExpertParallel,
        room: Room,
        device: torch.device,
        *,
        ordered: bool,
        sms: int,
    ) -> Buffer:
        """One with room for what those of the same order had room for, too."""
        for smaller in self.buffers:
            if smaller.ordered == ordered:
                room = room.with_room_for(smaller.room)
        made = make_buffer(library, ep, room, device, ordered=ordered, sms=sms)
        self.buffers.append(made)
        return made

    def close(self) -> None:
        while self.buffers:
            self.buffers.pop().close()


def load(name: str, ranks: int, device: torch.device) -> ModuleType:
    """`deep_ep`, after a look at what that transport needs: importing it where NCCL does not fit
    would end in an assertion about a file.

    Raises BackendUnavailable that says what is missing and what to install.
    """
    if device.type != "cuda":
        raise BackendUnavailable(
            f"transport = {name!r} needs GPUs, and x is on {device}: use collective or auto"
        )
    host = Host.look()
    missing = unmet(needs_of(name, host, ranks))
    if missing:
        reasons = "; ".join(f"{n.what}: {n.has}, needs {n.needs} ({n.remedy})" for n in missing)
        raise BackendUnavailable(
            f"transport = {name!r} cannot run here: {reasons}. `ep-moe doctor` shows all of it; "
            "transports auto, symm and collective need no DeepEP"
        )
    if not host.network_cards:
        os.environ.setdefault("EP_DISABLE_GIN", "1")  # it would look for RDMA, and fail without
    try:
        import deep_ep  # pyright: ignore[reportMissingImports]
    except Exception as error:  # it asserts, compares files, starts a compiler
        raise BackendUnavailable(
            f"transport = {name!r} cannot import deep_ep: {error}. It wants one NCCL in the "
            "process, the very file that it was linked with: README, DeepEP"
        ) from error
    return deep_ep


def make_buffer(
    library: ModuleType,
    ep: ExpertParallel,
    room: Room,
    device: torch.device,
    *,
    ordered: bool,
    sms: int,
) -> Buffer:
    """A buffer of whatever generation the library is. Every rank comes here."""
    for name in BUFFERS:
        if hasattr(library, name):
            make = _GENERATIONS[name]
            return make(library, ep, room, device, ordered=ordered, sms=sms)
    raise BackendUnavailable(
        f"deep_ep at {library.__file__} has none of the classes {', '.join(BUFFERS)}: it is of a "
        "generation that this version of ep_moe does not know"
    )


class _Elastic:
    """V2: `ElasticBuffer`, and `EPBuffer`, which takes the same calls."""

    def __init__(
        self,
        library: ModuleType,
        ep: ExpertParallel,
        room: Room,
        device: torch.device,
        *,
        ordered: bool,
        sms: int,
    ) -> None:
        group = ep.group
        if device.type == "cuda" and "nccl" not in dist.get_backend(group):
            raise BackendUnavailable(
                "transport = 'deepep' needs a group of NCCL, and this one is of "
                f"{dist.get_backend(group)}: init_process_group('nccl'), or a new_group of it"
            )
        self.room, self.sms, self.ordered = room, sms, ordered
        seconds = max(1, int(min(ep.peers.timeout, 2**30)))
        kind = getattr(library, "EPBuffer", None) or library.ElasticBuffer
        with ep.waiting(MAKING):
            # It takes over the group's communicator, which is not there before a first collective.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            self.buffer = kind(
                group,
                num_max_tokens_per_rank=room.tokens,
                hidden=room.columns,
                num_topk=room.top_k,
                deterministic=ordered,
                num_cpu_timeout_secs=seconds,
                num_gpu_timeout_secs=seconds,
                explicitly_destroy=True,  # its destructor would wait for the other ranks
            )
        self.bytes, self.ids_dtype = self.buffer.num_bytes, library.topk_idx_t  # of its build

    def dispatch(
        self, x: Tensor, ids: Tensor, gates: Tensor, num_experts: int, most: int
    ) -> Received:
        if self.ordered and self.buffer.num_scaleout_ranks > 1 and capturing():
            raise BackendUnavailable(
                "over several hosts DeepEP waits for the GPU to put rows in order, which a CUDA "
                "graph cannot hold: capture inference, in a process that has not trained "
                "(layer.warmup(tokens, backward=False)), or take ep_moe layers out of the graph"
            )
        rows, local_ids, arrived_gates, handle, _ = self.buffer.dispatch(
            x,
            topk_idx=ids.to(self.ids_dtype),
            topk_weights=gates,
            num_experts=num_experts,
            num_max_tokens_per_rank=most,
            num_sms=self.sms,
            do_handle_copy=False,
            do_cpu_sync=False,
        )
        count = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        return Received(rows, local_ids, arrived_gates, count, handle)

    def replay(self, handle: Any, x: Tensor) -> Tensor:
        return self.buffer.dispatch(x, handle=handle, num_sms=self.sms, do_handle_copy=False)[0]

    def combine(self, handle: Any, rows: Tensor, gates: Tensor | None = None) -> Any:
        return self.buffer.combine(rows, handle, topk_weights=gates, num_sms=self.sms)[:2]

    def close(self) -> None:
        self.buffer.destroy()


class _First:
    """V1: `Buffer`, of one host."""

    ordered = True  # a queue is filled and emptied in the order of tokens

    def __init__(
        self,
        library: ModuleType,
        ep: ExpertParallel,
        room: Room,
        device: torch.device,
        *,
        ordered: bool,
        sms: int,
    ) -> None:
        if room.columns > WIDEST_V1:
            raise BackendUnavailable(
                f"DeepEP v1 moves rows of at most {WIDEST_V1} columns, and these have, padded, "
                f"{room.columns}: install v2 or v2.5, or take symm or collective"
            )
        kind, self.room, self.ranks = library.Buffer, room, ep.size
        others = kind.num_sms  # of the whole process
        kind.set_num_sms(sms)
        self.out, self.back = kind.get_dispatch_config(ep.size), kind.get_combine_config(ep.size)
        kind.set_num_sms(others)
        row_bytes = room.columns * 2
        self.bytes = max(
            config.get_nvl_buffer_size_hint(row_bytes, ep.size) for config in (self.out, self.back)
        )
        with ep.waiting(MAKING):
            self.buffer = kind(ep.group, num_nvl_bytes=self.bytes, explicitly_destroy=True)

    def dispatch(
        self, x: Tensor, ids: Tensor, gates: Tensor, num_experts: int, most: int
    ) -> Received:
        to_rank, _, to_expert, goes, _ = self.buffer.get_dispatch_layout(ids, num_experts)
        rows, local_ids, arrived_gates, _, handle, _ = self.buffer.dispatch(
            x,
            num_tokens_per_rank=to_rank,
            is_token_in_rank=goes,
            num_tokens_per_expert=to_expert,
            topk_idx=ids,
            topk_weights=gates,
            num_worst_tokens=self.ranks * most,
            config=self.out,
        )
        count = (local_ids >= 0).any(1).sum()  # rows beyond it have no id
        return Received(rows, local_ids, arrived_gates, count, handle)

    def replay(self, handle: Any, x: Tensor) -> Tensor:
        return self.buffer.dispatch(x, handle=handle, config=self.out)[0]

    def combine(self, handle: Any, rows: Tensor, gates: Tensor | None = None) -> Any:
        return self.buffer.combine(rows, handle, topk_weights=gates, config=self.back)[:2]

    def close(self) -> None:
        self.buffer.destroy()


_GENERATIONS = {"EPBuffer": _Elastic, "ElasticBuffer": _Elastic, "Buffer": _First}
