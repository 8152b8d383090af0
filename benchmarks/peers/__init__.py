"""Other people's expert layers on our weights: from x, ids and gate weights to y, on one device.

A peer gets what its own router would give it (dtypes included), prepared outside the timed call,
and is checked against ours before it is timed. Where one cannot run, `Unavailable` says why.

Not here: MegaBlocks, whose last release pins torch below 2.7.1 and builds its own CUDA extensions,
and Unsloth, whose grouped GEMM comes only with an import that patches torch and transformers for
everybody else in the process.
"""

from collections.abc import Callable

from benchmarks.peers.libraries import liger, moe_ops, scattermoe, sonicmoe
from benchmarks.peers.peer import Peer, Unavailable, dense_products, error_limit, largest_error
from benchmarks.peers.plain import (
    torch_grouped_mm,
    torch_grouped_mm_compiled,
    torch_loop,
    transformers_grouped_mm,
)
from benchmarks.peers.serving import triton_kernels, vllm
from ep_moe import Experts, MoEConfig

__all__ = [
    "PACKAGES",
    "PEERS",
    "Peer",
    "Unavailable",
    "dense_products",
    "error_limit",
    "largest_error",
]

# To add a peer: a function in one of the files above and its line here.
PEERS: dict[str, Callable[[MoEConfig, Experts], Peer]] = {
    "torch_loop": torch_loop,
    "torch_grouped_mm": torch_grouped_mm,
    "torch_grouped_mm_compiled": torch_grouped_mm_compiled,
    "transformers_grouped_mm": transformers_grouped_mm,
    "scattermoe": scattermoe,
    "triton_kernels": triton_kernels,
    "sonicmoe": sonicmoe,
    "vllm": vllm,
    "moe_ops": moe_ops,
    "liger": liger,
}

# Distributions whose versions are part of a measurement.
PACKAGES = (
    *("transformers", "scattermoe", "triton_kernels", "vllm", "moe-ops", "liger-kernel"),
    *("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl"),
)
