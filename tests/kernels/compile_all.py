"""Compile every kernel for GPUs that are not here: `python -m tests.kernels.compile_all TARGET`.

Prints one JSON object a kernel: target, kernel, variant, shared memory, and on NVIDIA registers,
spilled bytes and the instructions that multiply and that move tiles. A kernel that does not
compile, or asks for more than the GPU has, ends the program.
"""

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from ep_moe.kernels import (
    choice,
    gather,
    grouped_gemm,
    grouped_wgrad,
    load_loss,
    pack,
    select,
    select_backward,
    send,
    symm,
    symm_back,
    weighted_sum,
)
from ep_moe.kernels.tiles import Tile
from ep_moe.types import Packed
from tests.kernels.stand_in import StandIn

T, E, H, WIDTH, K = 4096, 128, 2048, 768, 8


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


floats, ints = partial(empty, dtype=torch.float32), partial(empty, dtype=torch.int32)
bytes_ = partial(empty, dtype=torch.uint8)


def router() -> Iterator[tuple[str, Callable[[], object]]]:
    """(variant, launch)"""

    def forward(logits: Tensor, **options: object) -> None:
        grouped = {"groups": 8, "kept_groups": 4, "top2_sum": False, "top_k": 8}
        form = {"scoring_func": "softmax", "renormalize": True, "scale": 2.5, "uniform": False}
        given = dict.fromkeys(("expert_bias", "padding_mask", "given", "segments"))
        select.select_forward(logits, **{**grouped, **form, **given, **options})

    def backward(experts: int, *, sums: bool, **options: object) -> None:
        form = {"scoring_func": "softmax", "renormalize": True, "scale": 2.5, "uniform": False}
        select_backward.select_backward(
            floats(T, 8),
            floats(1, experts) if sums else None,
            floats(1) if sums else None,
            floats(T, experts),
            bytes_(T) if sums else None,
            ints(T, 8),
            floats(T, 8),
            floats(T, 8),
            num_experts=experts,
            dtype=torch.float32,
            **{**form, **options},
        )

    logits, mask = floats(T, 256), bytes_(T)
    plain = {"groups": 1, "kept_groups": 1}
    v3 = {"scoring_func": "sigmoid", "top2_sum": True, "expert_bias": floats(256)}
    yield "grouped", lambda: forward(logits)
    yield "DeepSeek-V3, sums", lambda: forward(logits, **v3, segments=1)
    yield "plain bf16", lambda: forward(logits.bfloat16(), padding_mask=mask, **plain)
    given = {"given": ints(T, 8), "padding_mask": mask, "uniform": True}
    yield "given", lambda: forward(logits, **given, **plain)
    odd = {"scoring_func": "sqrtsoftplus", "renormalize": False, "top_k": 10, "segments": 4}
    yield "E = 160, K = 10, sums", lambda: forward(floats(T, 160), **odd, **plain)
    yield "renormalised", lambda: backward(256, sums=False)
    yield "softmax", lambda: backward(256, sums=False, renormalize=False)
    sigmoid = {"scoring_func": "sigmoid", "uniform": True}
    yield "sigmoid, sums", lambda: backward(256, sums=True, **sigmoid)
    counts, tokens = empty(4, 160, dtype=torch.int64), floats(4)
    loss = partial(load_loss.load_loss, floats(4, 161)[:, :160], counts, top_k=8, scale=1.0)
    yield "as counted", lambda: loss(None, None)
    yield "of more than counted", lambda: loss(tokens, None)
    yield "both given", lambda: loss(tokens, tokens)
    yield "", lambda: pack.pack(ints(T, 8), 256)
    for ranks in (2, 8):
        link = symm.Link(
            *(empty(ranks + 1, dtype=torch.int64), ints(128), ints(3)),
            **{"rank": 1, "most": T, "programs": 16, "timeout_ns": 10**9},
        )
        order = symm.Order(ints(2 * ranks * (1 + T)), T)
        yield from moves(f"{ranks} ranks", link, order)
    yield "one choice", partial(send.send_order, ints(T, 1), floats(T, 1), 256, ints(8, 1 + T, 3))
    for ranks, gates in ((2, torch.float32), (64, torch.float64)):
        blocks, form = ints(ranks, 1 + T, 8 + gates.itemsize * 2), {"top_k": 8, "gates": gates}
        weights = empty(T, 8, dtype=gates)
        yield f"{ranks} ranks", partial(send.send_order, ints(T, 8), weights, 256, blocks)
        yield f"{ranks} ranks", partial(send.open_blocks, blocks, [T] * ranks, **form)


def moves(
    variant: str, link: symm.Link, order: symm.Order
) -> Iterator[tuple[str, Callable[[], object]]]:
    x, rows, ids, gates = empty(T, H), empty(link.ranks * T, H), ints(T, K), floats(T, K)
    yield f"move, {variant}", lambda: symm.dispatch(x, ids, gates, rows, link, num_experts=256)
    yield f"move, {variant}", lambda: symm.replay(x, rows, order, link)
    yield f"move, {variant}", lambda: symm_back.combine(rows, order, link)
    yield f"move, {variant}, fp32 gates", lambda: symm_back.combine(gates, order, link)
    yield f"{variant}", lambda: symm.take(rows, rows, order, link)


def experts(arch: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each form with the tiles that this GPU would run it with, for many rows and for few."""
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (T, 16):
            yield from products(arch, dtype, rows)
    if arch == "sm_90":
        yield from specialized()
    yield "", lambda: weighted_sum.weighted_sum(empty(T * K, H), floats(T, K), ints(T, K))
    yield "", lambda: weighted_sum.sum_parts(floats(6, T * K), ints(T, K))
    yield "", lambda: gather.gather(empty(T, H), ints(T * K), ints(E + 1))
    bias_grad = grouped_wgrad.grouped_bias_grad
    gathered = {"arrived_of_packed": ints(T * K), "gate_of_packed": floats(T * K)}
    yield "", lambda: bias_grad(empty(T, H), ints(E + 1), **gathered)
    wide = gathered | {"gate_of_packed": floats(T * K).double()}
    yield "gates in float64", lambda: bias_grad(empty(T, H), ints(E + 1), **wide)
    product = choice.Product("wgrad", 2, T * K // E, H, WIDTH)
    yield (
        "into float32",
        lambda: grouped_wgrad.grouped_wgrad(
            empty(T * K, H),
            empty(T * K, WIDTH),
            ints(E + 1),
            into=floats(E, H, WIDTH),
            tile=choice.default_tile(product, arch),
        ),
    )


def products(
    arch: str, dtype: torch.dtype, rows: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    new, slots = partial(empty, dtype=dtype), rows * K
    packed = Packed(ints(slots), ints(slots), ints(rows, K), ints(E + 1))
    x, pre, h = new(rows, H), new(slots, 2 * WIDTH), new(slots, WIDTH)
    up, down, biases = new(E, 2 * WIDTH, H), new(E, H, WIDTH), new(E, 2 * WIDTH)
    offsets, index, gates = packed.offsets, packed.arrived_of_packed, floats(rows, K)

    def tile(form: str, depth: int, columns: int) -> Tile:
        product = choice.Product(form, dtype.itemsize, slots // E, depth, columns)
        return choice.default_tile(product, arch)

    label = f"{str(dtype).removeprefix('torch.')}, {slots // E} rows an expert"
    kinds = {
        "hidden": lambda: grouped_gemm.hidden(
            x,
            up,
            packed,
            biases,
            activation="swiglu",
            keep=True,
            tile=tile("hidden", H, 2 * WIDTH),
        ),
        "product": lambda: grouped_gemm.grouped_gemm(
            h, down, offsets, tile=tile("product", WIDTH, H)
        ),
        "gradient": lambda: grouped_gemm.hidden_backward(
            x,
            down,
            packed,
            pre,
            gates=gates,
            activation="swiglu",
            tile=tile("gradient", H, WIDTH),
        ),
        "dgrad": lambda: grouped_gemm.grouped_gemm(
            pre, up, offsets, transposed=True, tile=tile("dgrad", 2 * WIDTH, H)
        ),
        "wgrad, x gathered": lambda: grouped_wgrad.grouped_wgrad(
            pre,
            x,
            offsets,
            arrived_of_packed=index,
            gathered="x",
            tile=tile("wgrad", 2 * WIDTH, H),
        ),
        "wgrad, d_y gathered": lambda: grouped_wgrad.grouped_wgrad(
            x,
            h,
            offsets,
            arrived_of_packed=index,
            gathered="d_y",
            tile=tile("wgrad", H, WIDTH),
        ),
    }
    for kind, launch in kinds.items():
        yield f"{kind}, {label}", launch


def specialized() -> Iterator[tuple[str, Callable[[], object]]]:
    """The products by warps of their own, each as it is best fetched."""
    slots, index, offsets = T * K, ints(T * K), ints(E + 1)
    packed = Packed(index, ints(slots), ints(T, K), offsets)
    x, pre, h = empty(T, H), empty(slots, 2 * WIDTH), empty(slots, WIDTH)
    up, down = empty(E, 2 * WIDTH, H), empty(E, H, WIDTH)
    wide = Tile(128, 256, 64, 8, 3, tma=True, specialize=True)
    gated, high = wide._replace(block_n=128), wide._replace(block_m=256, block_n=128)
    gathered = {"arrived_of_packed": index}
    kinds = {
        "hidden": partial(
            grouped_gemm.hidden, x, up, packed, activation="swiglu", keep=True, tile=gated
        ),
        "hidden, not kept": partial(
            grouped_gemm.hidden, x, up, packed, activation="swiglu", keep=False, tile=gated
        ),
        "product": partial(grouped_gemm.grouped_gemm, h, down, offsets, tile=wide),
        "gradient": partial(
            grouped_gemm.hidden_backward,
            *(x, down, packed, pre),
            gates=floats(T, K),
            activation="swiglu",
            tile=wide,
        ),
        "dgrad": partial(grouped_gemm.grouped_gemm, pre, up, offsets, transposed=True, tile=wide),
        "wgrad, x gathered": partial(
            grouped_wgrad.grouped_wgrad, pre, x, offsets, **gathered, gathered="x", tile=high
        ),
        "wgrad, d_y gathered": partial(
            grouped_wgrad.grouped_wgrad, x, h, offsets, **gathered, gathered="d_y", tile=wide
        ),
    }
    for kind, launch in kinds.items():
        yield f"{kind}, specialized", launch


def main(target: str) -> None:
    driver = StandIn(target)
    for variant, launch in [*router(), *experts(target)]:
        launch()
        for row in driver.take():
            print(json.dumps({"target": target, "variant": variant, **row}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
