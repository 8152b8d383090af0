"""Machines made by hand: nothing, and H200s on NVLink with all that a transport could want."""

from dataclasses import replace
from itertools import permutations

from ep_moe.host import GPU, DeepEP, Host, Nvcc, Pair

CPU = Host(
    python="3.12.3",
    torch="2.11.0+cpu",
    distributed=True,
    gloo=True,
    triton="3.6.0",
)
H200 = GPU("NVIDIA H200", (9, 0), 140 * 2**30, 132)
V1 = DeepEP("/packages/deep_ep", "v1", True, "sgl-deep-ep", "0.1.0")
V2 = DeepEP("/packages/deep_ep", "v2", True, "sgl-deep-ep", "0.1.1")
V25 = DeepEP("/packages/deep_ep", "v2.5", False, "deepinfer-ep", "2.5.0")


def h200s(count: int) -> Host:
    """All of one host joined by NVLink, with DeepEP v2.5."""
    pairs = permutations(range(count), 2)
    return Host(
        python="3.12.3",
        torch="2.11.0+cu130",
        cuda="13.0",
        driver="580.65.06",
        gpus=(H200,) * count,
        pairs=tuple(Pair(*pair, access=True, atomics=True, link="NV18") for pair in pairs),
        distributed=True,
        gloo=True,
        nccl="2.32.3",
        triton="3.6.0",
        nvcc=Nvcc("13.0", "/usr/local/cuda/bin/nvcc"),
        symmetric_memory=True,
        deepep=V25,
    )


def with_pair(host: Host, source: int, target: int, **changes) -> Host:
    """One direction is different."""
    return replace(
        host,
        pairs=tuple(
            replace(pair, **changes) if (pair.source, pair.target) == (source, target) else pair
            for pair in host.pairs
        ),
    )
