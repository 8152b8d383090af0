"""Peers that train: whole layers, or the operators that one is written with."""

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.peer import (
    Peer,
    Unavailable,
    Weights,
    halves,
    interleaved,
    missing,
    require_gpu,
    require_plain_swiglu,
)
from ep_moe import Experts, MoEConfig


def scattermoe(config: MoEConfig, experts: Experts) -> Peer:
    """ScatterMoE: rows are gathered and scattered inside its two grouped products."""
    require_plain_swiglu(config)
    require_gpu(experts)
    try:
        from scattermoe import (  # pyright: ignore[reportMissingImports]
            flatten_sort_count,
            parallel_linear,
        )
    except ImportError as error:
        raise missing("scattermoe 0.3.0 of github.com/shawntan/scattermoe", error) from error

    def run(x: Tensor, ids: Tensor, gate_weights: Tensor) -> Tensor:
        routing = flatten_sort_count(ids, num_experts=config.num_experts)
        gate_up = parallel_linear(x, experts.w_gate_up.mT, config.top_k, *routing, grouped_out=True)
        gate, up = gate_up.chunk(2, dim=-1)
        return parallel_linear(
            F.silu(gate) * up, experts.w_down.mT, 1, *routing, grouped_in=True, gates=gate_weights
        )

    # its bincount waits for the device
    return Peer(run, torch.int64, experts.w_down.dtype, graphable=False)


def sonicmoe(config: MoEConfig, experts: Experts) -> Peer:
    """SonicMoE in its own layout, gate and up rows interleaved.

    Its layer for K choices a token, entered after the router, which its public functions run
    themselves; the public one that takes ids is for any number of choices a token, and slower.
    """
    require_plain_swiglu(config)
    require_gpu(experts)
    try:
        from sonicmoe.enums import ActivationType  # pyright: ignore[reportMissingImports]
        from sonicmoe.functional import (  # pyright: ignore[reportMissingImports]
            TC_topk_router_metadata_triton,
            _DownProjection,
            _UpProjection,
        )
    except ImportError as error:
        what = (
            "sonic-moe 0.1.2.post1, quack-kernels 0.3.11, nvidia-cutlass-dsl 4.4.2, apache-tvm-ffi "
            "0.1.15.post2 and torch-c-dlpack-ext, without their pin of torch, on Python 3.12"
        )
        raise missing(what, error) from error
    if torch.cuda.get_device_capability(experts.w_down.device)[0] < 9:
        raise Unavailable("its kernels start at Hopper")
    num_experts, top_k = config.num_experts, config.top_k
    w_gate_up = interleaved(experts.w_gate_up).requires_grad_()

    def run(x: Tensor, ids: Tensor, gate_weights: Tensor) -> Tensor:
        slots = ids.numel()
        sizes = (num_experts, num_experts + 1, slots, slots, slots)
        frequency, offsets, gather, scatter, reverse = (ids.new_empty(size) for size in sizes)
        TC_topk_router_metadata_triton(
            ids, num_experts, frequency, offsets, gather, scatter, reverse
        )
        indices = (gather, scatter, reverse, None, False)  # K choices: no offsets of tokens
        hidden, pre = _UpProjection.apply(
            x,
            w_gate_up.permute(1, 2, 0),
            None,
            offsets,
            slots,
            top_k,
            *indices,
            ActivationType.SWIGLU,
            not torch.is_grad_enabled(),
        )
        return _DownProjection.apply(
            hidden,
            pre,
            experts.w_down.permute(1, 2, 0),
            None,
            gate_weights,
            offsets,
            len(x),
            top_k,
            *indices,
            ActivationType.SWIGLU,
        )

    def ours(d_w_gate_up: Tensor, d_w_down: Tensor) -> Weights:
        return halves(d_w_gate_up), d_w_down

    weights = (w_gate_up, experts.w_down)
    return Peer(run, torch.int32, torch.float32, graphable=True, weights=weights, ours=ours)


def moe_ops(config: MoEConfig, experts: Experts) -> Peer:
    """moe-ops: its permute, grouped GEMM (by TMA from Hopper on) and unpermute, and silu*up in
    torch."""
    require_plain_swiglu(config)
    require_gpu(experts)
    try:
        from moe_ops import (  # pyright: ignore[reportMissingImports]
            grouped_gemm,
            permute,
            unpermute,
        )
    except ImportError as error:
        raise missing("`pip install moe-ops==0.1.0`", error) from error
    num_experts, top_k = config.num_experts, config.top_k
    if num_experts & (num_experts - 1):
        raise Unavailable("its histogram is of a power of two of experts")

    def run(x: Tensor, ids: Tensor, gate_weights: Tensor) -> Tensor:
        # offsets of length E+1: its products take the E ends too, but not for the weights' gradient
        rows, position, offsets = permute(x, ids, E=num_experts)
        gate, up = grouped_gemm(rows, experts.w_gate_up, offsets).chunk(2, dim=-1)
        y = grouped_gemm(F.silu(gate) * up, experts.w_down, offsets)
        return unpermute(y, position, gate_weights, len(x), top_k)

    return Peer(run, torch.int32, torch.float32, graphable=True)


def liger(config: MoEConfig, experts: Experts) -> Peer:
    """Liger's fused experts: the activation in the first product, little kept for the backward."""
    require_plain_swiglu(config)
    require_gpu(experts)
    try:
        from liger_kernel.ops.fused_moe import (  # pyright: ignore[reportMissingImports]
            LigerFusedMoEFunction,
        )
    except ImportError as error:
        raise missing("`pip install liger-kernel==0.8.5`", error) from error

    def run(x: Tensor, ids: Tensor, gate_weights: Tensor) -> Tensor:
        return LigerFusedMoEFunction.apply(x, experts.w_gate_up, experts.w_down, ids, gate_weights)

    # it asks the device for the number of its tiles
    return Peer(run, torch.int32, torch.float32, graphable=False)
