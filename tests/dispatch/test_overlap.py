"""Rows travel while the shared experts are computed. Order and lifetimes are watched on CPUs, where
the same nodes run without streams; on a GPU a second stream that is late shows a missing wait."""

import weakref
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ep_moe.dispatch.autograd as nodes
from ep_moe import MoEConfig, MoELayer, Routing
from ep_moe.dispatch import dispatch_beside
from ep_moe.testing import run_ranks
from tests.dispatch.ep_cases import config
from tests.dispatch.windows import ON_GPUS

WITH_SHARED = config(num_shared_experts=1)


class Watch:
    """Stands in for SecondStream; what happens on it, and beside it, becomes a list of words."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, device: torch.device) -> "Watch":
        self.events.append("mark")
        return self

    @contextmanager
    def launch(self):
        self.events.append("(")
        yield
        self.events.append(")")

    def join(self) -> None:
        self.events.append("join")

    def follow(self, owner, name: str, word: str) -> None:
        call = getattr(owner, name)

        def noted(*args, **kwargs):
            self.events.append(word)
            return call(*args, **kwargs)

        setattr(owner, name, noted)

    def take(self) -> list[str]:
        events, self.events = self.events, []
        return events


def watched_layer(monkeypatch, **changes) -> tuple[Watch, MoELayer]:
    watch = Watch()
    monkeypatch.setattr(nodes, "SecondStream", watch)
    layer = MoELayer(replace(WITH_SHARED, **changes), dist.group.WORLD).double()
    watch.follow(layer.transport, "dispatch", "out")
    watch.follow(layer.transport, "replay", "out")
    watch.follow(layer.transport, "combine", "back")
    watch.follow(layer.shared_experts, "forward", "shared")
    watch.follow(layer.experts, "forward", "experts")
    return watch, layer


def watched_steps(rank):
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch, layer = watched_layer(monkeypatch)
        read, alive = [], []
        for name in ("combine", "combine_gates"):
            move = getattr(layer.transport, name)

            def noted(plan, values, move=move):
                read.append(weakref.ref(values))
                return move(plan, values)

            setattr(layer.transport, name, noted)

        def shared_backward(_):
            watch.events.append("shared backward")
            alive.append([value() is not None for value in read[-2:]])

        layer.shared_experts.w_gate_up.register_hook(shared_backward)
        x = torch.randn(5 + rank, 16, dtype=torch.float64, requires_grad=True)
        y, _ = layer(x)
        forward = watch.take()
        y.square().sum().backward()
        backward = watch.take()
        freed = not any(value() for value in read[-2:])  # while y holds its nodes

        def step(anomaly=False):
            with torch.autograd.set_detect_anomaly(anomaly):
                block = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)
                block.square().sum().backward()
            return watch.take()

        recomputed = step()
        checked = step(anomaly=True)
        apart = MoELayer(replace(WITH_SHARED, shared_expert_overlap=False), dist.group.WORLD)
        apart.double()(x)[0].sum().backward()
        return forward, backward, alive[0], freed, recomputed, checked, watch.take()


def test_the_shared_experts_run_while_rows_travel():
    """Launched before a dispatch that may make the host wait; both waited for before the experts.
    In the backward rows' gradients are under way while those of the shared experts are computed,
    and what is read on the way is held until they are there."""
    for forward, backward, alive, freed, recomputed, checked, apart in run_ranks(watched_steps, 2):
        out = ["mark", "shared", "(", "out", ")", "join"]
        assert forward == [*out, "experts", "back"]
        home = ["mark", "(", "back", ")", "shared backward", "join"]
        assert backward == ["out", *home]
        assert alive == [True, True]
        assert freed
        # The recomputation ends with the experts: nothing behind them is saved.
        assert recomputed == [*forward, "out", *out, "experts", *home]
        at_once = ["mark", "(", "back", ")", "join", "shared backward"]
        assert checked[-len(at_once) :] == at_once
        assert apart == []


def test_a_dispatch_that_fails_is_waited_for(monkeypatch):
    """The stream is joined, whatever happens: a capture would break, and memory be freed early."""
    watch = Watch()
    monkeypatch.setattr(nodes, "SecondStream", watch)

    def fail(*_, **__):
        raise RuntimeError("no way")

    routing = Routing(torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
    with pytest.raises(RuntimeError, match="no way"):
        dispatch_beside(torch.ones(3, 4), routing, 2, SimpleNamespace(dispatch=fail), lambda: None)
    assert watch.take() == ["mark", "(", "join"]
    with pytest.raises(RuntimeError, match="no way"):
        dispatch_beside(torch.ones(3, 4), routing, 2, SimpleNamespace(), fail)
    assert watch.take() == ["mark", "join"]


def interrupted_backward(rank):
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch, layer = watched_layer(monkeypatch)

        def fail(_):
            raise RuntimeError("a hook")

        y, _ = layer(torch.randn(5, 16, dtype=torch.float64, requires_grad=True))
        hook = layer.shared_experts.w_gate_up.register_hook(fail)
        with pytest.raises(RuntimeError, match="a hook"):
            y.sum().backward(retain_graph=True)
        hook.remove()
        watch.take()
        y.sum().backward()
        return watch.take()


def test_a_backward_that_failed_on_the_way_is_waited_for_in_the_next():
    for events in run_ranks(interrupted_backward, 2):
        assert events == ["out", "join", "mark", "(", "back", ")", "join"]


def steps(rank, device, transport, delay):
    """Three training steps' and one inference call's results, with the overlap and without. With a
    delay moves are late, and still later what they read: x, and the gradients that go back."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    changes = {"num_shared_experts": 2, "transport": transport, "max_tokens_per_rank": 70}
    moe = MoEConfig(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2, **changes)
    found = []
    for overlap in (False, True):
        torch.manual_seed(rank)
        layer = MoELayer(replace(moe, shared_expert_overlap=overlap), dist.group.WORLD).to(device)
        late_by = delay * overlap
        for name in ("dispatch", "replay", "combine") if late_by else ():
            move = getattr(layer.transport, name)

            def late(*args, move=move, late_by=late_by, **kwargs):
                torch.cuda._sleep(late_by)
                return move(*args, **kwargs)

            setattr(layer.transport, name, late)
        results = []

        def hold_up(_: Any = None, late_by=late_by) -> None:
            if late_by:
                torch.cuda._sleep(2 * late_by)

        for turn in range(3):
            hold_up()
            x = torch.randn(60 + rank, 256, device=device, requires_grad=True)
            y, _ = layer(x)
            y.register_hook(hold_up)
            grads = torch.autograd.grad(y.square().sum() * (turn + 1), [x, *layer.parameters()])
            results += [y.detach().cpu(), *(grad.cpu() for grad in grads)]
        with torch.no_grad():
            results.append(layer(x)[0].cpu())
        found.append(results)
    return [torch.equal(one, other) for one, other in zip(*found, strict=True)]


def test_the_same_bits_as_one_after_the_other():
    ranks = run_ranks(steps, 2, "cpu", "collective", 0)
    assert all(all(same) for same in ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["collective", "symm"])
def test_nothing_is_read_before_it_is_there(transport, require_gpu):
    """Each move begins 10 ms late, and 20 ms late what it reads."""
    ranks = run_ranks(steps, 2, "cuda", transport, 20_000_000, **ON_GPUS[transport])
    assert all(all(same) for same in ranks)
