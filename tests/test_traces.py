"""What is written is read back; a file that no router could have given is refused by name."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ep_moe import InputError
from ep_moe.testing import assert_close
from ep_moe.traces import RoutingTrace, ids_dtype


def make_trace(*, steps=(3, 10), layers=(0, 2), tokens=5, top_k=2, num_experts=8, **changes):
    shape = (len(steps), len(layers), tokens, top_k)
    slots = torch.arange(math.prod(shape)).view(shape)
    values = {
        "num_experts": num_experts,
        "steps": steps,
        "layers": layers,
        "ids": (slots % num_experts).to(ids_dtype(num_experts)),
        "gate_weights": torch.rand(shape).half(),
        "origin": {"device": "cpu", "corpus_digest": "abc"},
    }
    return RoutingTrace(**values | changes)


def edited(path, **changes):
    """The same file with other arrays (None = left out) and header fields."""
    arrays = dict(np.load(path))
    header = json.loads(str(arrays["header"]))
    for name, value in changes.items():
        if name in header:
            header[name] = value
        elif value is None:
            del arrays[name]
        else:
            arrays[name] = value
    if "header" in arrays:
        arrays["header"] = np.array(json.dumps(header))
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("num_experts", [2, 8, 128, 129, 40_000])
@pytest.mark.parametrize("hidden", [None, torch.randn(2, 2, 5, 3).half()])
def test_comes_back_as_it_was(tmp_path, num_experts, hidden):
    trace = make_trace(num_experts=num_experts, hidden=hidden)
    trace.save(tmp_path / "a.npz")
    again = RoutingTrace.load(tmp_path / "a.npz")
    assert (again.num_experts, again.steps, again.layers) == (num_experts, (3, 10), (0, 2))
    assert (again.tokens_per_step, again.top_k) == (5, 2)
    assert again.origin == trace.origin
    for name in ("ids", "gate_weights", "hidden"):
        ours, theirs = getattr(trace, name), getattr(again, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs), name


def test_ids_take_the_smallest_type_that_holds_them():
    dtypes = {128: torch.int8, 129: torch.int16, 32_768: torch.int16, 32_769: torch.int32}
    assert {num_experts: ids_dtype(num_experts) for num_experts in dtypes} == dtypes


def test_a_routing_is_what_the_layer_takes():
    trace = make_trace()
    routing = trace.routing(10, 2)
    routing.validate(5, 8)
    assert torch.equal(routing.ids, trace.ids[1, 1].int())
    assert_close(routing.gate_weights, trace.gate_weights[1, 1].float(), name="gate_weights")


@pytest.mark.parametrize(
    "step, layer, message",
    [
        (4, 0, r"step is 4, but it must be one that the trace holds: \[3, 10\]"),
        (3, 1, r"layer is 1, but it must be one that the trace holds: \[0, 2\]"),
    ],
)
def test_what_was_not_recorded_is_named(step, layer, message):
    with pytest.raises(InputError, match=message):
        make_trace().routing(step, layer)


IDS = make_trace().ids
WEIGHTS = make_trace().gate_weights.numpy()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ids": None}, r"an npz file without \['ids'\], but it must be a routing trace"),
        ({"header": None}, r"an npz file without \['header'\]"),
        ({"format": 2}, "format is 2, but it must be 1: record it again"),
        ({"top_k": 3}, r"ids is of shape \(2, 2, 5, 2\), but it must be \(2, 2, 5, 3\)"),
        ({"steps": [1]}, r"ids is of shape \(2, 2, 5, 2\), but it must be \(1, 2, 5, 2\)"),
        ({"tokens_per_step": 6}, r"must be \(2, 2, 6, 2\): steps, layers, tokens"),
        ({"ids": IDS.numpy()[0]}, r"ids is of shape \(2, 5, 2\)"),
        ({"ids": IDS.long().numpy()}, "ids is torch.int64, but it must be torch.int8"),
        ({"ids": (IDS + 1).numpy()}, "ids is between 1 and 8, but it must be -1 .* or 0 to 7"),
        ({"ids": (IDS - 2).numpy()}, "ids is between -2 and 5"),
        ({"ids": IDS[..., :1].repeat(1, 1, 1, 2).numpy()}, "at step 3, layer 0, token 0, .*distin"),
        ({"gate_weights": WEIGHTS[..., :1]}, r"gate_weights is of shape \(2, 2, 5, 1\)"),
        ({"gate_weights": WEIGHTS.astype(np.float32)}, "torch.float32, but it must be torch.float"),
        ({"gate_weights": WEIGHTS * np.float16("nan")}, "gate_weights is not finite everywhere"),
        ({"hidden": WEIGHTS[:1]}, r"hidden is of shape \(1, 2, 5, 2\)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_file_is_refused_and_named(tmp_path, changes, message):
    make_trace().save(tmp_path / "a.npz")
    with pytest.raises(InputError, match=rf"a\.npz.*{message}"):
        RoutingTrace.load(edited(tmp_path / "a.npz", **changes))


def test_choices_that_go_nowhere_may_be_many(tmp_path):
    ids = IDS.clone()
    ids[0, 0, 0] = -1
    make_trace(ids=ids).save(tmp_path / "a.npz")
    assert torch.equal(RoutingTrace.load(tmp_path / "a.npz").ids, ids)


def test_other_files_are_named(tmp_path):
    (tmp_path / "a.npz").write_text("no zip")
    with pytest.raises(InputError, match=r"a\.npz is no npz file"):
        RoutingTrace.load(tmp_path / "a.npz")
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        RoutingTrace.load(tmp_path / "none.npz")


def test_a_wrong_trace_is_not_written(tmp_path):
    wrong = replace(make_trace(), gate_weights=torch.full((2, 2, 5, 2), float("inf")).half())
    with pytest.raises(InputError, match=r"a\.npz: gate_weights is not finite everywhere"):
        wrong.save(tmp_path / "a.npz")
    with pytest.raises(InputError, match="ids is empty"):
        make_trace(steps=()).save(tmp_path / "a.npz")
    assert list(tmp_path.iterdir()) == []
