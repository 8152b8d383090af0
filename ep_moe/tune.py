"""Time the tiles of the grouped products on this GPU, and keep the fastest of each.

`ep-moe tune` writes the files that `kernels.choice` reads. A tile is timed on a layer's own sizes
and on random, nearly even groups; the fastest shape first, then its variants.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ep_moe import ops
from ep_moe.config import MoEConfig
from ep_moe.kernels.choice import Product, default_tile, read_table
from ep_moe.kernels.device import architecture
from ep_moe.kernels.grouped_gemm import grouped_gemm, hidden, hidden_backward
from ep_moe.kernels.grouped_wgrad import grouped_wgrad
from ep_moe.kernels.tiles import Tile
from ep_moe.types import Packed

Launch = Callable[[Tile], object]

ROUNDS, ROUND_MS = 5, 4.0


class Operands(NamedTuple):
    """What flows through the experts of one rank."""

    rows: Tensor  # (A,H)
    d_out: Tensor  # (A,H)
    gates: Tensor  # (A,K)
    packed: Packed
    w_gate_up: Tensor  # (E_loc,P,H)
    w_down: Tensor  # (E_loc,H,I)
    pre: Tensor  # (S,P)
    h: Tensor  # (S,I)


class Timed(NamedTuple):
    product: Product
    tile: Tile
    ms: float


def operands(
    config: MoEConfig, tokens: int, ranks: int, dtype: torch.dtype, device: torch.device
) -> Operands:
    """Of one of `ranks` ranks with `tokens` tokens each: random values, random nearly even ids.

    As many choices arrive as stay at home on one rank, K of them in a row.
    """
    experts, h, i = config.num_experts // ranks, config.hidden_size, config.intermediate_size
    top_k = min(config.top_k, experts)
    ids = torch.rand(tokens, experts, device=device).topk(top_k, dim=1).indices.int()
    packed = ops.pack(ids, experts, ids.numel())
    shapes = {
        "rows": (tokens, h),
        "d_out": (tokens, h),
        "w_gate_up": (experts, config.pre_activation_size, h),
        "w_down": (experts, h, i),
        "pre": (ids.numel(), config.pre_activation_size),
        "h": (ids.numel(), i),
    }
    values = {
        name: torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    return Operands(gates=torch.rand(ids.shape, device=device), packed=packed, **values)


def launches(o: Operands, activation: str, *, training: bool) -> Iterator[tuple[Product, Launch]]:
    """Each product of the experts, and how it is run with a tile."""
    experts, pre_size, h = o.w_gate_up.shape
    i, size, mean = o.w_down.shape[2], o.rows.itemsize, len(o.pre) // experts
    index, offsets = o.packed.arrived_of_packed, o.packed.offsets
    yield (
        Product("hidden", size, mean, h, pre_size),
        lambda tile: hidden(
            o.rows, o.w_gate_up, o.packed, activation=activation, keep=training, tile=tile
        ),
    )
    yield (
        Product("product", size, mean, i, h),
        lambda tile: grouped_gemm(o.h, o.w_down, offsets, tile=tile),
    )
    if not training:
        return
    yield (
        Product("gradient", size, mean, h, i),
        lambda tile: hidden_backward(
            o.d_out,
            o.w_down,
            o.packed,
            o.pre,
            gates=o.gates,
            activation=activation,
            tile=tile,
        ),
    )
    yield (
        Product("dgrad", size, mean, pre_size, h),
        lambda tile: grouped_gemm(o.pre, o.w_gate_up, offsets, transposed=True, tile=tile),
    )
    yield (
        Product("wgrad", size, mean, pre_size, h),
        lambda tile: grouped_wgrad(
            o.pre, o.rows, offsets, arrived_of_packed=index, gathered="x", tile=tile
        ),
    )
    yield (
        Product("wgrad", size, mean, h, i),
        lambda tile: grouped_wgrad(
            o.d_out, o.h, offsets, arrived_of_packed=index, gathered="d_y", tile=tile
        ),
    )


def shapes(product: Product, arch: str) -> list[Tile]:
    """The first candidates; some ask for more than the GPU has, and are passed over."""
    tma = arch in ("sm_90", "sm_100")
    halved = product.form == "hidden"  # two columns of the weight for each of h
    if product.itemsize == 4:
        found = [Tile(m, n, 32, 4, s) for m in (32, 64) for n in (32, 64) for s in (2, 3)]
    elif product.rows <= 16 and product.form != "wgrad":
        found = [
            Tile(16, n, k, 4, stages, per_sm=per_sm)
            for n, k in ((32, 128), (64, 128), (128, 128), (64, 256), (32, 256))
            for stages in (3, 4, 5)
            for per_sm in (2, 4, 64)
        ]
    else:
        found = [
            Tile(128, 256, 64, 8, 3, specialize=True),
            Tile(128, 256, 64, 8, 4, tma_store=False, specialize=True),
            Tile(256, 128, 64, 8, 3, specialize=True),
            Tile(128, 256, 64, 8, 3),
            Tile(128, 128, 64, 8, 4),
            Tile(128, 128, 64, 4, 4),
            Tile(128, 128, 64, 4, 3, per_sm=2, tma_store=False),
            Tile(128, 256, 64, 8, 4, tma_store=False),
            Tile(128, 128, 32, 4, 4, per_sm=2),
            Tile(256, 128, 64, 8, 3),
            Tile(64, 256, 64, 4, 3),
            Tile(64, 128, 64, 4, 4, per_sm=2),
        ]
    if product.form == "gradient":  # more in registers: fewer numbers for each thread
        few = [t for t in found if t.block_m * t.block_n // t.warps <= 2048]
        afterwards = [t._replace(step=0) for t in found]
        found = [Tile(128, 256, 64, 8, 3, specialize=True), *few, *afterwards]
    if halved:
        found = [t._replace(block_n=t.block_n // 2) for t in found]
    if arch != "sm_90":
        found = [t for t in found if not t.specialize]
    return [default_tile(product, arch), *(t._replace(tma=tma) for t in found)]


def variants(tile: Tile, product: Product) -> list[Tile]:
    """The same shape, run otherwise."""
    found = [tile._replace(group_m=m) for m in (4, 64)]
    if tile.specialize:
        return [*found, tile._replace(copy=not tile.copy)]
    if product.form != "wgrad":  # an expert without rows is a loop without rounds there
        found.append(tile._replace(flatten=not tile.flatten))
        if tile.block_m <= 32:
            found.append(tile._replace(swap=not tile.swap))
    if product.form in ("hidden", "gradient", "wgrad"):
        found.append(tile._replace(copy=not tile.copy))
    if tile.tma:
        found.append(tile._replace(tma=False))
        found.append(tile._replace(tma_store=not tile.tma_store))
    return found


def fastest(product: Product, launch: Launch, device: torch.device) -> Timed:
    """Raises RuntimeError where no candidate runs."""
    arch = architecture(device)
    best = _best(product, launch, shapes(product, arch), device)
    return _best(product, launch, [best.tile, *variants(best.tile, product)], device)


def tune(
    config: MoEConfig,
    *,
    tokens: int,
    ranks: int = 1,
    training: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device,
) -> Iterator[Timed]:
    """The fastest tile of each product of a layer."""
    flow = operands(config, tokens, ranks, dtype, device)
    for product, launch in launches(flow, config.activation, training=training):
        yield fastest(product, launch, device)


def merge(path: Path, found: list[Timed]) -> None:
    """Into the table at `path`, in place of what it had for the same products."""
    known = dict(read_table(path.read_text(), str(path))) if path.exists() else {}
    known |= {timed.product: timed.tile for timed in found}
    rows = [
        json.dumps({"product": product._asdict(), "tile": tile._asdict()})
        for product, tile in sorted(known.items())
    ]
    path.write_text("[\n" + ",\n".join(rows) + "\n]\n")


def _best(product: Product, launch: Launch, tiles: list[Tile], device: torch.device) -> Timed:
    """By the median over rounds in which all take turns: a GPU slows down as it gets warm."""
    runs = {tile: 1 for tile in dict.fromkeys(tiles) if _runs(launch, tile)}
    if not runs:
        raise RuntimeError(f"no tile runs for {product}")
    for tile in runs:
        runs[tile] = max(1, round(ROUND_MS / max(_ms(launch, tile, 1, device), 1e-3)))
    times: dict[Tile, list[float]] = {tile: [] for tile in runs}
    for _ in range(ROUNDS):
        for tile, count in runs.items():
            times[tile].append(_ms(launch, tile, count, device))
    medians = {tile: statistics.median(ms) for tile, ms in times.items()}
    tile = min(medians, key=medians.__getitem__)
    return Timed(product, tile, medians[tile])


def _runs(launch: Launch, tile: Tile) -> bool:
    from triton.runtime.errors import OutOfResources

    try:
        launch(tile)
    except OutOfResources:
        return False
    return True


def _ms(launch: Launch, tile: Tile, count: int, device: torch.device) -> float:
    """Of one launch, on the device, of `count` in a row; from a CUDA graph, for a short kernel may
    be over before the host has launched the next."""

    def work() -> None:
        for _ in range(count):
            launch(tile)

    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) / count * 1e3
    if count > 1:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        work = graph.replay
    else:
        work()  # still running when the host has launched the one that is timed
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count
