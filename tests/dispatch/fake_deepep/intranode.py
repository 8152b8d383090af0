"""V1's moves within one host, and the sizes and checks of its C++ side."""

import torch
import torch.distributed as dist
from torch import Tensor

from . import core
from .core import EventHandle, data_ptr, exchange, host_assert


class Config:
    """How many SMs and how many rows in flight: what a buffer must have room for."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        nvl_send, nvl_recv = num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens
        rdma_send, rdma_recv = num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens
        host_assert(num_sms >= 0, "num_sms >= 0")
        host_assert(0 < nvl_send < nvl_recv, "nvl_chunked_send_tokens < nvl_chunked_recv_tokens")
        host_assert(rdma_send > 0 and rdma_recv > 0, "num_max_rdma_chunked_send_tokens > 0")
        rdma_recv = core.align(rdma_recv, rdma_send)
        host_assert(rdma_send <= rdma_recv // 2, "rdma_send_tokens <= rdma_recv_tokens / 2")
        self._num_sms, self._nvl_recv = num_sms, nvl_recv

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        host_assert(num_ranks < 8 or num_ranks % 8 == 0, "num_ranks < 8 or num_ranks % 8 == 0")
        queues = self._num_sms // 2 * min(num_ranks, 8)
        worst_row = hidden_bytes + 8 + 128 * 8 + 128 * 4 + 128 * 4
        per_queue = (2 * max(num_ranks // 8, 1) + 3) * 4 + self._nvl_recv * worst_row
        return core.align(queues * per_queue, 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        if num_ranks > 8:
            raise NotImplementedError("the fake stays within one host")
        return 0


class Runtime:
    """The C++ side: the moves, and whether it still exists."""

    def __init__(
        self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int, low: bool
    ):
        ranks = group.size()
        host_assert(num_nvl_bytes % 128 == 0, "num_nvl_bytes % NUM_BUFFER_ALIGNMENT_BYTES == 0")
        host_assert(num_rdma_bytes % 128 == 0, "num_rdma_bytes % NUM_BUFFER_ALIGNMENT_BYTES == 0")
        host_assert(ranks < 8 or ranks % 8 == 0, "num_ranks < 8 or num_ranks % 8 == 0")
        host_assert(
            num_rdma_bytes == 0 or ranks > 8 or low,
            "num_ranks > NUM_MAX_NVL_PEERS or low_latency_mode",
        )
        if ranks > 8 and not low:
            raise NotImplementedError("the fake stays within one host")
        self.group, self.num_ranks, self.rank = group, ranks, group.rank()
        self.num_nvl_bytes = num_nvl_bytes

    def check_stream(self, previous: object, asynchronous: bool, on_comm_stream: bool) -> None:
        if previous is not None:
            core.argument(previous, EventHandle, "previous_event")
            previous.current_stream_wait()
        host_assert(
            not on_comm_stream or (previous is not None and asynchronous),
            "previous_event.has_value() and async",
        )

    def destroy(self) -> None:
        dist.barrier(self.group)

    def layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, ...]:
        host_assert(topk_idx.dim() == 2, "topk_idx.dim() == 2")
        host_assert(topk_idx.is_contiguous(), "topk_idx.is_contiguous()")
        host_assert(num_experts > 0, "num_experts > 0")
        data_ptr(topk_idx, core.topk_idx_t, "topk_idx")
        here = topk_idx[..., None] == torch.arange(num_experts)
        per_rank = num_experts // self.num_ranks
        ranks = torch.arange(self.num_ranks)
        owned = (topk_idx[..., None] >= ranks * per_rank) & (
            topk_idx[..., None] < (ranks + 1) * per_rank
        )
        in_rank = owned.any(1)
        return in_rank.sum(0).int(), here.sum((0, 1)).int(), in_rank

    def dispatch(self, x, scales, topk_idx, topk_weights, counts, in_rank, expert_counts, cached,
                 alignment, worst, config):  # fmt: skip
        num_tokens, hidden, num_topk, packs = self._check_dispatched(
            x, scales, topk_idx, topk_weights, counts, in_rank, expert_counts, cached, config
        )
        channels, ranks = config._num_sms // 2, self.num_ranks
        per_rank = 0 if cached else len(expert_counts) // ranks
        if worst and not cached:
            host_assert(topk_idx is not None, "topk_idx.has_value()")
        queues, rows = channels * ranks, config._nvl_recv
        needed = 4 * ranks * ranks + 16 * queues
        needed += queues * rows * (hidden * x.element_size() + 4 + 12 * num_topk + 4 * packs)
        host_assert(needed <= self.num_nvl_bytes, "num_channels * num_ranks * ... <= num_nvl_bytes")
        host_assert(ranks in (2, 4, 8), "false and Unsupported ranks")
        host_assert(num_topk <= 32, "num_topk <= 32")
        row = hidden * x.element_size()
        host_assert(row % 32 == 0 and row // 2 + 8 <= 8192, "hidden_int4 % 2 == 0 and half fits")

        fault = ""
        if not cached and not torch.equal(counts, in_rank.sum(0).int()):
            fault = "timeout: num_tokens_per_rank disagrees with is_token_in_rank"
        wire, sent = x.view(torch.uint8), []
        per_channel = max(-(-num_tokens // channels), 1)
        ends = (torch.arange(1, channels + 1) * per_channel).clamp(max=num_tokens)
        running = torch.cat([torch.zeros(1, ranks), in_rank.cumsum(0)]).int()
        channel_prefix = running[ends].T.contiguous()
        for rank in range(ranks):
            tokens = in_rank[:, rank].nonzero()[:, 0]
            ids = gates = None
            if topk_idx is not None:
                ids = topk_idx[tokens] - rank * per_rank
                ids = ids.masked_fill((ids < 0) | (ids >= per_rank), -1)
                gates = topk_weights[tokens].masked_fill(ids < 0, 0.0)
            mine = slice(rank * per_rank, (rank + 1) * per_rank)
            sent.append((
                tokens.int(), wire[tokens], None if scales is None else scales[tokens], ids, gates,
                in_rank.sum(0).int(), channel_prefix[rank],
                None if cached else expert_counts[mine],
            ))  # fmt: skip
        agreed = {
            "call": "dispatch", "hidden": hidden, "dtype": x.dtype, "num_topk": num_topk,
            "scales": packs, "experts per rank": per_rank, "channels": channels, "cached": cached,
        }  # fmt: skip
        got = exchange(self.group, agreed, sent, fault)
        return got, channel_prefix, send_head(in_rank, ends)

    def _check_dispatched(
        self, x, scales, topk_idx, topk_weights, counts, in_rank, expert_counts, cached, config
    ):
        ranks = self.num_ranks
        host_assert(config._num_sms % 2 == 0, "config.num_sms % 2 == 0")
        host_assert(in_rank.dtype == torch.bool, "is_token_in_rank.scalar_type() == torch::kBool")
        if not cached:
            host_assert(expert_counts.dtype == torch.int32, "num_tokens_per_expert is kInt32")
            host_assert(counts.dtype == torch.int32, "num_tokens_per_rank is torch::kInt32")
        num_tokens, hidden = core.shape_of(x, 2, "x")
        host_assert(x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
        host_assert(hidden * x.element_size() % 16 == 0, "(hidden * element_size) % sizeof(int4)")
        host_assert(in_rank.dim() == 2 and in_rank.is_contiguous(), "is_token_in_rank contiguous")
        host_assert(tuple(in_rank.shape) == (num_tokens, ranks), "is_token_in_rank.size(0)")
        if not cached:
            experts = core.shape_of(expert_counts, 1, "num_tokens_per_expert")[0]
            host_assert(experts % ranks == 0, "num_tokens_per_expert->size(0) % num_ranks == 0")
            host_assert(experts // ranks <= 128, "num_experts / num_ranks <= kNumThreads")
            host_assert(tuple(counts.shape) == (ranks,), "num_tokens_per_rank->size(0)")
        host_assert((topk_idx is None) == (topk_weights is None), "topk_idx.has_value() == ...")
        num_topk = packs = 0
        if topk_idx is not None:
            host_assert(topk_idx.dim() == 2 and topk_idx.is_contiguous(), "topk_idx->is_contiguous")
            num_topk = topk_idx.shape[1]
            host_assert(topk_weights.dim() == 2 and topk_weights.is_contiguous(), "topk_weights")
            host_assert(len(topk_idx) == len(topk_weights) == num_tokens, "num_tokens == size(0)")
            host_assert(topk_weights.shape[1] == num_topk, "num_topk == topk_weights->size(1)")
            host_assert(topk_weights.dtype == torch.float32, "topk_weights is torch::kFloat32")
            data_ptr(topk_idx, core.topk_idx_t, "topk_idx")
        if scales is not None:
            host_assert(x.element_size() == 1, "x.element_size() == 1")
            host_assert(
                scales.dtype in (torch.float32, torch.int32), "x_scales is kFloat32 or kInt"
            )
            host_assert(scales.dim() == 2 and len(scales) == num_tokens, "x_scales->size(0)")
            packs = scales.shape[1]
        else:
            host_assert(x.element_size() <= 2, "bf16, or one byte with scales")
        return num_tokens, hidden, num_topk, packs

    def combine(self, x, topk_weights, biases, handle, config):
        rank_prefix, _, channel_prefix, src_idx, _, head = handle
        rows, hidden = core.shape_of(x, 2, "x")
        ranks, channels = self.num_ranks, config._num_sms // 2
        host_assert(x.is_contiguous(), "x.dim() == 2 and x.is_contiguous()")
        host_assert(config._num_sms % 2 == 0, "config.num_sms % 2 == 0")
        host_assert(len(src_idx) == rows, "src_idx.size(0) == num_tokens")
        host_assert(head.shape[1] == ranks, "send_head.size(1) == num_ranks")
        host_assert(tuple(rank_prefix.shape) == (ranks, ranks), "rank_prefix_matrix.size(0)")
        host_assert(
            tuple(channel_prefix.shape) == (ranks, channels), "channel_prefix_matrix.size(1)"
        )
        host_assert(hidden * x.element_size() % 16 == 0, "(hidden * element_size) % sizeof(int4)")
        num_topk = 0
        if topk_weights is not None:
            host_assert(topk_weights.dim() == 2 and topk_weights.is_contiguous(), "topk_weights")
            host_assert(len(topk_weights) == rows, "topk_weights->size(0) == num_tokens")
            host_assert(topk_weights.dtype == torch.float32, "topk_weights is torch::kFloat32")
            num_topk = topk_weights.shape[1]
            host_assert(num_topk <= 32, "num_topk <= 32")
        total = core.check_bias(biases, x, len(head))
        queues = channels * ranks
        needed = 8 * queues
        needed += queues * config._nvl_recv * (hidden * x.element_size() + 4 + 4 * num_topk)
        host_assert(needed <= self.num_nvl_bytes, "num_channels * num_ranks * ... <= num_nvl_bytes")
        host_assert(x.dtype == torch.bfloat16, "false and Unsupported type")
        host_assert(ranks in (2, 4, 8), "false and Unsupported ranks")

        ends = [0, *rank_prefix[:, self.rank].tolist()]
        sent = []
        for rank in range(ranks):
            at = slice(ends[rank], ends[rank + 1])
            sent.append((src_idx[at].long(), x[at], None if num_topk == 0 else topk_weights[at]))
        agreed = {"call": "combine", "hidden": hidden, "topk": num_topk, "channels": channels}
        got = exchange(self.group, agreed, sent)
        gates = None if topk_weights is None else torch.zeros(len(head), num_topk)
        for rank, (tokens, values, weights) in enumerate(got):  # fp32, in rank order
            arrived = torch.full(total.shape, float("nan"))
            arrived[tokens] = values.float()
            expected = head[:, rank] >= 0
            total[expected] += arrived[expected]
            if gates is not None:
                gates[tokens] += weights
        return total.bfloat16(), gates


def send_head(in_rank: Tensor, ends: Tensor) -> Tensor:
    """(T, R) int32: a token's place in its channel's queue to a rank, or -1."""
    head = torch.full(in_rank.shape, -1, dtype=torch.int32)
    for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        places = in_rank[start:end].cumsum(0).int() - 1
        head[start:end] = places.masked_fill(~in_rank[start:end], -1)
    return head


def received(got, rows: int, x: Tensor, scales: Tensor | None, num_topk: int):
    """Rows by source rank and token; behind the last of them x is unwritten and ids are -1."""
    arrived = sum(len(tokens) for tokens, *_ in got)
    recv_x = core.unwritten((rows, x.shape[1]), x.dtype)
    recv_x.view(torch.uint8)[:arrived] = torch.cat([item[1] for item in got])
    recv_scales = recv_idx = recv_weights = None
    if scales is not None:
        recv_scales = core.unwritten((rows, scales.shape[1]), scales.dtype)
        recv_scales[:arrived] = torch.cat([item[2] for item in got])
    if num_topk:
        recv_idx = torch.full((rows, num_topk), -1, dtype=core.topk_idx_t)
        recv_idx[:arrived] = torch.cat([item[3] for item in got])
        recv_weights = core.unwritten((rows, num_topk), torch.float32)
        recv_weights[:arrived] = torch.cat([item[4] for item in got])
    return recv_x, recv_scales, recv_idx, recv_weights
