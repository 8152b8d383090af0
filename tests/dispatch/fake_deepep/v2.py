"""DeepEP 2.1 (`sgl-deep-ep` 0.1.1): `ElasticBuffer`, and V1's `Buffer` with more parameters.

Handles clone `topk_idx` unless asked not to; one rank alone needs no NCCL GIN.
"""

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from . import core, elastic, v1
from .core import EventHandle, topk_idx_t
from .elastic import EPHandle, EventOverlap, finished
from .v1 import Config

__all__ = [
    "Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "topk_idx_t",
]  # fmt: skip
__version__ = "2.1.0"


class ElasticBuffer(elastic.Base):
    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.deterministic = deterministic
        if num_cpu_bytes:
            raise NotImplementedError("the fake has no buffer in CPU memory")
        core.argument(sl_idx, int, "sl_idx")
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
            allow_multiple_reduction, ElasticBuffer._row_unit,
        )  # fmt: skip

    @staticmethod
    def capture() -> EventHandle:
        return EventHandle()

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        dist.barrier(self.runtime.group)

    def get_physical_domain_size(self) -> tuple[int, int]:
        return 1, self.runtime.group.size()

    def get_logical_domain_size(self) -> tuple[int, int]:
        return 1, self.runtime.group.size()

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
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
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> Any:
        core.argument(previous_event_before_epilogue, (EventHandle, type(None)), "previous_event")
        *rows, made = self._dispatch(
            x, topk_idx, topk_weights, cumulative_local_expert_recv_stats, num_experts,
            num_max_tokens_per_rank, expert_alignment, num_sms, num_qps, previous_event,
            allocate_on_comm_stream, handle, do_cpu_sync, do_expand, do_zero_padding,
            use_tma_aligned_col_major_sf,
        )  # fmt: skip
        if handle is None and do_handle_copy:
            made.topk_idx = made.topk_idx.clone()
        event = finished(rows, made if handle is None else None, async_with_compute_stream)
        return *rows, made, EventOverlap(event)

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        core.argument(previous_event_before_epilogue, (EventHandle, type(None)), "previous_event")
        combined = self._combine(
            x, handle, topk_weights, bias, num_sms, num_qps, previous_event, allocate_on_comm_stream
        )
        event = finished(list(combined), None, async_with_compute_stream)
        return *combined, EventOverlap(event)


class Buffer(v1.Buffer):
    """V1 as 2.1 keeps it."""

    _event_overlap = EventOverlap
    _low_latency_hidden = (*v1.LOW_LATENCY_HIDDEN, 3072)

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool | None = None,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        if enable_shrink:
            raise NotImplementedError("the fake masks no ranks")
        if low_latency_mode:
            self.nvshmem_qp_depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
        super().__init__(
            group, num_nvl_bytes, num_rdma_bytes, low_latency_mode, num_qps_per_rank,
            allow_nvlink_for_low_latency_mode, allow_mnnvl, explicitly_destroy, comm,
        )  # fmt: skip

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        core.check_torch_deterministic()
        return super().dispatch(
            x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank,
            num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, num_worst_tokens,
            config, previous_event, async_finish, allocate_on_comm_stream,
        )  # fmt: skip

    def combine(
        self,
        x: Tensor,
        handle: tuple,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        core.check_torch_deterministic()
        return super().combine(
            x, handle, topk_weights, bias, config, previous_event, async_finish,
            allocate_on_comm_stream,
        )  # fmt: skip

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        x_global_scale: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        use_nvfp4: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, tuple, EventOverlap, Callable[[], None] | None]:
        core.check_torch_deterministic()
        assert self.nvshmem_qp_depth >= (num_max_dispatch_tokens_per_rank + 1) * 2
        if use_nvfp4 or x_global_scale is not None:
            raise NotImplementedError("the fake's low-latency path carries bf16")
        return super().low_latency_dispatch(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
            cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats, use_fp8, round_scale,
            use_ue8m0, async_finish, return_recv_hook,
        )  # fmt: skip

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        core.check_torch_deterministic()
        assert self.nvshmem_qp_depth >= (handle[2] + 1) * 2
        return super().low_latency_combine(
            x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, async_finish,
            return_recv_hook, out, combine_wait_recv_cost_stats,
        )  # fmt: skip
