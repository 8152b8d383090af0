"""Peers without a backward: the expert layers of inference engines."""

import torch
from torch import Tensor

from benchmarks.harness import event_clock
from benchmarks.peers.peer import (
    Peer,
    Unavailable,
    interleaved,
    missing,
    require_gpu,
    require_plain_swiglu,
)
from ep_moe import Experts, MoEConfig

# What vLLM's own choice is tried against, from large batches to decode.
_VLLM_FIELDS = (
    *("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M"),
    *("num_warps", "num_stages"),
)
_VLLM_TILES = (
    (128, 256, 64, 16, 8, 3),
    (128, 256, 64, 16, 8, 4),
    (128, 128, 64, 16, 8, 4),
    (64, 128, 64, 8, 4, 4),
    (32, 128, 64, 1, 4, 4),
    (16, 128, 128, 1, 4, 4),
    (16, 64, 128, 1, 4, 4),
)


def triton_kernels(config: MoEConfig, experts: Experts) -> Peer:
    """`matmul_ogs` of triton_kernels with gather, gate weights and our activation fused.

    Its own SwiGLU is silu(gate) * (up + 1), whatever its options, so silu(gate) * up is passed
    through the interface that it takes activations by; it sees gate and up interleaved.
    """
    require_plain_swiglu(config)
    require_gpu(experts)
    try:
        from triton_kernels.matmul_ogs import (  # pyright: ignore[reportMissingImports]
            FnSpecs,
            FusedActivation,
            matmul_ogs,
        )
        from triton_kernels.routing import (  # pyright: ignore[reportMissingImports]
            routing_from_bitmatrix,
        )
        from triton_kernels.tensor import Bitmatrix  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        what = (
            "triton_kernels 3.5.1 as the package of that name: python/triton_kernels of "
            "triton-lang/triton, or vllm/third_party in the wheel of vLLM 0.23.0"
        )
        raise missing(what, error) from error
    from benchmarks.peers.kernels import expert_bits, silu_mul

    num_experts, top_k = config.num_experts, config.top_k
    if top_k & (top_k - 1):
        raise Unavailable("its routing takes a power of two of choices a token")
    w_gate_up = interleaved(experts.w_gate_up).mT.contiguous()  # (E,H,2I)
    w_down = experts.w_down.detach().mT.contiguous()  # (E,I,H)
    activation = FusedActivation(FnSpecs("silu_mul", silu_mul, ()), (), 2)

    def run(x: Tensor, ids: Tensor, gate_weights: Tensor) -> Tensor:
        bits = expert_bits(ids, num_experts)
        chosen = Bitmatrix(bits, [len(ids), 32 * bits.shape[1]], [len(ids), None])
        routing, gather, scatter = routing_from_bitmatrix(
            chosen, gate_weights, ids, num_experts, top_k
        )
        hidden = matmul_ogs(
            x, w_gate_up, None, routing, gather_indx=gather, fused_activation=activation
        )
        return matmul_ogs(
            hidden, w_down, None, routing, scatter_indx=scatter, gammas=routing.gate_scal
        )

    return Peer(run, torch.int32, torch.float32, graphable=True, trains=False)


def vllm(config: MoEConfig, experts: Experts) -> Peer:
    """vLLM's Triton experts, at the fastest of a few tiles and its own choice for each number of
    tokens, tried at the first call."""
    require_plain_swiglu(config)
    require_gpu(experts)
    try:
        from vllm.model_executor.layers.fused_moe import (  # pyright: ignore[reportMissingImports]
            fused_experts,
            override_config,
        )
    except ImportError as error:
        raise missing("`pip install vllm==0.23.0`", error) from error
    w_gate_up, w_down = experts.w_gate_up.detach(), experts.w_down.detach()
    candidates = [None, *(dict(zip(_VLLM_FIELDS, tiles, strict=True)) for tiles in _VLLM_TILES)]
    fastest: dict[int, dict[str, int] | None] = {}

    def run(x: Tensor, ids: Tensor, gate_weights: Tensor) -> Tensor:
        def with_tiles(tiles: dict[str, int] | None) -> Tensor:
            with override_config(tiles):
                return fused_experts(x, w_gate_up, w_down, gate_weights, ids)

        def ms(tiles: dict[str, int] | None) -> float:
            with_tiles(tiles)  # compiles
            return event_clock(lambda: [with_tiles(tiles) for _ in range(10)])

        if len(x) not in fastest:
            fastest[len(x)] = min(candidates, key=ms)
        return with_tiles(fastest[len(x)])

    return Peer(run, torch.int32, torch.float32, graphable=True, trains=False)
