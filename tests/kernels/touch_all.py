"""Run every kernel on small, odd sizes, for a memory checker:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer python -m tests.kernels.touch_all

With names of tiles it runs those alone. Without the cache each tensor is an allocation of its own,
so that a read beyond one is seen.
"""

import sys

import torch

from ep_moe import SelectionConfig, ops
from ep_moe.kernels import symm, symm_back, window
from ep_moe.kernels.device import architecture
from ep_moe.kernels.grouped_gemm import grouped_gemm, hidden, hidden_backward
from ep_moe.kernels.grouped_wgrad import grouped_bias_grad, grouped_wgrad
from ep_moe.kernels.tiles import Tile
from tests.kernels.cases import TILES

SIZES = [(37, 40, 24, 5, 2), (1, 33, 17, 7, 3), (150, 192, 264, 4, 2)]  # T, H, I, E, K
SPECIALIZED = {
    "specialized": Tile(128, 256, 64, 8, 3, tma=True, specialize=True),
    "specialized, high": Tile(256, 128, 64, 8, 3, tma=True, specialize=True),
}


def router(tokens: int, experts: int, top_k: int, device: torch.device) -> None:
    logits = torch.randn(tokens, experts, device=device)
    for scoring in ("softmax", "sigmoid", "sqrtsoftplus"):
        config = SelectionConfig(top_k=top_k, scoring_func=scoring)
        found = ops.select(logits, config, expert_bias=logits[0].clone(), segments=1)
        ops.load_loss(found.p_sum, ops.count(found.ids, experts)[None], top_k=top_k)
        ops.select_backward(
            found.gate_weights,
            logits[:1].clone(),
            logits.new_ones(1),
            selected=found,
            logits=logits,
            num_experts=experts,
            dtype=logits.dtype,
            config=config,
        )


def experts(
    tokens: int, h: int, i: int, num: int, top_k: int, tile: Tile, dtype: torch.dtype, device
) -> None:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    ids = torch.rand(tokens, num, device=device).topk(top_k, dim=1).indices.int()
    ids[0, 0] = -1  # an absent choice
    packed = ops.pack(ids, num, ids.numel())
    x, up, down = normal(tokens, h), normal(num, 2 * i, h), normal(num, h, i)
    biases, gates = (normal(num, 2 * i), normal(num, h)), torch.rand(ids.shape, device=device)
    halved = tile._replace(block_n=tile.block_n // 2) if tile.specialize else tile
    index, offsets = packed.arrived_of_packed, packed.offsets
    for bias, gate in ((None, None), (biases, gates)):
        found, pre = hidden(
            x, up, packed, bias and bias[0], gates=gate, activation="swiglu", keep=True, tile=halved
        )
        y = grouped_gemm(found, down, offsets, bias and bias[1], tile=tile)
        ops.weighted_sum(y, gate, packed.packed_of_arrived)
    for step in dict.fromkeys((0, tile.step)):
        back = tile._replace(step=step)
        grads = hidden_backward(x, down, packed, pre, gates=gates, activation="swiglu", tile=back)
    grouped_gemm(grads.pre, up, offsets, transposed=True, tile=tile)
    if not tile.swap:
        gathered = {"arrived_of_packed": index, "tile": tile}
        grouped_wgrad(grads.pre, x, offsets, gathered="x", **gathered)
        grouped_wgrad(x, grads.weighted_h, offsets, gathered="d_y", **gathered)
    grouped_bias_grad(x, offsets, arrived_of_packed=index)


def send(tokens: int, h: int, num: int, top_k: int, device: torch.device) -> None:
    """To as many ranks as there are experts, and to one."""
    ids = torch.rand(tokens, num, device=device).topk(top_k, dim=1).indices.int()
    gates, x = torch.rand(ids.shape, device=device), torch.randn(tokens, h, device=device)
    for ranks in (num, 1):
        form = {"top_k": top_k, "gates": gates.dtype}
        for lines in (tokens // 2, tokens):  # too few, and enough
            blocks = ops.empty_blocks(ranks, lines=lines, device=device, **form)
            order = ops.send_order(ids, gates, num, blocks)
        ops.open_blocks(blocks, blocks[:, 0, 0].tolist(), **form)
        rows = ops.gather(x, order.token_of_sent, order.offsets)
        ops.weighted_sum(rows, None, order.sent_of_token)


def moves(tokens: int, h: int, num: int, top_k: int, dtype: torch.dtype, device) -> None:
    """Of one rank, which is its own peer."""
    x = torch.randn(tokens, h, device=device).to(dtype)
    ids = torch.randint(-1, num, (tokens, top_k), dtype=torch.int32, device=device)
    gates, most = torch.rand(tokens, top_k, device=device), tokens + 3
    layout = window.layout(1, most, h * x.element_size(), top_k, 4)
    memory = torch.zeros(layout.total, dtype=torch.uint8, device=device)
    epochs, failure, seen = (
        torch.zeros(n, dtype=torch.int32, device=device) for n in (window.SLOTS.value, 4, 3)
    )
    peers = torch.tensor([memory.data_ptr(), seen.data_ptr()], device=device)
    link = window.Link(peers, epochs, failure, 0, most, programs=16, timeout_ns=10**9)
    rows = memory[layout.rows :][: most * h * x.element_size()].view(dtype).view(most, h)
    order, _, arrived_gates = symm.dispatch(x, ids, gates, rows, link, num_experts=num)
    kept = torch.empty_like(rows)
    symm.replay(x, kept, order, link)
    symm_back.combine(kept, order, link)
    symm_back.combine(arrived_gates, order, link)
    assert not failure.any()


def main() -> None:
    device, count = torch.device("cuda", torch.cuda.current_device()), 0
    tiles = TILES | (SPECIALIZED if architecture(device) == "sm_90" else {})
    tiles = {name: tiles[name] for name in sys.argv[1:] or tiles}
    for tokens, h, i, num, top_k in SIZES:
        router(tokens, num, top_k, device)
        send(tokens, h, num, top_k, device)
        for dtype in (torch.bfloat16, torch.float32):
            moves(tokens, h, num, top_k, dtype, device)
            moves(600 + tokens, h + 1, num, top_k, dtype, device)
        for name, tile in tiles.items():
            for dtype in (torch.bfloat16, torch.float32):
                if dtype == torch.bfloat16 or not tile.specialize:
                    experts(tokens, h, i, num, top_k, tile, dtype, device)
                    torch.cuda.synchronize()
                    count += 1
                    print(f"{tokens} tokens, {name}, {dtype}", flush=True)
    print(f"{count} cases done")


if __name__ == "__main__":
    main()
