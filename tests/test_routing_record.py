"""What one run chose, another takes: with other weights, on another number of ranks."""

import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist

import ep_moe
from ep_moe import InputError, RecomputationMismatch, oracle
from ep_moe.testing import assert_close, run_ranks
from tests.replay_cases import (
    CONFIGS,
    DECIDING_AGAIN,
    INPUTS,
    REPLAYING,
    nested,
    plainly,
    results,
    through,
    two_layers,
)
from tests.routing.capacity_cases import NO_WARNING

pytestmark = NO_WARNING

CAPACITIES = ({}, CONFIGS["dropping"], CONFIGS["rerouting"])


def recorded(layers, x):
    with ep_moe.record_routing() as record, torch.no_grad():
        through(layers, x)
    return record


def other_weights(layers):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in layers:
            layer.router.weight.normal_(generator=generator)
    return layers


@pytest.mark.parametrize("changes", CAPACITIES)
def test_a_run_takes_the_experts_of_another(changes):
    """ids, and what was dropped, from the record; weights and gradients from its own logits."""
    x = INPUTS["random"][0]
    layer = two_layers(**changes)[0]
    record = recorded([layer], x)
    (choice,) = record.choices
    other_weights([layer])
    assert not torch.equal(layer.router(x, None)[0].ids, choice.ids.masked_fill(~choice.kept, -1))
    with ep_moe.replay_routing(record):
        routing, stats = layer.router(x, None)
    assert torch.equal(routing.ids, choice.ids.masked_fill(~choice.kept, -1))
    assert stats.dropped_choices == (~choice.kept).sum()
    assert (stats.dropped_choices > 0) == (changes == CONFIGS["dropping"])
    chosen = (x @ layer.router.weight.t()).gather(1, choice.ids.long())
    expected = chosen.softmax(1).masked_fill(~choice.kept, 0.0)
    assert_close(routing.gate_weights, expected, name="weights")
    with ep_moe.replay_routing(record):
        y, _ = layer(x)
    assert_close(
        y, oracle.moe_layer(x, layer.state_dict(), layer.config, routing=routing), name="y"
    )
    y.sum().backward()
    assert (layer.router.weight.grad != 0).any()


@pytest.mark.parametrize("changes", CAPACITIES)
def test_padding_goes_nowhere_whatever_the_record_says(changes):
    layer, x = two_layers(**changes)[0], INPUTS["random"][0]
    record = recorded([layer], x)
    mask = torch.arange(len(x)) % 3 == 1
    with ep_moe.replay_routing(record):
        routing, _ = layer.router(x, mask)
    assert (routing.ids[mask] == -1).all()
    assert (routing.gate_weights[mask] == 0).all()
    with ep_moe.replay_routing(record):
        alike, _ = layer.router(x, None)
    assert torch.equal(routing.ids[~mask], alike.ids[~mask])


def rank_replays(rank, changes, record, tokens):
    """Learns from its share of a record that one process made, with weights of its own."""
    layers = other_weights(two_layers(dist.group.WORLD, **changes))
    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    x = INPUTS["random"].view(14, 16)[mine]
    with ep_moe.replay_routing(record[mine]):
        y, _ = through(layers, x)
    recomputed = results(layers, x, partial(replayed, record[mine]))
    assert torch.equal(recomputed[0], y)
    return y.detach()


def replayed(record, layers, x, recompute):
    with ep_moe.replay_routing(record):
        return nested(layers, x, recompute)


def rank_replays_each(rank, cells):
    return [rank_replays(rank, *cell) for cell in cells]


def test_a_record_of_one_process_on_two_ranks():
    """Sampling on one rank, training on two: the same experts and drops, sliced by token; the
    capacity of each rank's share is not asked again."""
    cells, expected = [], []
    for changes in CAPACITIES:
        x = INPUTS["random"].view(14, 16)
        record = recorded(two_layers(**changes), x)
        layers = other_weights(two_layers(**changes))
        with ep_moe.replay_routing(record):
            y, _ = through(layers, x)
        for tokens in ((7, 7), (3, 11), (14, 0)):
            cells.append((changes, record, tokens))
            expected.append(y.detach())
    ranks = run_ranks(rank_replays_each, 2, cells)
    for got, y in zip(zip(*ranks, strict=True), expected, strict=True):
        assert_close(torch.cat(got), y, name="y")


def test_a_record_is_plain_tensors():
    """It outlives the graph, is pickled, sliced, copied to a device, and replaying it gives it."""
    layers, x = two_layers(**CONFIGS["dropping"]), INPUTS["random"].view(14, 16)
    with ep_moe.record_routing() as record:
        through(layers, x.clone().requires_grad_())
    assert len(record.choices) == 2
    assert not any(value.requires_grad for choice in record.choices for value in choice)
    with ep_moe.replay_routing(record), ep_moe.record_routing() as again:
        through(other_weights(layers), x)
    for twin in (pickle.loads(pickle.dumps(record)), record.to("cpu"), record[:], again):
        assert isinstance(twin, ep_moe.RoutingRecord)
        for choice, same in zip(record.choices, twin.choices, strict=True):
            assert type(choice) is type(same)
            assert all(torch.equal(a, b) for a, b in zip(choice, same, strict=True))
    part = record[3:5].choices[1]
    assert torch.equal(part.ids, record.choices[1].ids[3:5])
    assert part.kept.shape == (2, 2)


def test_a_record_knows_the_padding():
    layer, x = two_layers()[0], INPUTS["random"][0]
    mask = torch.arange(7) >= 4
    with ep_moe.record_routing() as record:
        _, expected = layer(x, mask)
    assert (record.choices[0].wanted[4:] == -1).all()
    with ep_moe.replay_routing(record):
        _, stats = layer(x, mask)
    assert torch.equal(stats.tokens_per_expert, expected.tokens_per_expert)


def test_a_recomputation_is_not_recorded_again():
    layers = two_layers()
    for recompute in (REPLAYING, DECIDING_AGAIN):
        with ep_moe.record_routing() as record:
            results(layers, INPUTS["random"], nested, recompute)
        assert len(record.choices) == 2


def test_a_recomputation_is_given_no_other_calls_choice():
    """Backward inside replay_routing: named without `replay()`, right with it."""
    layers, x = two_layers(), INPUTS["random"]
    record = recorded(layers, x.view(14, 16))
    other_weights(layers)
    with ep_moe.replay_routing(record):
        expected = results(layers, x, plainly)
    with ep_moe.replay_routing(record):
        got = results(layers, x, nested)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with (
        ep_moe.replay_routing(record),
        pytest.raises(RecomputationMismatch, match=r"context_fn=ep_moe.replay\(\)"),
    ):
        results(layers, x, nested, DECIDING_AGAIN)


def changed(record, name, expert):
    """The second layer's last token goes to that expert."""
    getattr(record.choices[1], name)[-1, -1] = expert
    return record


def test_a_record_of_more_experts():
    """On the layer itself, where gather would fail."""
    x = INPUTS["random"][0]
    record = recorded(two_layers(num_experts=32)[:1], x)
    assert record.choices[0].ids.max() >= 8
    layer = two_layers()[0]
    with (
        pytest.raises(InputError, match=r"the layer has 8 experts"),
        ep_moe.replay_routing(record),
    ):
        layer(x)
    wide = two_layers(num_experts=32)[:1]
    with ep_moe.replay_routing(record):
        through(wide, x)


@pytest.mark.parametrize("calls", [0, 1])
def test_a_record_of_more_calls(calls):
    layers, x = two_layers(), INPUTS["random"][0]
    record = recorded(layers, x)
    with (
        pytest.raises(InputError, match=f"record is {2 - calls} of 2 choices longer"),
        ep_moe.replay_routing(record),
    ):
        through(layers[:calls], x)
    through(layers, x)  # nothing is replayed any more


def test_an_error_inside_is_not_hidden_by_what_is_left():
    record = recorded(two_layers(), INPUTS["random"][0])
    with pytest.raises(ZeroDivisionError), ep_moe.replay_routing(record):
        1 / 0  # noqa: B018


@pytest.mark.parametrize(
    "got,record_of",
    [
        ("at its end", lambda record: ep_moe.RoutingRecord(record.choices[:1])),
        ("at its end", lambda record: ep_moe.RoutingRecord()),
        (r"of shape \(6, 2\)", lambda record: record[:6]),
        (r"of shape \(0, 2\)", lambda record: record[:0]),
        (r"of shape \(7, 3\)", lambda record: recorded(two_layers(top_k=3), INPUTS["random"][0])),
        ("on meta", lambda record: record.to("meta")),
        ("of experts .* to 11 at", lambda record: changed(record, "ids", 11)),
        ("of experts .* to 8 at", lambda record: changed(record, "wanted", 8)),
        ("of experts -2 to", lambda record: changed(record, "ids", -2)),
    ],
)
def test_a_record_of_something_else(got, record_of):
    layers, x = two_layers(), INPUTS["random"][0]
    record = record_of(recorded(layers, x))
    with pytest.raises(InputError, match=f"record is {got}"), ep_moe.replay_routing(record):
        through(layers, x)
    through(layers, x)  # nothing is replayed any more


def test_an_error_ends_recording_and_replaying():
    layers, x = two_layers(), INPUTS["random"]
    with pytest.raises(ZeroDivisionError), ep_moe.record_routing() as record:
        1 / 0  # noqa: B018
    with pytest.raises(ZeroDivisionError), ep_moe.replay_routing(record):
        1 / 0  # noqa: B018
    through(layers, x)
    assert record.choices == []
