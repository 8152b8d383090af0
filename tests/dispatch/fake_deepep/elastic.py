"""What V2.1's `ElasticBuffer` and V2.5's `EPBuffer` have in common: handle, sizes, both moves.

Both give out receive slots by atomics (so rows of one source come in any order), keep the gate
weights of experts that live elsewhere, and read gradients of gate weights from the owner only.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import core
from .core import EventHandle, argument, compiled_for, data_ptr, exchange, host_assert, shape_of

ALLOCATION_UNIT = 2 << 20
_communicators: dict[dist.ProcessGroup, int] = {}  # the first answer stays, even if it was none


def communicator(group: dist.ProcessGroup) -> int:
    """torch's communicator of the group; 0 (kept for ever) if no collective has made it yet.

    Gloo counts collectives as NCCL does, so that "none has run" is a fact here too.
    """
    if group not in _communicators:
        _communicators[group] = group._get_sequence_number_for_group()
    return _communicators[group]


class EventOverlap(core.EventOverlap):
    """V2's wrapper also runs a hook after the wait."""

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Tensor] | None = None
    ) -> None:
        super().__init__(event, extra_tensors)
        self._release_handle_by_call = False
        self.hook_after_wait: Callable[[], Any] | None = None

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        self._wait(release_handle)

    def _wait(self, release_handle: bool) -> Any:
        super().current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        result = hook() if hook is not None else None
        if release_handle:
            self.event = None
        return result

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        assert self.hook_after_wait is None, "there is a hook already"
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> "EventOverlap":
        self._release_handle_by_call = release_handle
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if self.event is not None:
            self.current_stream_wait(release_handle=self._release_handle_by_call)
        self._release_handle_by_call = False


class EPHandle:
    """What a dispatch leaves for cached dispatches and for combine."""

    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list,
        psum_num_recv_tokens_per_scaleup_rank: Tensor,
        psum_num_recv_tokens_per_expert: Tensor,
        num_unaligned_recv_tokens_per_expert: Tensor,
        recv_src_metadata: Tensor,
        dst_buffer_slot_idx: Tensor,
        token_metadata_at_forward: Tensor | None,
        channel_linked_list: Tensor | None,
    ) -> None:
        assert topk_idx is not None
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self._keep_topk_idx(topk_idx)
        self.num_recv_tokens = num_recv_tokens
        self.num_expanded_tokens = num_expanded_tokens
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.psum_num_recv_tokens_per_scaleup_rank = psum_num_recv_tokens_per_scaleup_rank
        self.psum_num_recv_tokens_per_expert = psum_num_recv_tokens_per_expert
        self.num_unaligned_recv_tokens_per_expert = num_unaligned_recv_tokens_per_expert
        self.recv_src_metadata = recv_src_metadata
        self.dst_buffer_slot_idx = dst_buffer_slot_idx
        self.token_metadata_at_forward = token_metadata_at_forward
        self.channel_linked_list = channel_linked_list
        self._writes: list[Callable[[], object]] = []  # of a dispatch nobody has waited for
        self._call = 0

    def _keep_topk_idx(self, topk_idx: Tensor) -> None:
        self.topk_idx = topk_idx

    def _device_tensors(self) -> list[Tensor | None]:
        return [
            self.psum_num_recv_tokens_per_scaleup_rank,
            self.psum_num_recv_tokens_per_expert,
            self.num_unaligned_recv_tokens_per_expert,
            self.recv_src_metadata,
            self.dst_buffer_slot_idx,
        ]

    def _settle(self) -> None:
        """The communication stream is in order: its next call sees the dispatch finished."""
        writes, self._writes = self._writes, []
        for write in writes:
            write()


class Runtime:
    """The C++ side."""

    def __init__(self, group, num_bytes, num_allocated_qps, row_unit, single_rank_needs_gin):
        argument(num_bytes, int, "num_bytes")
        host_assert(
            num_bytes > 0 and num_bytes % ALLOCATION_UNIT == 0,
            "num_buffer_bytes > 0 and num_buffer_bytes % kNumAlignmentBytes == 0",
        )
        host_assert(0 < num_allocated_qps <= 1024, "num_allocated_qps <= kNumMaxQPs")
        if (single_rank_needs_gin or group.size() > 1) and not core.env_int("EP_DISABLE_GIN"):
            host_assert(False, "ginType != NCCL_GIN_TYPE_NONE and NCCL GIN is unavailable.")
        self.group, self.num_bytes, self.row_unit = group, num_bytes, row_unit
        self.calls = 0

    def destroy(self) -> None:
        dist.barrier(self.group)


def row_bytes(hidden_bytes: int, sf_bytes: int, num_topk: int, extra: int, unit: int) -> int:
    """Bytes of a row in the buffer: the payload, scales, and ids with weights."""
    host_assert(hidden_bytes % 32 == 0, "num_hidden_bytes % kNumTMAAlignmentBytes == 0")
    metadata = num_topk * 8 + extra
    return core.align(hidden_bytes + core.align(sf_bytes, 32) + core.align(metadata, 32), unit)


def dispatch_bytes(num_ranks, bound, hidden_bytes, num_sf_packs, num_topk, unit) -> int:
    extra = 4 * (1 + num_topk)
    return num_ranks * bound * row_bytes(hidden_bytes, num_sf_packs * 4, num_topk, extra, unit)


def combine_bytes(num_ranks, bound, hidden, num_topk, unit, multiple: bool) -> int:
    rows = min(num_ranks, num_topk) if multiple else num_topk
    return rows * bound * row_bytes(hidden * 2, 0, num_topk, 0, unit)


def buffer_size(group, bound, hidden, num_topk, fp8: bool, multiple: bool, unit: int) -> int:
    """Bytes for these settings on one host, which NVLink spans."""
    if not communicator(group):
        raise RuntimeError("NCCL error: the group has no communicator (`_comm_ptr()` is 0)")
    host_assert(bound > 0 and hidden > 0, "num_max_tokens_per_rank > 0 and hidden > 0")
    host_assert(-(-hidden // 32) * 4 <= hidden, "ceil_div(hidden, 32) * sizeof(float) <= hidden")
    num_topk = num_topk or 32
    packs = -(-hidden // 32) if fp8 else 0
    out = dispatch_bytes(group.size(), bound, hidden * (1 if fp8 else 2), packs, num_topk, unit)
    back = combine_bytes(group.size(), bound, hidden, num_topk, unit, multiple)
    return core.align(max(out, back), ALLOCATION_UNIT)


class Base:
    """The Python side; subclasses add the signatures of their generation."""

    _handle_type: type[EPHandle] = EPHandle
    _row_unit = 32
    _single_rank_needs_gin = False
    _even_sms = False
    num_max_tokens_per_rank: int

    def _construct(self, group, num_bytes, bound, hidden, num_topk, fp8, num_allocated_qps) -> None:
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        if num_bytes is None:
            num_bytes = buffer_size(
                group, bound, hidden, num_topk, fp8, self.allow_multiple_reduction, self._row_unit
            )
        elif not communicator(group):
            raise RuntimeError("NCCL error: the group has no communicator (`_comm_ptr()` is 0)")
        self.num_bytes, self.num_max_tokens_per_rank = num_bytes, bound
        if num_allocated_qps == 0:
            num_allocated_qps = 129 if self.allow_hybrid_mode else 17
        self.num_allocated_qps = num_allocated_qps
        self.runtime: Runtime | None = Runtime(
            group, num_bytes, num_allocated_qps, self._row_unit, self._single_rank_needs_gin
        )
        self.num_scaleout_ranks, self.num_scaleup_ranks = 1, self.num_ranks
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = 1, self.num_ranks
        dist.barrier(group)

    def _destroy(self) -> None:
        assert self.explicitly_destroy
        if self.runtime is not None:
            self.runtime.destroy()
            self.runtime = None

    def _theoretical_num_sms(self, num_experts: int, num_topk: int, num_scaleout_topk: int) -> int:
        """As on a machine whose link speed cannot be read."""
        assert num_scaleout_topk == 0
        assert num_experts % self.num_ranks == 0
        if self.num_ranks == 1:
            return core.NUM_DEVICE_SMS
        return 4 if self.prefer_overlap_with_compute else 64

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        wanted = num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)

    def _check_launch(self, num_sms, num_qps, previous_event, allocate_on_comm_stream) -> None:
        num_qps = self.get_theoretical_num_qps(num_sms) if num_qps == 0 else num_qps
        assert num_qps <= self.num_allocated_qps, "Allocated QPs are not enough"
        _ = self.runtime.group  # AttributeError after destroy, as runtime is None
        if previous_event is not None:
            argument(previous_event, EventHandle, "previous_event")
            host_assert(allocate_on_comm_stream, "allocate_on_comm_stream")
            previous_event.current_stream_wait()
        host_assert(0 < num_sms <= core.NUM_DEVICE_SMS, "num_sms <= device.get_num_sms()")

    @torch.no_grad()
    def _dispatch(
        self, x, topk_idx, topk_weights, stats, num_experts, bound, alignment, num_sms, num_qps,
        previous_event, allocate_on_comm_stream, handle, do_cpu_sync, do_expand, do_zero_padding,
        use_tma_aligned_col_major_sf,
    ):  # fmt: skip
        core.check_torch_deterministic()
        num_topk = (handle.topk_idx if topk_idx is None else topk_idx).shape[1]
        if num_sms == 0:
            num_sms = self.get_theoretical_num_sms(num_experts, num_topk)
        elif self._even_sms:
            num_sms = core.align(num_sms, 2)
        x, sf = x if isinstance(x, tuple) else (x, None)
        if handle is not None:
            assert topk_idx is None
            assert do_cpu_sync is None or not do_cpu_sync, "no CPU sync with a cached handle"
            topk_idx = handle.topk_idx
            bound = handle.num_max_tokens_per_rank if bound is None else bound
            num_experts = handle.num_experts if num_experts is None else num_experts
            alignment = handle.expert_alignment if alignment is None else alignment
            do_cpu_sync = False
            assert (num_experts, alignment, bound) == (
                handle.num_experts,
                handle.expert_alignment,
                handle.num_max_tokens_per_rank,
            )
            handle._settle()
        bound = self.num_max_tokens_per_rank if bound is None else bound
        alignment = 1 if alignment is None else alignment
        do_cpu_sync = True if do_cpu_sync is None else do_cpu_sync
        self._check_launch(num_sms, num_qps, previous_event, allocate_on_comm_stream)
        argument(num_experts, int, "num_experts")
        self._check_dispatched(x, sf, topk_idx, topk_weights, stats, num_experts, bound, handle)
        host_assert(not do_zero_padding or do_expand, "not do_zero_padding or do_expand")
        if do_expand or use_tma_aligned_col_major_sf:
            raise NotImplementedError("the fake knows the compact layout with row-major scales")

        slots, fault = self._give_slots(topk_idx, num_experts, bound, handle)
        agreed = {
            "call": "dispatch", "bound": bound, "num_experts": num_experts, "topk": num_topk,
            "hidden": x.shape[1], "dtype": x.dtype, "scales": None if sf is None else sf.shape[1],
            "weights": topk_weights is not None, "cached": None if handle is None else handle._call,
        }  # fmt: skip
        wire, sent = x.view(torch.uint8), []
        for rank in range(self.num_ranks):
            tokens, lanes = self._rows_for(rank, slots, topk_idx, num_experts)
            sent.append((
                tokens + self.rank_idx * bound, lanes, topk_idx[tokens], wire[tokens],
                None if sf is None else sf[tokens],
                None if topk_weights is None else topk_weights[tokens],
            ))  # fmt: skip
        got = exchange(self.group, agreed, sent, fault)
        if handle is None:
            handle = self._make_handle(
                got, slots, topk_idx, num_experts, alignment, bound, num_sms, do_cpu_sync
            )
            if stats is not None:
                stats += handle.num_unaligned_recv_tokens_per_expert
        rows = self._received(got, handle, x, sf, topk_weights)
        return *rows, handle

    def _check_dispatched(self, x, sf, topk_idx, topk_weights, stats, num_experts, bound, handle):
        """The checks of the C++ side, in its order."""
        num_tokens, hidden = shape_of(x, 2, "x")
        hidden_bytes, num_topk = hidden * x.element_size(), topk_idx.shape[1]
        host_assert(x.is_contiguous(), "x.is_cuda() and x.is_contiguous()")
        host_assert(hidden_bytes % 16 == 0, "(x.size(1) * x.element_size()) % sizeof(int4) == 0")
        host_assert(num_tokens <= bound, "num_tokens <= num_max_tokens_per_rank")
        packs = 0
        if sf is not None:
            rows, packs = shape_of(sf, 2, "sf")
            host_assert(rows == num_tokens, "num_tokens == num_tokens_")
            host_assert(sf.element_size() == 4, "sf->element_size() == sizeof(sf_pack_t)")
        host_assert(shape_of(topk_idx, 2, "topk_idx")[0] == num_tokens, "num_tokens == num_tokens_")
        host_assert(topk_idx.dtype == core.topk_idx_t, "topk_idx.scalar_type() == topk_idx_t")
        host_assert(topk_idx.is_contiguous(), "topk_idx.is_cuda() and topk_idx.is_contiguous()")
        if topk_weights is not None:
            rows, _ = shape_of(topk_weights, 2, "topk_weights")
            host_assert(rows == num_tokens, "num_tokens == num_tokens__")
            host_assert(topk_weights.is_contiguous(), "topk_weights->is_contiguous()")
            data_ptr(topk_weights, torch.float32, "topk_weights")
            compiled_for(tuple(topk_weights.shape) == tuple(topk_idx.shape), "one weight an id")
        if stats is not None:
            local = shape_of(stats, 1, "cumulative_local_expert_recv_stats")[0]
            host_assert(stats.is_contiguous(), "cumulative_local_expert_recv_stats is contiguous")
            host_assert(num_experts // self.num_ranks == local, "num_local_experts == size(0)")
            data_ptr(stats, torch.int32, "cumulative_local_expert_recv_stats")
            host_assert(handle is None, "cached mode: cumulative_local_expert_recv_stats == null")
        host_assert(num_experts % self.num_ranks == 0, "num_experts % num_ranks == 0")
        needed = dispatch_bytes(
            self.num_ranks, bound, hidden_bytes, packs, num_topk, self._row_unit
        )
        host_assert(needed <= self.num_bytes, "get_dispatch_buffer_size(...) <= num_buffer_bytes")
        compiled_for(num_topk <= 32, "kNumTopk <= 32, Too many top-k selections")
        compiled_for(x.element_size() <= 2, "a payload of one or two bytes")
        compiled_for(num_experts <= 2048, "kNumExperts <= kNumMaxExperts")
        if handle is not None:
            same = tuple(handle.dst_buffer_slot_idx.shape) == (num_tokens, num_topk)
            host_assert(same, "num_tokens == num_tokens__ and num_topk == num_topk_")

    def _give_slots(self, topk_idx, num_experts, bound, handle) -> tuple[Tensor, str]:
        """(T, K): rank * bound + slot in the owner's buffer, at the last lane that names a rank."""
        if handle is not None:
            return handle.dst_buffer_slot_idx, ""
        fault = core.reads_nowhere(topk_idx, num_experts) or core.names_twice(topk_idx)
        slots = torch.full(topk_idx.shape, -1, dtype=torch.int32)
        if fault:
            return slots, fault
        last = last_lanes(topk_idx, num_experts // self.num_ranks, self.num_ranks)
        for rank in range(self.num_ranks):
            tokens = (last[rank] >= 0).nonzero()[:, 0]
            if not self.deterministic:
                tokens = core.shuffled(tokens, self.rank_idx)
            numbers = torch.arange(len(tokens), dtype=torch.int32)
            slots[tokens, last[rank][tokens]] = self.rank_idx * bound + numbers
        return slots, fault

    def _rows_for(self, rank, slots, topk_idx, num_experts) -> tuple[Tensor, Tensor]:
        here = (slots >= 0) & (topk_idx // (num_experts // self.num_ranks) == rank)
        tokens, lanes = here.nonzero(as_tuple=True)
        order = slots[tokens, lanes].argsort()
        return tokens[order], lanes[order]

    def _make_handle(
        self, got, slots, topk_idx, num_experts, alignment, bound, num_sms, do_cpu_sync
    ) -> EPHandle:
        per_rank, num_topk = num_experts // self.num_ranks, topk_idx.shape[1]
        counts = torch.tensor([len(tokens) for tokens, *_ in got], dtype=torch.int32)
        arrived = int(counts.sum())
        ids = torch.cat([ids for _, _, ids, *_ in got]) - self.rank_idx * per_rank
        real = torch.stack([(ids == e).sum() for e in range(per_rank)]).int()
        padded = [core.align(int(count), alignment) for count in real]
        worst = bound * self.num_ranks
        metadata = core.unwritten((arrived if do_cpu_sync else worst, num_topk + 2), torch.int32)
        metadata[:arrived, 0] = torch.cat([tokens for tokens, *_ in got])
        metadata[:arrived, 1] = torch.cat(
            [source * num_topk + lanes for source, (_, lanes, *_) in enumerate(got)]
        )
        expanded = sum(padded)
        if not do_cpu_sync:
            expanded = worst * min(num_topk, per_rank) + (alignment - 1) * per_rank
            expanded = core.align(expanded, alignment)
        handle = self._handle_type(
            False, num_experts, alignment, bound, num_sms, topk_idx, len(metadata), expanded,
            padded if do_cpu_sync else [], counts.cumsum(0).int(),
            torch.tensor(padded).cumsum(0).int(), real, metadata, slots, None, None,
        )  # fmt: skip
        self.runtime.calls += 1
        handle._call = self.runtime.calls
        return handle

    def _received(self, got, handle, x, sf, topk_weights):
        """Rows by source rank; whatever lies behind the last of them looks like rows too."""
        per_rank = handle.num_experts // self.num_ranks
        rows, num_topk = handle.num_recv_tokens, handle.topk_idx.shape[1]
        arrived = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        recv_x = core.unwritten((rows, x.shape[1]), x.dtype)
        recv_x.view(torch.uint8)[:arrived] = torch.cat([wire for _, _, _, wire, _, _ in got])
        recv_sf = recv_weights = None
        if sf is not None:
            recv_sf = core.unwritten((rows, sf.shape[1]), sf.dtype)
            recv_sf[:arrived] = torch.cat([scales for *_, scales, _ in got])
        recv_idx = torch.arange(rows * num_topk).view(rows, num_topk) % per_rank
        ids = torch.cat([ids for _, _, ids, *_ in got]) - self.rank_idx * per_rank
        recv_idx[:arrived] = ids.masked_fill((ids < 0) | (ids >= per_rank), -1)
        if topk_weights is not None:
            recv_weights = torch.full((rows, num_topk), 7.25)
            recv_weights[::2] = float("nan")
            recv_weights[:arrived] = torch.cat([weights for *_, weights in got])
        return (recv_x if sf is None else (recv_x, recv_sf)), recv_idx, recv_weights

    @torch.no_grad()
    def _combine(self, x, handle, topk_weights, bias, num_sms, num_qps, previous_event, on_comm):
        core.check_torch_deterministic()
        num_sms = handle.num_sms if num_sms == 0 else num_sms
        if self._even_sms:
            num_sms = core.align(num_sms, 2)
        biases, topk_idx = core.unpack_bias(bias), handle.topk_idx
        self._check_launch(num_sms, num_qps, previous_event, on_comm)
        handle._settle()
        rows, hidden = shape_of(x, 2, "x")
        num_tokens, num_topk = topk_idx.shape
        bound, metadata = handle.num_max_tokens_per_rank, handle.recv_src_metadata
        host_assert(x.is_contiguous(), "x.is_cuda() and x.is_contiguous()")
        host_assert(x.dtype == torch.bfloat16, "x.scalar_type() == torch::kBFloat16")
        host_assert(hidden * 2 % 16 == 0, "(x.size(1) * x.element_size()) % sizeof(int4) == 0")
        host_assert(num_tokens <= bound, "num_combined_tokens <= num_max_tokens_per_rank")
        host_assert(len(metadata) == rows, "num_reduced_tokens == num_tokens")
        if topk_weights is not None:
            shape = shape_of(topk_weights, 2, "topk_weights")
            host_assert(shape == (rows, num_topk), "num_tokens == and num_topk == num_topk__")
            host_assert(topk_weights.is_contiguous(), "topk_weights->is_contiguous()")
            host_assert(topk_weights.dtype == torch.float32, "topk_weights is torch::kFloat")
        total = core.check_bias(biases, x, num_tokens)
        needed = combine_bytes(
            self.num_ranks, bound, hidden, num_topk, self._row_unit, self.allow_multiple_reduction
        )
        host_assert(needed <= self.num_bytes, "get_combine_buffer_size(...) <= num_buffer_bytes")
        compiled_for(hidden % 256 == 0, "kHidden % 256 == 0, Invalid hidden")

        arrived = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        source_tokens = metadata[:arrived, 0].long()
        sources, tokens = source_tokens // max(bound, 1), source_tokens % max(bound, 1)
        sent = []
        for rank in range(self.num_ranks):
            at = (sources == rank).nonzero()[:, 0]
            sent.append((tokens[at], x[at], None if topk_weights is None else topk_weights[at]))
        agreed = {
            "call": "combine", "of": handle._call, "hidden": hidden, "bound": bound,
            "weights": topk_weights is not None,
        }  # fmt: skip
        got = exchange(self.group, agreed, sent)
        return self._reduced(got, total, topk_idx, handle.num_experts, topk_weights is not None)

    def _reduced(self, got, total, topk_idx, num_experts, with_weights):
        """fp32 in the order of each rank's last lane, one rounding; weights from the owner only."""
        per_rank = num_experts // self.num_ranks
        last = last_lanes(topk_idx, per_rank, self.num_ranks)
        slot_weights = torch.zeros(topk_idx.shape) if with_weights else None
        rows = [torch.full(total.shape, float("nan")) for _ in got]
        for rank, (tokens, values, weights) in enumerate(got):
            rows[rank][tokens] = values.float()
            if with_weights:
                owned = topk_idx.div(per_rank, rounding_mode="floor") == rank
                theirs = torch.full(topk_idx.shape, float("nan"))
                theirs[tokens] = weights
                slot_weights[owned] = theirs[owned]
        for lane in range(topk_idx.shape[1]):
            for rank in range(self.num_ranks):
                at = last[rank] == lane
                total[at] += rows[rank][at]
        return total.bfloat16(), slot_weights


def last_lanes(topk_idx: Tensor, per_rank: int, num_ranks: int) -> Tensor:
    """(R, T): the last slot of each token that names an expert of rank r, or -1."""
    lanes = torch.arange(topk_idx.shape[1]).expand(topk_idx.shape)
    owners = topk_idx.div(per_rank, rounding_mode="floor")
    absent = torch.full_like(lanes, -1)
    return torch.stack([torch.where(owners == r, lanes, absent).amax(1) for r in range(num_ranks)])


def finished(outputs: list, handle: EPHandle | None, asynchronous: bool) -> EventHandle | None:
    """An event for an asynchronous call, which alone brings the outputs; else None."""
    if not asynchronous:
        return None
    event = EventHandle()
    flat = [t for out in outputs for t in (out if isinstance(out, tuple) else (out,))]
    event._writes = core.hold_back(flat)
    if handle is not None:
        handle._writes = core.hold_back(handle._device_tensors())
        event._writes += handle._writes
    return event
