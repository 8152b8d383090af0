"""Faults that people reported for other MoE software, of the whole layer: sizes, layouts, ranks.
Those of routing, capacity and autograd are in test_public_faults.py and beside the functions."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import ep_moe
from ep_moe import ops, oracle
from ep_moe.testing import assert_close, run_ranks

CONFIG = ep_moe.MoEConfig(hidden_size=8, intermediate_size=12, num_experts=4, top_k=2)


def small_layer(dtype=torch.float64, device="cpu", ep=None, **changes):
    torch.manual_seed(0)
    return ep_moe.MoELayer(replace(CONFIG, **changes), ep=ep).to(device, dtype)


def one_expert(tokens, expert=0, device="cpu"):
    """All tokens to one expert, with weight 1."""
    ids = torch.full((tokens, 1), expert, dtype=torch.int32, device=device)
    return ep_moe.Routing(ids, torch.ones(tokens, 1, device=device))


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_no_token_is_lost_at_any_block_boundary(numerics, device):
    """BB-23, BB-33: exact numerics work in blocks of rows; 1 to 3 blocks and one more, all tokens
    to one expert, the others empty before, between and behind it."""
    block = ops.ROW_BLOCK
    layer = small_layer(device=device, numerics=numerics)
    x = torch.randn(3 * block + 1, 8, dtype=torch.float64, device=device)
    weights = layer.state_dict()
    everything = torch.stack([oracle.mlp(row, weights, "experts", "swiglu", 2) for row in x])
    for tokens in (1, 2, block - 1, block, block + 1, 2 * block, 3 * block, 3 * block + 1):
        routing = one_expert(tokens, 2, device)
        y = ep_moe.moe(x[:tokens], routing, layer.experts, layer.transport)
        assert_close(y, everything[:tokens], name=f"y of {tokens} tokens")


@pytest.mark.gpu
def test_rows_beyond_int32(require_gpu):
    """BB-25: rows * hidden passes 2^31 at row 299,593 of 7,168; the first, last and affected rows
    of y and of dx are right."""
    hidden, tokens = 7168, 300_000
    config = replace(CONFIG, hidden_size=hidden, intermediate_size=16, top_k=1, renormalize=False)
    torch.manual_seed(0)
    layer = ep_moe.MoELayer(config).to("cuda", torch.bfloat16)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
    y = ep_moe.moe(x, one_expert(tokens, 1, "cuda"), layer.experts, layer.transport)
    y.sum().backward()
    for rows in (slice(0, 4), slice(299_590, 299_600), slice(tokens - 4, tokens)):
        part = x.detach()[rows].clone().requires_grad_()
        count = len(part)
        alone = ep_moe.moe(part, one_expert(count, 1, "cuda"), layer.experts, layer.transport)
        alone.sum().backward()
        assert_close(y[rows].detach(), alone.detach(), name=f"y {rows}")
        assert_close(x.grad[rows], part.grad, name=f"dx {rows}")


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (0, 5, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_tokens(shape, dtype, numerics, device):
    """BB-29: forward, losses and backward of nothing."""
    layer = small_layer(
        dtype, device, numerics=numerics, num_shared_experts=1, aux_loss_coef=0.1, z_loss_coef=0.1
    )
    y, stats = layer(torch.zeros(shape, dtype=dtype, device=device))
    assert y.shape == shape
    assert stats.tokens_per_expert.tolist() == [0] * 4
    assert stats.aux_loss == 0
    (y.sum() + ep_moe.total_aux([stats])).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "hidden, inner", [(1, 1), (3, 5), (5, 3), (17, 33), (33, 17), (511, 100), (1025, 3), (5, 1025)]
)
def test_sizes_that_no_library_likes(hidden, inner, dtype, numerics, device):
    """BB-35, BB-99: any H and I, forward and backward."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner}
    layer = small_layer(dtype, device, numerics=numerics, **sizes)
    x = torch.randn(13, hidden, device=device).to(dtype).requires_grad_()
    routing, _ = layer.router(x.detach(), None)
    y = ep_moe.moe(x, routing, layer.experts, layer.transport)
    d_y = torch.randn(13, hidden, device=device).to(dtype)
    y.backward(d_y)
    weights = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    fixed = ep_moe.Routing(routing.ids, routing.gate_weights.detach().double())
    expected = oracle.moe_layer(x64, weights, layer.config, routing=fixed)
    expected.backward(d_y.double())
    assert_close(y.detach(), expected.detach(), name="y")
    for name in ("x", "experts.w_gate_up", "experts.w_down"):
        got = x.grad if name == "x" else layer.get_parameter(name).grad
        right = x64.grad if name == "x" else weights[name].grad
        tolerance = 4e-2 if dtype != torch.float32 else 1e-4
        assert_close(got, right, name=f"gradient of {name}", tolerance=tolerance)


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_every_way_to_compute_gives_the_same_y(top_k):
    """BB-45: loop, one rank, several ranks, a group of one by the transport of many, fast and
    exact: all weights in, none twice."""
    tokens, worlds = 12, (1, 2, 4)
    changes = {"num_experts": 8, "top_k": top_k, "renormalize": False}
    weights = small_layer(**changes).state_dict()
    x = parity_x(tokens)
    expected = oracle.moe_layer(x, weights, replace(CONFIG, **changes))
    for world_size in worlds:
        for shares in run_ranks(rank_parity, world_size, world_size, tokens, changes):
            for name, (rows, y) in shares.items():
                assert_close(y, expected[rows], name=f"{name} on {world_size} ranks")


def parity_x(tokens):
    return torch.randn(tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rank_parity(rank, world_size, tokens, changes):
    share = tokens // world_size
    rows = slice(rank * share, (rank + 1) * share)
    x = parity_x(tokens)[rows]
    found = {}
    for numerics, transport in itertools.product(("fast", "exact"), ("auto", "collective")):
        layer = small_layer(ep=dist.group.WORLD, numerics=numerics, transport=transport, **changes)
        if transport == "auto":
            assert layer.transport.name == ("local" if world_size == 1 else "collective")
        found[numerics, transport] = (rows, layer(x)[0].detach())
    return found


def rank_forced_to_rank_0(rank, tokens):
    """Three steps in which no token ever needs rank 1 and above."""
    layer = small_layer(ep=dist.group.WORLD)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(tokens[rank], 8, dtype=torch.float64)
        y = ep_moe.moe(x, one_expert(len(x)), layer.experts, layer.transport)
        y.sum().backward()
        optimizer.step()
    grad = layer.experts.w_down.grad
    return tuple(grad.shape), bool(grad.any())


@pytest.mark.parametrize("tokens", [(4, 4), (3, 0, 5, 1), (0, 6)])
def test_a_rank_whose_experts_get_nothing_still_takes_part(tokens):
    """BB-65: forward, backward and step finish; its gradients are zeros of the right shape."""
    for rank, (shape, used) in enumerate(run_ranks(rank_forced_to_rank_0, len(tokens), tokens)):
        assert shape == (4 // len(tokens), 8, 12)
        assert used == (rank == 0)


def rank_linear_expert_grad(rank, x, reduction):
    """y = w * x: one expert on rank 0, made linear by a huge gate whose silu is the identity."""
    layer = small_layer(
        ep=dist.group.WORLD,
        hidden_size=1,
        intermediate_size=1,
        loss_reduction=reduction,
        activation="relu2",
        top_k=1,
        renormalize=False,
    )
    with torch.no_grad():
        layer.experts.w_gate_up.fill_(1.0)
        layer.experts.w_down.fill_(1.0)
    rows = torch.tensor(x[rank], dtype=torch.float64).sqrt()[:, None]  # relu2 squares them back
    y = ep_moe.moe(rows, one_expert(len(rows)), layer.experts, layer.transport)
    (y.sum() / len(rows) if reduction == "mean" else y.sum()).backward()
    return layer.experts.w_down.grad[0].item()


@pytest.mark.parametrize(
    "x", [[[1, 2], [3, 4]], [[1, 2], [3, 4], [5, 6], [7, 8]], [[2], [1, 1, 4]]]
)
def test_expert_gradients_do_not_grow_with_the_ranks(x):
    """BB-69: 2.5 for [1,2],[3,4], not 5: the gradient of the mean of the ranks' means."""
    of_ranks = [sum(share) / len(share) for share in x]
    grads = run_ranks(rank_linear_expert_grad, len(x), x, "mean")
    assert grads[0] == pytest.approx(sum(of_ranks) / len(x))
    if x == [[1, 2], [3, 4]]:
        assert grads[0] == pytest.approx(2.5)
        assert grads[0] != pytest.approx(5.0)
    total = run_ranks(rank_linear_expert_grad, len(x), x, "sum")[0]
    assert total == pytest.approx(sum(map(sum, x)))


def rank_norm_of_experts(rank, max_norm):
    experts = small_layer(ep=dist.group.WORLD).experts
    experts.w_down.grad = torch.zeros_like(experts.w_down)
    experts.w_down.grad[0, 0, :2] = torch.tensor([[2.0, 4.0], [6.0, 8.0]])[rank]
    norm = ep_moe.clip_grad_norm_(experts, max_norm)
    return norm.item(), (experts.w_down.grad[0, 0, 0] / [2.0, 6.0][rank]).item()


def test_one_norm_and_one_clip_for_all_ranks():
    """BB-71: sqrt(120) and 0.0912871 on every rank, not the mean of the ranks' norms, 7.236."""
    for norm, clip in run_ranks(rank_norm_of_experts, 2, 1.0):
        assert norm == pytest.approx(10.954451150103322)
        assert norm != pytest.approx(7.23606797749979)
        assert clip == pytest.approx(0.09128709291752768, rel=1e-5)


@pytest.mark.gpu
def test_capture_is_refused_in_words(require_gpu):
    """BB-93: better than a stale routing on replay, or torch's error about a stream."""
    layer = small_layer(torch.float64, "cuda")
    x = torch.randn(4, 8, device="cuda", dtype=torch.float64)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ep_moe.BackendUnavailable, match="CUDA graph"), torch.cuda.graph(graph):
        layer(x)
    layer(x)  # and the device is as it was


@pytest.mark.gpu
def test_a_captured_layer_routes_what_it_is_given_at_replay(require_gpu):
    """BB-93: other tokens, other experts, other sizes, forward and backward."""
    layer = small_layer(torch.float32, "cuda")
    x = torch.randn(64, 8, device="cuda", requires_grad=True)
    leaves = (x, *layer.parameters())

    def step():
        y, _ = layer(x)
        return y, torch.autograd.grad(y.square().sum(), leaves)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grads = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            x.copy_(torch.randn(64, 8))
            x[: 20 * seed] = x[0]  # uneven: many tokens go where the first goes
        graph.replay()
        again, grads_again = step()
        for got, expected in zip((y, *grads), (again, *grads_again), strict=True):
            assert torch.equal(got, expected)


BAD_ID = """
import torch, ep_moe
config = ep_moe.MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=1)
layer = ep_moe.MoELayer(config).cuda()
ids = torch.tensor([[0], [4]], dtype=torch.int32, device="cuda")
routing = ep_moe.Routing(ids, torch.ones(2, 1, device="cuda"))
ep_moe.moe(torch.ones(2, 16, device="cuda"), routing, layer.experts, layer.transport)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("look", ["0", "1"])
def test_an_id_that_is_no_expert_stops_the_gpu(look, require_gpu):
    """In a process of its own, whose device is lost with it."""
    done = subprocess.run(
        [sys.executable, "-c", BAD_ID],
        capture_output=True,
        text=True,
        env=os.environ | {"EP_MOE_CHECK": look},
    )
    assert done.returncode != 0
    said = "0 to 3" if look == "1" else "neither -1 nor an expert"
    assert said in done.stderr + done.stdout
