"""Activation checkpoints that replay: a recomputation takes the routing of its forward pass."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import ep_moe
from ep_moe import RecomputationMismatch
from ep_moe.testing import run_ranks
from tests.replay_cases import (
    AUX,
    BLOCKS,
    CONFIGS,
    DECIDING_AGAIN,
    INPUTS,
    REPLAYING,
    as_one_block,
    nested,
    plainly,
    results,
    through,
    twice_nested,
    two_layers,
)
from tests.routing.capacity_cases import NO_WARNING

pytestmark = NO_WARNING


def assert_recomputing_changes_nothing(layers, x, block, recompute=REPLAYING):
    expected = results(layers, x, plainly)
    for got, value in zip(results(layers, x, block, recompute), expected, strict=True):
        assert torch.equal(got, value)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_gradients_are_those_without_checkpoints(changes, block):
    """Bit for bit; case BB-87 is the one of ties."""
    layers = two_layers(**changes)
    for x in INPUTS.values():
        assert_recomputing_changes_nothing(layers, x, block)


@pytest.mark.parametrize("x", INPUTS.values(), ids=INPUTS.keys())
def test_a_deterministic_block_needs_no_replay(x):
    assert_recomputing_changes_nothing(two_layers(**AUX), x, nested, DECIDING_AGAIN)


def rank_recomputes(rank):
    """Rank 1 has fewer tokens, or none; 20 times on ties (case BB-87)."""
    for name in ("plain", "sequence", "global", "dropping"):
        layers = two_layers(dist.group.WORLD, **CONFIGS[name])
        for tokens in (2, 0):
            mine = INPUTS["random"][:, : tokens if rank else None]
            for block in BLOCKS:
                assert_recomputing_changes_nothing(layers, mine, block)
    for _ in range(20):
        assert_recomputing_changes_nothing(layers, INPUTS["all ties"], nested)


def test_gradients_are_those_without_checkpoints_on_two_ranks():
    run_ranks(rank_recomputes, 2)


class Spy:
    """Counts the calls of a transport's methods."""

    def __init__(self, transport):
        self.transport, self.calls = transport, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self.transport, name)


def spied_on(layers):
    """What each layer asked of its transport, and how many sums over ranks it asked for."""
    sums = []
    for layer in layers:
        layer.transport, add_up = Spy(layer.transport), layer.router.reduce
        layer.router.reduce = lambda value, add_up=add_up: (sums.append(0), add_up(value))[1]
    return [layer.transport.calls for layer in layers], sums


def what_is_exchanged(ep):
    for block in (as_one_block, twice_nested):
        for scope in ("sequence", "global"):
            layers = two_layers(ep, **AUX, aux_loss_scope=scope)
            calls, sums = spied_on(layers)
            results(layers, INPUTS["random"], block)
            for names in calls:
                assert names.count("dispatch") == 1
                assert names.count("replay_gates") >= 1, "rows and gates go out again"
            assert len(sums) == len(layers)


def test_counts_are_exchanged_once():
    """A recomputation sends rows and gates by the plan it has, and adds up nothing again."""
    what_is_exchanged(None)


def rank_exchanges(rank):
    what_is_exchanged(dist.group.WORLD)


def test_counts_are_exchanged_once_on_two_ranks():
    run_ranks(rank_exchanges, 2)


def test_without_replay_they_are_exchanged_again():
    """What the spy is for."""
    layers = two_layers(**AUX, aux_loss_scope="global")
    calls, sums = spied_on(layers)
    results(layers, INPUTS["random"], as_one_block, DECIDING_AGAIN)
    assert [names.count("dispatch") for names in calls] == [2, 2]
    assert len(sums) == 4


def test_a_router_that_changed_in_between():
    """Replaying keeps the experts and takes the weights from the router as it is now; without, the
    gradients would belong to other experts."""
    layers, x = two_layers()[:1], INPUTS["random"]

    def change():
        with torch.no_grad():
            layers[0].router.weight.copy_(layers[0].router.weight.flip(0))

    def changing(layers, x, recompute):
        y, losses = as_one_block(layers, x, recompute)
        change()
        return y, losses

    with pytest.raises(RecomputationMismatch, match="a different routing"):
        results(layers, x, changing, DECIDING_AGAIN)
    change()
    with ep_moe.record_routing() as record:
        got = results(layers, x, changing)
    with ep_moe.replay_routing(record):
        expected = results(layers, x, plainly)
    for a, b in zip(got[1:], expected[1:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("inside_another", [False, True])
def test_a_router_with_noise(inside_another):
    """Other noise in each pass; the experts see x without it."""
    layer, x = two_layers()[0], INPUTS["random"][0]
    noise = iter(torch.randn(9, 7, 16, dtype=torch.float64))

    def noisy(x):
        routing, _ = layer.router(x + next(noise), None)
        return ep_moe.moe(x, routing, layer.experts, layer.transport)

    def run(recompute):
        leaf = x.clone().requires_grad_()
        outer = partial(recompute, noisy) if inside_another else noisy
        recompute(outer, leaf).sum().backward()
        return leaf.grad

    with pytest.raises(RecomputationMismatch):
        run(DECIDING_AGAIN)
    assert run(REPLAYING).isfinite().all()


def test_a_recomputation_that_calls_a_layer_more():
    """Named where torch, which only compares what is saved, sees nothing."""
    (layer, other), calls = two_layers(), []

    def looking_twice(x):
        calls.append(0)
        if len(calls) > 1:
            with torch.no_grad():
                other(x)
        return layer(x)[0]

    y = REPLAYING(looking_twice, INPUTS["random"].clone().requires_grad_())
    with pytest.raises(RecomputationMismatch, match=r"asks for decision 3.*made 2"):
        y.sum().backward()


def test_a_second_backward_replays_again():
    layers, x = two_layers(**AUX), INPUTS["random"].clone().requires_grad_()
    y, losses = nested(layers, x, REPLAYING)
    leaves = [x, *layers.parameters()]
    first = torch.autograd.grad(y.sum() + losses, leaves, retain_graph=True)
    second = torch.autograd.grad(y.sum() + losses, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_calls_do_not_share_what_they_decided():
    """Two calls of one checkpointed block, then their backwards in the order of the calls."""
    layers = two_layers()
    batches = [INPUTS["random"], INPUTS["random"][:1].flip(1), INPUTS["all ties"]]
    expected = [results(layers, x, plainly)[1] for x in batches]
    leaves = [x.clone().requires_grad_() for x in batches]
    outputs = [nested(layers, x, REPLAYING)[0] for x in leaves]
    for x, y, d_x in zip(leaves, outputs, expected, strict=True):
        d_y = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        assert torch.equal(torch.autograd.grad(y, x, d_y)[0], d_x)


@contextlib.contextmanager
def both(first, second):
    with first, second:
        yield


def keep_router_products(*, replaying):
    """A context_fn by which selective checkpointing keeps each mm, with or without a replay."""

    def policy(context, op, *args, **kwargs):
        keep = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def pair():
        keeping = create_selective_checkpoint_contexts(policy)
        if not replaying:
            return keeping
        return tuple(both(*each) for each in zip(ep_moe.replay()(), keeping, strict=True))

    return pair


@pytest.mark.parametrize("replaying", [False, True])
@pytest.mark.parametrize("x", ["random", "all ties"])
def test_selective_checkpointing(x, replaying):
    """Case BB-87, its last part: some results are kept, the rest is recomputed."""
    recompute = partial(
        checkpoint, use_reentrant=False, context_fn=keep_router_products(replaying=replaying)
    )
    assert_recomputing_changes_nothing(two_layers(**AUX), INPUTS[x], as_one_block, recompute)


def test_evaluation_under_a_checkpoint():
    layers = two_layers()
    with torch.no_grad():
        y, _ = nested(layers, INPUTS["random"], REPLAYING)
        assert torch.equal(y, through(layers, INPUTS["random"])[0])


def refuse_reentrant(ep):
    """By its reason, before any gradient of the layer, on every rank alike."""
    layers = two_layers(ep, **AUX)
    x = INPUTS["random"].clone().requires_grad_()
    y, _ = checkpoint(partial(through, layers), x, use_reentrant=True)
    with pytest.raises(
        ep_moe.ReentrantCheckpoint, match=r"detaches the losses.*use_reentrant=False"
    ):
        y.sum().backward()
    assert all(p.grad is None for p in layers.parameters())


def allow_reentrant_elsewhere(ep):
    """Only around the layer it does harm."""
    layers = two_layers(ep)
    x = INPUTS["random"].clone().requires_grad_()
    before = checkpoint(torch.tanh, x, use_reentrant=True)
    y, _ = nested(layers, before, REPLAYING)
    checkpoint(torch.tanh, y, use_reentrant=True).sum().backward()
    assert x.grad.isfinite().all()


def rank_reentrant(rank):
    refuse_reentrant(dist.group.WORLD)
    dist.barrier()  # nobody waits inside a collective of the layer
    allow_reentrant_elsewhere(dist.group.WORLD)


def test_reentrant_checkpoints_are_refused():
    refuse_reentrant(None)
    allow_reentrant_elsewhere(None)


def test_reentrant_checkpoints_are_refused_on_two_ranks():
    run_ranks(rank_reentrant, 2)
