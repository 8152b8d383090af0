"""DeepEP 2.5 (`deepinfer-ep`): `EPBuffer`, and nothing of what was there before.

Handles keep the caller's `topk_idx` and notice writes to it; NCCL GIN is wanted even by one rank.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from . import elastic
from .core import EventHandle, host_assert, topk_idx_t
from .elastic import finished

__all__ = ["EPBuffer", "EPHandle", "EventHandle", "EventOverlap", "topk_idx_t"]
__version__ = "2.5.0"


class EventOverlap(elastic.EventOverlap):
    """The wait returns what a deferred epilogue made."""

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        return self._wait(release_handle)

    def wait(self) -> Any:
        return self.current_stream_wait()


class EPHandle(elastic.EPHandle):
    """Refuses to be used after a write to the ids it was made from."""

    def _keep_topk_idx(self, topk_idx: Tensor) -> None:
        self._topk_idx = topk_idx
        self._topk_idx_version = None if topk_idx.is_inference() else topk_idx._version

    @property
    def topk_idx(self) -> Tensor:
        version = self._topk_idx_version  # tensors of inference mode have none
        assert version is None or version == self._topk_idx._version, (
            "`topk_idx` must not be modified while the EP handle is in use"
        )
        return self._topk_idx


class EPBuffer(elastic.Base):
    _handle_type = EPHandle
    _row_unit = 64
    _single_rank_needs_gin = True
    _even_sms = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: int = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.deterministic = deterministic
        if lb_allocation_plan_or_num_bytes:
            raise NotImplementedError("the fake has no region for redundant experts")
        self.explicitly_destroy = explicitly_destroy
        self._construct(
            group, num_bytes, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch,
            num_allocated_qps,
        )  # fmt: skip

    def destroy(self) -> None:
        self._destroy()

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        return elastic.buffer_size(
            group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch,
            allow_multiple_reduction, EPBuffer._row_unit,
        )  # fmt: skip

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
    ) -> int:
        return self._theoretical_num_sms(num_experts, num_topk, num_scaleout_topk)

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        assert not do_handle_copy, "`do_handle_copy` must be False"
        *rows, made = self._dispatch(
            x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts,
            num_max_tokens_per_rank, expert_alignment, num_sms, num_qps, previous_event,
            allocate_on_comm_stream, handle, do_cpu_sync, do_expand, do_zero_padding,
            use_tma_aligned_col_major_sf,
        )  # fmt: skip
        host_assert(not defer_epilogue or async_with_compute_stream, "async_with_compute_stream")
        event = finished(rows, made if handle is None else None, async_with_compute_stream)
        overlap = EventOverlap(event)
        if defer_epilogue:
            overlap.register_hook_after_wait(lambda: (*rows, made))
            return overlap
        return *rows, made, overlap

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Any:
        host_assert(not defer_epilogue or async_with_compute_stream, "async_with_compute_stream")
        combined = self._combine(
            x, handle, topk_weights, bias, num_sms, num_qps, previous_event, allocate_on_comm_stream
        )
        overlap = EventOverlap(finished(list(combined), None, async_with_compute_stream))
        if defer_epilogue:
            overlap.register_hook_after_wait(lambda: combined)
            return overlap
        return *combined, overlap
