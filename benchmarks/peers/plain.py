"""Peers of torch's own operators: what one writes without a kernel of one's own."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.peer import Peer, Unavailable, missing, require_plain_swiglu
from ep_moe import Experts, MoEConfig


def torch_loop(config: MoEConfig, experts: Experts) -> Peer:
    """What plain torch does well: one sort, one host sync, two products per expert, and a weighted
    sum without atomics."""
    require_plain_swiglu(config)
    weights = (experts.w_gate_up, experts.w_down)

    def run(x: Tensor, ids: Tensor, gate_weights: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        rows_of_expert = ids.flatten().bincount(minlength=config.num_experts).tolist()
        chunks = x[order // config.top_k].split(rows_of_expert)
        # unbind and not w[e], whose backward would fill a gradient of all experts for each of them
        experts_of_chunk = zip(chunks, *(w.unbind() for w in weights), strict=True)
        outputs = [
            _swiglu(rows @ gate_up.t()) @ down.t() for rows, gate_up, down in experts_of_chunk
        ]
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=x.device)
        y_TKH = torch.cat(outputs)[position].view(*ids.shape, -1)
        return torch.bmm(gate_weights[:, None], y_TKH).squeeze(1)

    return Peer(run, torch.int64, weights[0].dtype, graphable=False)


def torch_grouped_mm(config: MoEConfig, experts: Experts) -> Peer:
    """`grouped_mm` and the least glue that plain torch allows: a sort of 16-bit ids, and rows moved
    by gathers in both directions, so that nothing is added by atomics or after a second sort."""
    require_plain_swiglu(config)
    w_gate_up, w_down = experts.w_gate_up, experts.w_down
    if w_gate_up[0, 0].nbytes % 16 or w_down[0, 0].nbytes % 16:
        raise Unavailable("grouped_mm takes rows of whole 16 bytes")
    numbers = torch.arange(config.num_experts, dtype=torch.int16, device=w_down.device)

    def run(x: Tensor, ids: Tensor, gate_weights: Tensor) -> Tensor:
        by_expert, order = ids.flatten().to(torch.int16).sort(stable=True)
        ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
        position = torch.empty_like(order)
        position.scatter_(0, order, torch.arange(len(order), device=x.device))
        position = position.view_as(ids)
        rows = _Expand.apply(x, order // config.top_k, position)
        hidden = _swiglu(F.grouped_mm(rows, w_gate_up.mT, offs=ends))
        y = F.grouped_mm(hidden, w_down.mT, offs=ends)
        return _WeightedSum.apply(y, gate_weights, order, position)

    # for other dtypes torch falls back to a product per expert, and waits for their sizes
    return Peer(run, torch.int64, w_down.dtype, graphable=w_down.dtype == torch.bfloat16)


def torch_grouped_mm_compiled(config: MoEConfig, experts: Experts) -> Peer:
    """The same through `torch.compile`, which fuses the glue."""
    peer = torch_grouped_mm(config, experts)
    if experts.w_down.dtype != torch.bfloat16:
        raise Unavailable("torch compiles grouped_mm in bfloat16 only")
    # One code object serves every layer and size; past a few recompilations it would run uncompiled
    torch.compiler.reset()
    run = torch.compile(peer.run, dynamic=False, fullgraph=True)
    return replace(peer, run=run)


def transformers_grouped_mm(config: MoEConfig, experts: Experts) -> Peer:
    """Hugging Face's experts of Qwen3-MoE, `grouped_mm` implementation, holding the same
    parameters."""
    require_plain_swiglu(config)
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError as error:
        raise missing("`pip install transformers>=5.17`, with Qwen3MoeExperts", error) from error
    choices = {
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.intermediate_size,
        "num_experts": config.num_experts,
        "experts_implementation": "grouped_mm",
    }
    with torch.device("meta"):
        module = Qwen3MoeExperts(Qwen3MoeConfig(**choices))
    module.gate_up_proj, module.down_proj = experts.w_gate_up, experts.w_down
    return Peer(module, torch.int64, experts.w_down.dtype, graphable=True)


class _Expand(torch.autograd.Function):
    """rows[s] = x[token[s]]; the gradient of x sums what stands at its K positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(position)
        return x[token]

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (position,) = ctx.saved_tensors
        return _sum_at(position, d_rows, None), None, None


class _WeightedSum(torch.autograd.Function):
    """out[t] = sum_k gates[t,k] * y[position[t,k]]; `order` lists the slots by position."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gates: Tensor, order: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(y, gates, order, position)
        return _sum_at(position, y, gates)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, gates, order, position = ctx.saved_tensors
        d_rows = d_out[order // gates.shape[1]]
        d_y = gates.flatten()[order][:, None] * d_rows
        d_gate = torch.linalg.vecdot(d_rows, y)
        return d_y, d_gate[position], None, None


def _sum_at(position: Tensor, rows: Tensor, gates: Tensor | None) -> Tensor:
    """out[t] = sum_k gates[t,k] * rows[position[t,k]].  (T,K), (S,H), (T,K) -> (T,H)"""
    if torch.compiler.is_compiling():  # which makes one kernel of this
        terms = rows[position].float()
        return (terms if gates is None else terms * gates[..., None].float()).sum(1).to(rows.dtype)
    # in eager mode the one operator that gathers and adds without writing what it gathered
    return F.embedding_bag(position, rows, mode="sum", per_sample_weights=gates)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
