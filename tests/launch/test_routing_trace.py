"""What a run's routing.npz holds: every rank's tokens in rank order, as its routers chose."""

import pytest
import torch
import torch.distributed as dist
from lm import LanguageModel
from routing_trace import RecordingConfig, RoutingRecorder

import ep_moe
from ep_moe import ConfigError
from ep_moe.parallel import Process
from ep_moe.testing import assert_close, run_ranks
from ep_moe.traces import RoutingTrace
from tests.helpers import small_config

from .test_lm import make_config

ALONE = Process(0, 0, 1, torch.device("cpu"), None)
STEPS = range(1, 7)


def make_model(ep=None, **changes):
    torch.manual_seed(0)
    return LanguageModel(make_config(moe=small_config(**changes)), ep=ep)


def tokens_of(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(256, (2, 5), generator=generator)


def recorded(path, config, *, process=ALONE, **changes):
    """The trace of a model that sees `tokens_of` at each step, in its training mode."""
    model = make_model(process.group, **changes)
    recorder = RoutingRecorder(config, model.moe_layers(), process, STEPS)
    for step in STEPS:
        with recorder.recording(step):
            logits, _ = model(tokens_of(step, process.rank))
            logits.sum().backward()
    recorder.write(path, {"seed": 0})
    return RoutingTrace.load(path) if process.rank == 0 else None


def test_holds_what_the_layers_chose_and_saw(tmp_path):
    config = RecordingConfig(steps=(2, 5), hidden=True)
    trace = recorded(tmp_path / "a.npz", config)
    assert (trace.steps, trace.layers, trace.origin) == ((2, 5), (0, 1), {"seed": 0})
    assert trace.ids.dtype == torch.int8

    model = make_model()
    for step in trace.steps:
        with ep_moe.record_routing() as record:
            model(tokens_of(step, 0))
        for layer, choice in enumerate(record.choices):
            routing = trace.routing(step, layer)
            assert torch.equal(routing.ids, choice.ids)
            x = trace.hidden[trace.steps.index(step), layer].float()
            again = model.moe_layers()[layer].router(x, None)[0]
            assert_close(routing.gate_weights, again.gate_weights, name="gates", tolerance=5e-3)


def test_a_dropped_choice_goes_nowhere(tmp_path):
    config = RecordingConfig(steps=(1,), layers=(1,))
    trace = recorded(tmp_path / "a.npz", config, capacity_factor=1.1)
    dropped = trace.ids < 0
    assert dropped.any()
    assert not trace.gate_weights[dropped].any()


def test_the_ranks_follow_each_other(tmp_path):
    config = RecordingConfig(steps=(1, 4), hidden=True)
    run_ranks(_record_on_two_ranks, 2, tmp_path, config)
    both = RoutingTrace.load(tmp_path / "both.npz")
    assert both.tokens_per_step == 20

    model = make_model()
    for step in both.steps:
        for rank in range(2):
            with ep_moe.record_routing() as record:
                model(tokens_of(step, rank))
            mine = slice(10 * rank, 10 * (rank + 1))
            for layer, choice in enumerate(record.choices):
                assert torch.equal(both.routing(step, layer).ids[mine], choice.ids)


def _record_on_two_ranks(rank, folder, config):
    process = Process(rank, rank, 2, torch.device("cpu"), dist.group.WORLD)
    recorded(folder / "both.npz", config, process=process)


def test_no_step_chosen_leaves_no_file_and_no_hook(tmp_path):
    model = make_model()
    recorder = RoutingRecorder(RecordingConfig(), model.moe_layers(), ALONE, STEPS)
    with recorder.recording(1):
        assert not any(layer.router._forward_hooks for layer in model.moe_layers())
    recorder.write(tmp_path / "a.npz", {})
    assert list(tmp_path.iterdir()) == []


def test_hooks_are_gone_after_a_failed_step():
    model = make_model()
    recorder = RoutingRecorder(RecordingConfig(steps=(1,)), model.moe_layers(), ALONE, STEPS)
    with pytest.raises(ZeroDivisionError), recorder.recording(1):
        raise ZeroDivisionError
    assert not any(layer.router._forward_hooks for layer in model.moe_layers())


@pytest.mark.parametrize(
    "config, message",
    [
        ({"steps": (7,)}, r"record_routing.steps = \(7,\), but .* among the steps .* 1 to 6"),
        ({"steps": (2, 2)}, r"record_routing.steps = \(2, 2\), but .* each once"),
        ({"steps": (1,), "layers": (2,)}, r"record_routing.layers = \(2,\), but .* 0 to 1"),
    ],
)
def test_what_the_run_does_not_have_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        RoutingRecorder(RecordingConfig(**config), make_model().moe_layers(), ALONE, STEPS)
