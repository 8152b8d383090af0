"""DeepEP 1.x (`sgl-deep-ep` 0.1.0): `Buffer` within one host, and its low-latency path in bf16.

Rows arrive in the order of their source's tokens, and gates of experts that live elsewhere are 0.
This generation has no `topk_idx_t` of its own: ids are int64.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import core
from .core import EventHandle, EventOverlap, host_assert
from .intranode import Config, Runtime, received
from .low_latency import LOW_LATENCY_HIDDEN, LowLatency, layout_bytes

__all__ = ["Buffer", "Config", "EventOverlap"]

_DISPATCH_CHUNKS = {2: (24, 256), 4: (6, 256), 8: (6, 256)}
_COMBINE_CHUNKS = {2: (10, 256), 4: (9, 256), 8: (4, 256)}


class Buffer:
    num_sms: int = 20
    _event_overlap = EventOverlap
    _low_latency_hidden = LOW_LATENCY_HIDDEN

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        comm: Any = None,
    ) -> None:
        if group is None:
            if comm is None:
                raise ValueError("Either 'group' or 'comm' must be provided.")
            raise NotImplementedError("the fake knows no MPI")
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.runtime: Any = Runtime(group, num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        if low_latency_mode:
            assert num_qps_per_rank > 0
            os.environ["NVSHMEM_IBGDA_NUM_RC_PER_PE"] = f"{num_qps_per_rank}"
            self.runtime.low_latency = LowLatency(
                group, num_rdma_bytes, num_qps_per_rank, self._low_latency_hidden
            )
        self._layout = EventOverlap()
        dist.barrier(group)

    def destroy(self):
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self.runtime.destroy()
        self.runtime = None

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return (
            layout_bytes(num_max_dispatch_tokens_per_rank, hidden, num_experts) // 128 + 1
        ) * 128

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in _DISPATCH_CHUNKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, *_DISPATCH_CHUNKS[num_ranks], 6, 128)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in _COMBINE_CHUNKS, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms, *_COMBINE_CHUNKS[num_ranks], 6, 128)

    def _event(
        self, outputs: list[Tensor | None], asynchronous: bool, kept: tuple | None = None
    ) -> EventOverlap:
        if not asynchronous:
            return self._event_overlap(None)
        event = EventHandle()
        event._writes = core.hold_back(outputs)
        return self._event_overlap(event, kept)

    @torch.no_grad()
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        layout = self.runtime.layout
        previous = getattr(previous_event, "event", None)
        self.runtime.check_stream(previous, async_finish, allocate_on_comm_stream)
        per_rank, per_expert, in_rank = layout(topk_idx, num_experts)
        event = self._event([per_rank, per_expert], async_finish)
        self._layout = event  # the communication stream is in order: dispatch sees it done
        return per_rank, None, per_expert, in_rank, event

    @torch.no_grad()
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
        config = self.get_dispatch_config(self.group_size) if config is None else config
        move = self.runtime.dispatch
        x, scales = x if isinstance(x, tuple) else (x, None)
        previous = getattr(previous_event, "event", None)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            rank_prefix, channel_prefix, _, src_idx, is_token_in_rank, _ = handle
            host_assert(
                channel_prefix.shape[1] == config._num_sms // 2,
                "cached_channel_prefix_matrix->size(1) == num_channels",
            )
            self.runtime.check_stream(previous, async_finish, allocate_on_comm_stream)
            got, _, _ = move(
                x, scales, None, None, None, is_token_in_rank, None, True, expert_alignment,
                num_worst_tokens, config,
            )  # fmt: skip
            assert rank_prefix[-1, self.rank] == sum(len(tokens) for tokens, *_ in got)
            recv_x, recv_scales, _, _ = received(got, len(src_idx), x, scales, 0)
            event = self._event([recv_x, recv_scales], async_finish)
            return both(recv_x, recv_scales), None, None, None, None, event
        if self._layout.event is not None:
            self._layout.event.current_stream_wait()
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        self.runtime.check_stream(previous, async_finish, allocate_on_comm_stream)
        got, channel_prefix, head = move(
            x, scales, topk_idx, topk_weights, num_tokens_per_rank, is_token_in_rank,
            num_tokens_per_expert, False, expert_alignment, num_worst_tokens, config,
        )  # fmt: skip
        arrived = sum(len(tokens) for tokens, *_ in got)
        rows = num_worst_tokens or arrived
        if rows < arrived:
            raise RuntimeError("illegal memory access: more rows than num_worst_tokens")
        num_topk = 0 if topk_idx is None else topk_idx.shape[1]
        recv_x, recv_scales, recv_idx, recv_weights = received(got, rows, x, scales, num_topk)
        expert_rows = torch.stack([counts for *_, counts in got]).sum(0)
        lengths = [core.align(int(count), expert_alignment) for count in expert_rows]
        src_idx = core.unwritten((rows,), torch.int32)
        src_idx[:arrived] = torch.cat([tokens for tokens, *_ in got])
        rank_prefix = torch.stack([item[5] for item in got]).cumsum(0).int()
        before = torch.stack([item[6] for item in got])
        before = torch.cat([torch.zeros_like(before[:, :1]), before[:, :-1]], 1)
        made = (rank_prefix, channel_prefix, before, src_idx, is_token_in_rank, head)
        event = self._event([recv_x, recv_scales, recv_idx, recv_weights], async_finish)
        lengths = [] if num_worst_tokens else lengths
        return both(recv_x, recv_scales), recv_idx, recv_weights, lengths, made, event

    @torch.no_grad()
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
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        config = self.get_combine_config(self.group_size) if config is None else config
        move = self.runtime.combine
        previous = getattr(previous_event, "event", None)
        biases = core.unpack_bias(bias)
        self.runtime.check_stream(previous, async_finish, allocate_on_comm_stream)
        combined, weights = move(x, topk_weights, biases, handle, config)
        return combined, weights, self._event([combined, weights], async_finish)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        host_assert(self.low_latency_mode, "low_latency_mode")
        self.runtime.low_latency.check_room(num_max_dispatch_tokens_per_rank, hidden, num_experts)
        self.runtime.low_latency.layout = None

    @torch.no_grad()
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, tuple, EventOverlap, Callable[[], None] | None]:
        runtime = self.runtime
        runtime.group  # noqa: B018  AttributeError after destroy
        host_assert(self.low_latency_mode, "low_latency_mode")
        host_assert(not (async_finish and return_recv_hook), "not(async and return_recv_hook)")
        received, count, src_info, layout = runtime.low_latency.dispatch(
            x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
            cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats, use_fp8,
        )  # fmt: skip
        bound = num_max_dispatch_tokens_per_rank
        handle = (src_info, layout, bound, x.size(1), num_experts)
        kept = (x, topk_idx, received, None, count, src_info, layout)
        late = [received, count]
        return (
            received,
            count,
            handle,
            *self._low_latency_event(late, kept, async_finish, return_recv_hook),
        )

    def _low_latency_event(self, late, kept, asynchronous, hooked):
        if hooked:
            hook = EventHandle()
            hook._writes = core.hold_back(late)
            return self._event([], False), hook.current_stream_wait
        return self._event(late, asynchronous, kept), None

    @torch.no_grad()
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
        runtime = self.runtime
        runtime.group  # noqa: B018  AttributeError after destroy
        host_assert(self.low_latency_mode, "low_latency_mode")
        host_assert(not (async_finish and return_recv_hook), "not(async and return_recv_hook)")
        if use_logfmt or zero_copy:
            raise NotImplementedError("the fake sends bf16 rows, and copies them")
        combined = runtime.low_latency.combine(
            x, topk_idx, topk_weights, handle, out, combine_wait_recv_cost_stats
        )
        kept = (x, topk_idx, topk_weights, handle[0], handle[1], combined)
        event, hook = self._low_latency_event([combined], kept, async_finish, return_recv_hook)
        return combined, event, hook


def both(rows: Tensor, scales: Tensor | None) -> Any:
    return rows if scales is None else (rows, scales)
