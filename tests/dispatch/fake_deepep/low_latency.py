"""V1's low-latency path: every expert's rows in a padded block, weights applied at the origin."""

from collections import deque

import torch
import torch.distributed as dist
from torch import Tensor

from . import core
from .core import exchange, host_assert

LOW_LATENCY_HIDDEN = (2048, 2560, 4096, 5120, 6144, 7168, 8192)


def layout_bytes(bound: int, hidden: int, num_experts: int) -> int:
    """Two buffers of everything: sent, received, and a signal per expert."""
    scales = hidden // 128
    host_assert(scales * 4 <= hidden, "num_scales * sizeof(float) <= hidden")
    out = 16 + max(hidden * 2, hidden + scales * 4)
    back = scales * 4 + hidden * 2
    sent = max(bound * out, num_experts * bound * back)
    received = num_experts * bound * max(out, back)
    host_assert(sent % 16 == 0, "send_buffer_bytes % sizeof(int4) == 0")
    return 2 * (sent + received + core.align(num_experts * 4, 128))


class LowLatency:
    def __init__(self, group: dist.ProcessGroup, num_rdma_bytes: int, num_qps: int, hidden: tuple):
        self.group, self.num_rdma_bytes = group, num_rdma_bytes
        self.num_qps, self.hidden = num_qps, hidden
        self.num_ranks, self.rank = group.size(), group.rank()
        self.results: deque[Tensor] = deque()
        self.layout: tuple[int, int, int] | None = None

    def check_room(self, bound: int, hidden: int, num_experts: int) -> None:
        needed = layout_bytes(bound, hidden, num_experts)
        host_assert(needed <= self.num_rdma_bytes, "layout.total_bytes <= num_rdma_bytes")

    def check_stats(self, stats: Tensor | None, dtype: torch.dtype, size: int, name: str) -> None:
        if stats is not None:
            host_assert(stats.dtype == dtype, f"{name}->scalar_type()")
            host_assert(stats.dim() == 1 and stats.is_contiguous(), f"{name}->dim() == 1")
            host_assert(len(stats) == size, f"{name}->size(0)")

    def _keep(self, result: Tensor) -> Tensor:
        """There are two buffers: a third result is written over the first."""
        self.results.append(result)
        if len(self.results) > 2:
            core.poison_(self.results.popleft())
        return result

    def dispatch(self, x, topk_idx, bound, num_experts, stats, wait_stats, use_fp8):
        num_tokens, hidden = core.shape_of(x, 2, "x")
        ranks, num_topk = self.num_ranks, core.shape_of(topk_idx, 2, "topk_idx")[1]
        host_assert(x.is_contiguous() and x.dtype == torch.bfloat16, "x is torch::kBFloat16")
        host_assert(hidden % 128 == 0, "x.size(1) % sizeof(int4) == 0 and x.size(1) % 128 == 0")
        host_assert(topk_idx.is_contiguous(), "topk_idx.dim() == 2 and topk_idx.is_contiguous()")
        host_assert(
            len(topk_idx) == num_tokens <= bound,
            "x.size(0) == topk_idx.size(0) and x.size(0) <= num_max_dispatch_tokens_per_rank",
        )
        host_assert(topk_idx.dtype == core.topk_idx_t, "topk_idx.scalar_type() == torch::kInt64")
        host_assert(num_experts % ranks == 0, "num_experts % num_ranks == 0")
        per_rank = num_experts // ranks
        self.check_stats(stats, torch.int32, per_rank, "cumulative_local_expert_recv_stats")
        self.check_stats(wait_stats, torch.int64, ranks, "dispatch_wait_recv_cost_stats")
        self.check_room(bound, hidden, num_experts)
        host_assert(ranks * bound % 4 == 0, "(num_ranks * num_max_dispatch_tokens) % 4 == 0")
        host_assert(num_topk <= 11, "num_topk <= kNumMaxTopK")
        host_assert(hidden in self.hidden, "false and Unsupported hidden")
        if use_fp8:
            raise NotImplementedError("the fake's low-latency path carries bf16: use_fp8=False")
        fault = core.reads_nowhere(topk_idx, num_experts)
        if self.num_qps < per_rank:
            fault = "num_rc_per_pe >= num_local_experts"
        # A slower rank still reads what the places of another layout are written over.
        if self.layout not in (None, (bound, hidden, num_experts)):
            fault = "the buffer is dirty: another layout than before, without cleaning"
        self.layout = (bound, hidden, num_experts)
        sent = []
        for rank in range(ranks):
            blocks = []
            for expert in range(rank * per_rank, (rank + 1) * per_rank):
                tokens = (topk_idx == expert).nonzero()[:, 0]
                tokens = core.shuffled(tokens, self.rank)
                blocks.append((tokens.int(), x[tokens]))
            sent.append(blocks)
        agreed = {
            "call": "low_latency_dispatch", "bound": bound, "num_experts": num_experts,
            "hidden": hidden, "topk": num_topk,
        }  # fmt: skip
        got = exchange(self.group, agreed, sent, fault)

        received = core.unwritten((per_rank, ranks * bound, hidden), torch.bfloat16)
        src_info = core.unwritten((per_rank, ranks * bound), torch.int32)
        layout = torch.zeros(per_rank, ranks, dtype=torch.int64)
        counts = torch.zeros(per_rank, dtype=torch.int32)
        for expert in range(per_rank):
            for source in core.shuffled(torch.arange(ranks), self.rank).tolist():
                tokens, rows = got[source][expert]
                start = int(counts[expert])
                end = start + len(tokens)
                received[expert, start:end], src_info[expert, start:end] = rows, tokens
                layout[expert, source] = len(tokens) + (start << 32)
                counts[expert] = end
        if stats is not None:
            stats += counts
        return self._keep(received), counts, src_info, layout

    def combine(self, x, topk_idx, topk_weights, handle, out, wait_stats):
        src_info, layout, bound, _, num_experts = handle
        blocks, width, hidden = core.shape_of(x, 3, "x")
        ranks, per_rank = self.num_ranks, num_experts // self.num_ranks
        host_assert(x.is_contiguous() and x.dtype == torch.bfloat16, "x is torch::kBFloat16")
        host_assert(blocks == per_rank, "x.size(0) == num_experts / num_ranks")
        host_assert(width == ranks * bound, "x.size(1) == num_ranks * bound")
        host_assert(hidden % 128 == 0, "x.size(2) % sizeof(int4) == 0 and x.size(2) % 128 == 0")
        host_assert(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx.is_contiguous()")
        host_assert(topk_idx.shape == topk_weights.shape, "topk_idx.size(0) == topk_weights")
        host_assert(topk_idx.dtype == core.topk_idx_t, "topk_idx.scalar_type() == torch::kInt64")
        host_assert(topk_weights.is_contiguous(), "topk_weights.is_contiguous()")
        host_assert(len(topk_weights) <= bound, "topk_weights.size(0) <= bound")
        host_assert(topk_weights.dtype == torch.float32, "topk_weights is torch::kFloat32")
        self.check_stats(wait_stats, torch.int64, ranks, "combine_wait_recv_cost_stats")
        self.check_room(bound, hidden, num_experts)
        shape = (len(topk_idx), hidden)
        if out is not None:
            host_assert(tuple(out.shape) == shape and out.is_contiguous(), "out->size(0)")
            host_assert(out.dtype == x.dtype, "out->scalar_type() == x.scalar_type()")
        host_assert(topk_idx.shape[1] <= 11, "num_topk <= kNumMaxTopk")
        host_assert(hidden in self.hidden, "false and Unsupported hidden")
        sent = []
        for source in range(ranks):
            rows = []
            for expert in range(per_rank):
                count, start = (
                    int(layout[expert, source]) & 0xFFFFFFFF,
                    layout[expert, source] >> 32,
                )
                at = slice(int(start), int(start) + count)
                rows.append((src_info[expert, at].long(), x[expert, at]))
            sent.append(rows)
        agreed = {
            "call": "low_latency_combine", "bound": bound, "num_experts": num_experts,
            "hidden": hidden,
        }  # fmt: skip
        got = exchange(self.group, agreed, sent, core.reads_nowhere(topk_idx, num_experts))
        total = torch.zeros(shape)
        for slot in range(topk_idx.shape[1]):  # fp32, in the order of the slots
            for rank in range(ranks):
                for expert in range(per_rank):
                    at = topk_idx[:, slot] == rank * per_rank + expert
                    if at.any():
                        tokens, rows = got[rank][expert]
                        arrived = torch.full(shape, float("nan"))
                        arrived[tokens] = rows.float()
                        total[at] += arrived[at] * topk_weights[at, slot, None]
        if out is None:
            return self._keep(total.bfloat16())
        return out.copy_(total)
