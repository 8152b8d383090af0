"""DeepEP behind a whole layer, against stand-ins: equal to one process, whatever its order of rows,
and every refusal in words. The moves themselves are in `test_transports`."""

import copy
import os
import re
import signal
import sys
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ep_moe
from ep_moe import (
    BackendUnavailable,
    ConfigError,
    ExpertParallel,
    InputError,
    Routing,
    make_transport,
)
from ep_moe.dispatch import deepep_buffers
from ep_moe.errors import CallMismatch
from ep_moe.testing import assert_close, run_ranks
from tests.dispatch.ep_cases import Case, compare, config, expert_parallel, make_layer, one_process
from tests.dispatch.fake_deepep import GENERATIONS, stand_in
from tests.hosts import h200s

MOST = 24  # tokens of a rank
BF16 = torch.bfloat16
RUNS = [(generation, 2) for generation in GENERATIONS] + [("v2.5", 1), ("v2.5", 3)]

CASES = {
    "balanced, of 256 columns": Case((12, 12, 8), config(hidden_size=256)),
    "uneven, of 272 columns": Case((1, 17, 5), config(hidden_size=272)),
    "a rank without tokens": Case((0, 9, 4), config()),
    "no tokens anywhere": Case((0, 0, 0), config()),
    "one expert takes all": Case((7, 4, 6), config(top_k=1, renormalize=False), route_to=(5,)),
    "the experts of one rank": Case((8, 6, 7), config(), route_to=(0, 1)),
    "padding": Case((10, 13, 2), config(top_k=3), padding=True),
    "shared experts and biases": Case((10, 3, 0), config(num_shared_experts=1, mlp_bias=True)),
    "a loss that only touches y": Case((6, 6, 6), config(), detached_loss=(1,)),
}


def cases(world_size):
    """Twelve experts divide among one, two and three ranks."""
    return [
        replace(
            case,
            tokens=case.tokens[:world_size],
            config=replace(case.config, num_experts=12),
            dtype=BF16,
        )
        for case in CASES.values()
    ]


def over_deepep(sizes, most=MOST, **changes):
    return replace(sizes, transport="deepep", max_tokens_per_rank=most, **changes)


def layers(rank, generation, cases):
    stand_in(generation)
    return [expert_parallel(rank, replace(case, config=over_deepep(case.config))) for case in cases]


@pytest.mark.parametrize("generation, world_size", RUNS)
def test_layers_equal_one_process(generation, world_size):
    tried = cases(world_size)
    ranks = run_ranks(layers, world_size, generation, tried)
    for i, case in enumerate(tried):
        compare(case, [got[i] for got in ranks], one_process(case))


SIZES = config(num_experts=12, top_k=3, hidden_size=40)


def make(sizes, most=MOST, dtype=BF16):
    """A layer over DeepEP, with the same weights as any other of these sizes."""
    return make_layer(Case((), over_deepep(sizes, most), dtype=dtype), dist.group.WORLD)


def peer_of(layer, dtype=BF16):
    over = replace(layer.config, transport="collective")
    return make_layer(Case((), over, dtype=dtype), layer.ep)


def data(rank, columns, tokens):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, tokens, columns, generator=generator).to(BF16)


def results(layer, rank, call=None, *, tokens=7):
    """y, dx and the gradients of the experts."""
    x, d_y = data(rank, layer.config.hidden_size, tokens)
    x.requires_grad_()
    y = layer(x)[0] if call is None else call(x)
    wanted = [x, *layer.experts.parameters()]
    return [y.detach(), *torch.autograd.grad(y, wanted, d_y.to(y.dtype))]


def assert_same(got, expected, **how):
    """The tails that DeepEP leaves unwritten are NaN here, and must not have come this far."""
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_close(one, other, name=f"result {i}", **how)


def buffers_of(layer):
    """Those of the group, a list for each number of multiprocessors."""
    return [pool.buffers for pool in layer.ep.peers.shared.values()]


def uses(rank, generation):
    stand_in(generation)
    layer, tokens = make(SIZES), 5 * rank
    with torch.inference_mode():  # what it makes must serve training, too
        layer(data(rank, 40, tokens)[0])
    expected = results(peer_of(layer), rank, tokens=tokens)
    assert_same(results(layer, rank, tokens=tokens), expected)

    layer.warmup(8)
    layer.transport.sms = 12
    other = copy.deepcopy(layer)
    assert_same(results(other, rank, tokens=tokens), expected)
    assert_same(results(layer, rank, tokens=tokens), expected)
    assert (other.transport.sms, other.transport.layer) == (12, 2)
    (first, *_), (second, *_) = buffers_of(layer)
    used = [b.out._num_sms if generation == "v1" else b.sms for b in (first, second)]
    assert used == [16, 12]

    under_autocast(rank)
    any_memory_layout(rank, layer)


def under_autocast(rank):
    layer = make(SIZES, dtype=torch.float32)
    with torch.autocast("cpu", BF16):
        got, expected = (results(one, rank) for one in (layer, peer_of(layer, torch.float32)))
    assert [value.dtype for value in got] == [BF16, BF16, torch.float32, torch.float32]
    assert_same(got, expected, tolerance=2e-2)


def any_memory_layout(rank, layer):
    """Of x, ids, gates and the gradient of y."""
    x = data(rank, 6, 40)[0].t().requires_grad_()
    ids = torch.stack([torch.arange(6) + k for k in range(3)])
    for ids_TK in (ids.t(), ids.t().int(), ids[:, :1].t().expand(6, 3)[:, :1]):
        gates = torch.tensor([0.5], requires_grad=True)
        found = []
        for one in (layer, peer_of(layer)):
            routing = Routing(ids_TK, gates[:, None].expand(ids_TK.shape))
            y = ep_moe.moe(x, routing, one.experts, one.transport)
            found.append([y.detach(), *torch.autograd.grad(y.sum(), [x, gates])])
        assert_same(*found, tolerance=2e-2)


@pytest.mark.parametrize("generation, world_size", RUNS)
def test_uses(generation, world_size):
    """First in inference; with a warm-up, other sms, a copy; under autocast; strided inputs."""
    run_ranks(uses, world_size, generation)


def checkpoints(rank, generation):
    """Without a replay the recomputation dispatches again, and its rows stand beside gradients that
    travel by the first plan: their order must be the same."""
    stand_in(generation)
    layer = make(SIZES)
    plain = results(layer, rank)

    def again(x, **context):
        return checkpoint(lambda x: layer(x)[0], x, use_reentrant=False, **context)

    assert_same(results(layer, rank, partial(again, context_fn=ep_moe.replay())), plain)
    assert_same(results(layer, rank, again), plain)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_checkpointing(generation):
    run_ranks(checkpoints, 2, generation)


def changed_in_place(rank, generation):
    stand_in(generation)
    layer = make(SIZES)
    for part in ("x", "ids", "gates"):
        x, _ = data(rank, 40, 6)
        x = x.requires_grad_() * 1  # not a leaf, so it may change
        ids, gates = torch.arange(18).view(6, 3) % 12, torch.rand(6, 3)
        y = ep_moe.moe(x, Routing(ids, gates), layer.experts, layer.transport)
        {"x": x, "ids": ids, "gates": gates}[part].detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("generation", GENERATIONS)
def test_inputs_changed_before_backward(generation):
    run_ranks(changed_in_place, 2, generation)


def growing(rank, generation):
    stand_in(generation)
    small, large = make(SIZES, 8), make(config(num_experts=12, top_k=2, hidden_size=300), 30)
    expected = results(peer_of(small), rank)

    def interrupted(x):
        y, _ = small(x)
        large(data(rank, 300, 2)[0])  # between forward and backward
        return y

    assert_same(results(small, rank, interrupted), expected)
    assert_same(results(small, rank), expected)
    assert_same(results(large, rank), results(peer_of(large), rank))
    (made,) = buffers_of(small)
    assert [b.room for b in made] == [(8, 256, 3), (32, 512, 3)]
    sent = small.transport.dispatch(
        data(rank, 40, 7)[0], Routing(torch.arange(3).expand(7, 3), torch.ones(7, 3)), 12
    )
    assert sent.plan.buffer is made[-1]
    assert len(sent.rows) == 2 * 8  # no more for its neighbour's sake


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_larger_layer_makes_the_buffer_grow(generation):
    """A plan stays with the buffer that it was made in."""
    run_ranks(growing, 2, generation)


EXACT = replace(SIZES, numerics="exact", loss_reduction="sum", aux_loss_coef=0.0, z_loss_coef=0.0)
SHARES = (13, 7)


def of_shares(layer, *shares):
    """y, dx and the gradients of the experts, for these of two shares of 20 tokens."""
    generator = torch.Generator().manual_seed(5)
    both = torch.randn(2, 20, 40, generator=generator).to(layer.experts.w_down)
    x, d_y = (torch.cat([part.split(SHARES)[i] for i in shares]) for part in both)
    y, _ = layer(x.requires_grad_())
    grads = torch.autograd.grad(y, [x, *layer.experts.parameters()], d_y)
    return [value.detach().cpu() for value in (y, *grads)]


def exactly(rank, generation):
    stand_in(generation)
    return of_shares(make(EXACT), rank)


def asked(layer):
    """Of each buffer: does it give rows in order, and was DeepEP asked for it? V1 knows no other
    way."""
    (made,) = buffers_of(layer)
    return [(buffer.ordered, getattr(buffer.buffer, "deterministic", True)) for buffer in made]


def ordered_for_training(rank, generation):
    stand_in(generation)
    ordered, free = (True, True), (generation == "v1",) * 2
    layer = make(SIZES)
    with torch.no_grad():
        layer(data(rank, 40, 6)[0])
    assert asked(layer) == [free]
    training = [free] if generation == "v1" else [free, ordered]
    once, again = of_shares(layer, rank), of_shares(layer, rank)
    assert all(map(torch.equal, once, again))
    assert asked(layer) == training

    other = make(replace(SIZES, hidden_size=300))
    results(other, rank)
    with torch.no_grad():
        other(data(rank, 300, 6)[0])
    assert asked(layer) == [*training, ordered]  # inference makes do with what training has

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    of_shares(layer, rank)
    assert asked(layer) == [*training, ordered]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_rows_are_in_order_where_a_backward_may_follow(generation):
    run_ranks(ordered_for_training, 2, generation)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_exact_numerics_do_not_know_of_ranks(generation):
    """Bit for bit: y, dx and the experts' gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks have
    try:
        expected = of_shares(make_layer(Case((), EXACT, dtype=BF16), None), 0, 1)
    finally:
        torch.set_num_threads(threads)
    ranks = run_ranks(exactly, 2, generation)
    for parts, whole in zip(zip(*ranks, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(parts), whole)


def refusals(rank):
    stand_in("v2.5")
    x, ids, gates = data(rank, 40, 6)[0], torch.arange(18).view(6, 3) % 12, torch.ones(6, 3)
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(InputError, match=rf"{dtype} and .*torch\.bfloat16 .*\.to\(.*autocast"):
            make(SIZES, dtype=dtype)(x.to(dtype))
    layer = make(SIZES, 6)

    def through(x=x, ids=ids, gates=gates):
        return ep_moe.moe(x, Routing(ids, gates), layer.experts, layer.transport)

    with pytest.raises(InputError, match=r"bfloat16 and torch\.float64.* torch\.float32"):
        through(gates=gates.double())
    with pytest.raises(InputError, match=r"of 7, .*at most max_tokens_per_rank = 6"):
        layer(torch.cat([x, x[:1]]))
    with pytest.raises(InputError, match=r"routing\.ids is of 33, .*at most 32 experts a token"):
        through(ids=ids[:, :1].expand(6, 33), gates=torch.ones(6, 33))
    os.environ["EP_MOE_CHECK"] = "1"
    with pytest.raises(InputError, match=r"\[2, 0, 2\] for token 4.*different experts"):
        through(ids=torch.where(torch.arange(6)[:, None] == 4, torch.tensor([2, 0, 2]), ids))
    os.environ["EP_MOE_CHECK"] = "0"
    torch.use_deterministic_algorithms(True)
    with pytest.raises(BackendUnavailable, match="fill_uninitialized_memory = False"):
        layer(x)
    torch.use_deterministic_algorithms(False)

    layer.transport.sms = 7
    with pytest.raises(ConfigError, match=r"sms = 7, .*an even number up to 128"):
        layer(x)
    layer.transport.sms = 8 + 2 * rank
    with pytest.raises(ConfigError, match=r"sms = \[8, 10\].*the same on every rank"):
        layer(x)
    with pytest.raises(ConfigError, match=r"max_tokens_per_rank = \[16, 32\].*same power of two"):
        make(SIZES, 16 + rank)(x)
    for most in (16 - rank, 6):  # the same power of two, and nothing left behind by all that
        assert_same(
            results(make(SIZES, most), rank, tokens=6), results(peer_of(layer), rank, tokens=6)
        )
    with pytest.raises(ConfigError, match=r"max_tokens_per_rank = None.*the most tokens"):
        make_transport("deepep", layer.ep)


def test_what_it_refuses():
    run_ranks(refusals, 2)


GPU = torch.device("cuda")


def test_tensors_on_a_cpu():
    with pytest.raises(BackendUnavailable, match=r"'deepep' needs GPUs, and x is on cpu"):
        deepep_buffers.load("deepep", 2, torch.device("cpu"))


def missing(monkeypatch, tmp_path, source, **changes):
    """A deep_ep of these lines, and a machine that has all it needs."""
    host = replace(h200s(2), **changes)
    monkeypatch.setattr(deepep_buffers.Host, "look", lambda: host)
    (tmp_path / "deep_ep").mkdir()
    (tmp_path / "deep_ep" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    monkeypatch.delitem(sys.modules, "deep_ep")  # what is imported now is gone afterwards


@pytest.mark.skipif(find_spec("deep_ep") is not None, reason="deep_ep is installed here")
def test_no_deepep():
    with pytest.raises(BackendUnavailable, match=r"DeepEP: missing.*pip install ep-moe\[deepep\]"):
        deepep_buffers.load("deepep", 2, GPU)


@pytest.mark.parametrize("error", ["AssertionError", "ImportError", "TypeError", "RuntimeError"])
def test_a_deepep_that_does_not_load(error, monkeypatch, tmp_path):
    missing(monkeypatch, tmp_path, f"raise {error}('Duplicate NCCL')")
    with pytest.raises(BackendUnavailable, match=r"cannot import deep_ep: Duplicate NCCL.*README"):
        deepep_buffers.load("deepep", 2, GPU)


def test_a_deepep_of_another_generation(monkeypatch, tmp_path):
    missing(monkeypatch, tmp_path, "")
    library = deepep_buffers.load("deepep", 2, GPU)
    make = partial(deepep_buffers.make_buffer, library, ordered=False, sms=8)
    with pytest.raises(BackendUnavailable, match=r"deep_ep at .*__init__\.py.*EPBuffer"):
        make(ExpertParallel(size=2), deepep_buffers.Room(8, 256, 2), torch.device("cpu"))


@pytest.mark.parametrize(
    "cards, before, after", [((), None, "1"), (("mlx5_0",), None, None), ((), "0", "0")]
)
def test_gin_is_disabled_where_there_is_no_network_card(
    cards, before, after, monkeypatch, tmp_path
):
    missing(monkeypatch, tmp_path, "", network_cards=cards)
    monkeypatch.setattr(os, "environ", {} if before is None else {"EP_DISABLE_GIN": before})
    deepep_buffers.load("deepep", 2, GPU)
    assert os.environ.get("EP_DISABLE_GIN") == after


def checked(rank, generation):
    stand_in(generation)
    for known in (False, True):
        first, second = make(SIZES), make(SIZES)
        assert_same(results(first, rank), results(peer_of(first), rank))
        if known:
            second(data(rank, 40, 4)[0])
        where = "layer 4, call 2, forward, rows out" if known else "the first call of layer 1"
        with pytest.raises(CallMismatch, match=rf"rank 1 is at {where}, after"):
            (first, second)[rank](data(rank, 40, 4)[0])


@pytest.mark.parametrize("generation", GENERATIONS)
def test_other_calls_are_named(generation):
    run_ranks(checked, 2, generation, environ={"EP_MOE_CHECK": "1"})


STAGES = {
    "making": "the making of DeepEP's buffer",
    "out": "layer 0, call 1, forward, rows out",
    "combine": "layer 0, call 1, forward, rows back",
    "replay": "layer 0, call 1, backward, rows out",
    "combine_gates": "layer 0, call 1, backward, gates back",
}


def leaves(rank, generation, where, how):
    """Rank 1, before that move of its own."""
    stand_in(generation)
    group = dist.new_group(timeout=timedelta(seconds=2))
    layer = make_layer(Case((), over_deepep(SIZES), dtype=BF16), group)

    def leave(*_, **__):
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "late":
            time.sleep(4)
        raise ZeroDivisionError("planted")

    places = {
        "making": (deepep_buffers, "make_buffer"),
        "out": (deepep_buffers._Elastic, "dispatch"),
    }
    if rank == 1:
        setattr(*places.get(where, (layer.transport, where)), leave)
    results(layer, rank)


@pytest.mark.parametrize(
    "generation, where, how",
    [
        ("v2.5", "making", "raise"),
        ("v2", "out", "kill"),
        ("v2.5", "combine", "raise"),
        ("v1", "replay", "kill"),
        ("v2.5", "combine_gates", "late"),
    ],
)
def test_a_rank_that_leaves_is_named(generation, where, how):
    with pytest.raises(AssertionError) as failed:
        run_ranks(leaves, 2, generation, where, how)
    why = {"kill": "without a word", "raise": "ended with ZeroDivisionError: planted"}
    expected = rf"PeerLost: rank 0 lost rank 1 at {STAGES[where]}: .*{why.get(how)}"
    if how == "late":
        expected = rf"DispatchTimeout: rank 0 waited .* s at {STAGES[where]}"
    assert re.search(expected, str(failed.value)), failed.value
