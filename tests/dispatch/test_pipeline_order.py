"""The order of a pipeline's moves, who waits for whom, and how long memory is held: watched on
CPUs, where the same code runs without streams. On a GPU moves and experts that are late show a
missing wait."""

import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ep_moe
from ep_moe import MoEConfig, MoELayer, Routing, ops
from ep_moe.dispatch import pipeline
from ep_moe.dispatch.pipeline import pipelined
from ep_moe.kernels.device import leaving, left
from ep_moe.testing import assert_close, run_ranks
from tests.dispatch.ep_cases import (
    Case,
    config,
    make_layer,
    note_moves,
)
from tests.dispatch.windows import ON_GPUS
from tests.graphs import capture, replayed

CHECK = {"EP_MOE_CHECK": "1"}


def ordered_moves(rank, tokens, needs):
    """needs[rank]: what of x and the gate weights needs a gradient."""
    layer, events = make_layer(Case((1, 1), config(pipeline_chunks=3)), dist.group.WORLD), []
    note_moves(layer.transport, events)
    wgrad = ops.grouped_gemm_wgrad

    def noted(*args, **kwargs):
        events.append(("all", "wgrad"))
        return wgrad(*args, **kwargs)

    try:
        ops.grouped_gemm_wgrad = noted
        moved(layer, rank, tokens, needs)
    finally:
        ops.grouped_gemm_wgrad = wgrad
    return events


def moved(layer, rank, tokens, needs):
    x = torch.randn(tokens[rank], 16, dtype=torch.float64).requires_grad_("x" in needs[rank])
    ids = torch.randint(0, 8, (len(x), 2), dtype=torch.int32)
    gates = torch.rand(len(x), 2, dtype=torch.float64).requires_grad_("g" in needs[rank])
    y = ep_moe.moe(x, Routing(ids, gates), layer.experts, layer.transport)
    y.square().sum().backward()


@pytest.mark.parametrize(
    "tokens, needs", [((7, 5), ("xg", "xg")), ((7, 0), ("xg", "g")), ((0, 4), ("x", "g"))]
)
def test_every_rank_makes_the_same_moves(tokens, needs):
    """And the weights' gradients, once for all parts, before the last of them."""
    out, back = [(0, "out"), (1, "out"), (0, "back"), (2, "out"), (1, "back"), (2, "back")], []
    for part, move in ((2, "C"), (1, "C"), (2, "D"), (0, "C"), (1, "D"), (0, "D")):
        words = ["out again"] if move == "C" else ["back", "gates back"]
        back += [("all", "wgrad")] * 2 if (part, move) == (0, "D") else []
        back += [(part, word) for word in words]
    for events in run_ranks(ordered_moves, 2, tokens, needs, environ=CHECK):
        assert events == out + back


# Waits and lifetimes


class Watch:
    """Stands in for SecondStream, as seen from one pipeline; all that happens becomes a word."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.places = 0

    def __call__(self, device, which):
        assert which == "moves"  # the experts' backward has a second stream of its own
        self.events.append("mark")
        return self

    @contextmanager
    def launch(self):
        self.events.append("(")
        yield
        self.events.append(")")

    def place(self):
        self.places += 1
        self.events.append(f"place {self.places}")
        return self.places

    def wait(self, place):
        self.events.append(f"wait {place}")

    def follow(self):
        self.events.append("follow")

    def join(self):
        self.events.append("join")

    def read_here(self, *results):
        self.events.append(f"lend {len(results)}")

    def take(self):
        events, self.events, self.places = self.events, [], 0
        return " ".join(events)

    def noting(self, word, call):
        def noted(*args, **kwargs):
            self.events.append(word if kwargs.get("keep", True) else f"{word}, not kept")
            return call(*args, **kwargs)

        return noted


OUT = "( out ) lend 3 place {}"
TRAINED = (
    f"mark shared {OUT.format(1)} wait 1 experts {OUT.format(2)} follow ( back ) "
    f"wait 2 experts {OUT.format(3)} follow ( back ) wait 3 experts "
)
END = "follow ( back ) join"


def watched(rank):
    watch = Watch()
    pipeline.SecondStream = watch
    layer = MoELayer(config(num_shared_experts=1, pipeline_chunks=3), dist.group.WORLD).double()
    layer.transport.dispatch = watch.noting("out", layer.transport.dispatch)
    layer.transport.combine = watch.noting("back", layer.transport.combine)
    layer.shared_experts.forward = watch.noting("shared", layer.shared_experts.forward)
    layer.experts.forward = watch.noting("experts", layer.experts.forward)
    x = torch.randn(5 + rank, 16, dtype=torch.float64, requires_grad=True)
    found = []
    y, _ = layer(x)
    found.append(watch.take())
    with torch.no_grad():
        layer(x)
    found.append(watch.take())
    y = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False)
    watch.take()
    y.sum().backward()
    found.append(watch.take())
    layer.experts.forward = fail
    with pytest.raises(RuntimeError, match="no way"):
        layer(x)
    found.append(watch.take())
    layer.shared_experts.forward = fail
    with pytest.raises(RuntimeError, match="no way"):
        layer(x)
    return [*found, watch.take()]


def fail(*_):
    raise RuntimeError("no way")


def test_what_waits_for_what():
    """The experts of a part for its rows alone; a way back for the experts; the rest of the layer
    for all moves, whatever happens."""
    for trained, inferred, recomputed, failed, unsent in run_ranks(watched, 2):
        assert trained == TRAINED + END
        assert inferred == trained.replace(" lend 3", "")
        # The recomputation ends with the last experts; it is within the backward of their part.
        assert recomputed.startswith(f"{TRAINED}join")
        assert recomputed.endswith("back back back")
        assert failed == f"mark shared {OUT.format(1)} wait 1 join"
        assert unsent == "mark join"


def lifetimes(rank, grad):
    """At each wait of this stream for a part: which results of the experts are still there. At each
    wait of the moves: the rows that the experts have read."""
    outs, arrived, at_wait, at_follow = [], [], [], []

    class Second(ops.SecondStream):
        def wait(self, place):
            at_wait.append([out() is not None for out in outs])

        def follow(self):
            at_follow.append([rows() is not None for rows in arrived][-2:])

    pipeline.SecondStream = Second
    layer = MoELayer(config(pipeline_chunks=4), dist.group.WORLD).double()

    def work(here):
        arrived.append(weakref.ref(here.rows))
        out = layer.experts(here)
        outs.append(weakref.ref(out))
        return out

    x = torch.randn(9, 16, dtype=torch.float64)
    ids, gates = torch.randint(0, 8, (9, 2)).int(), torch.rand(9, 2, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        pipelined(x, Routing(ids, gates), 8, layer.transport, work, chunks=4)
    return at_wait, at_follow


@pytest.mark.parametrize("grad", [True, False])
def test_what_the_other_stream_reads_is_held(grad):
    """The experts' results until a part that was sent after them is there, and no longer."""
    for at_wait, at_follow in run_ranks(lifetimes, 2, grad):
        assert all(found[-1] for found in at_follow)
        assert all(found[-2:] == [True] * len(found[-2:]) for found in at_wait)
        assert [sum(found) for found in at_wait] == [0, 1, 2, 2]


# Multiprocessors


def left_to_moves(rank):
    layer, seen = make_layer(Case((1, 1), config(pipeline_chunks=2)), dist.group.WORLD), []
    layer.transport.sms = 5
    forward = ops.grouped_gemm
    wgrad = ops.grouped_gemm_wgrad
    try:
        ops.grouped_gemm = lambda *a, **k: (seen.append(("forward", left())), forward(*a, **k))[1]
        ops.grouped_gemm_wgrad = lambda *a, **k: (seen.append(("back", left())), wgrad(*a, **k))[1]
        y, _ = layer(torch.randn(4, 16, dtype=torch.float64))
        between = left()
        y.sum().backward()
    finally:
        ops.grouped_gemm, ops.grouped_gemm_wgrad = forward, wgrad
    return seen, between, left()


def test_the_experts_leave_multiprocessors_to_the_moves():
    for seen, *others in run_ranks(left_to_moves, 2):
        assert seen == [("forward", 5)] * 2 + [("back", 5)] * 2  # of both parts, each weight's
        assert others == [0, 0]


def test_they_are_taken_again_whatever_happens():
    with pytest.raises(RuntimeError, match="no way"), leaving(3):
        fail()
    assert left() == 0


# On a GPU


def late_steps(rank, device, transport, late):
    """Three training steps' and two inference calls' results, of parts one after the other as they
    come, and with a name of `late` held up: moves, or the experts, forward and backward. Beside
    them, the same in one part."""
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 8, "top_k": 2}
    how = {"num_shared_experts": 2, "transport": transport, "max_tokens_per_rank": 70}
    found = []
    for chunks, held_up in ((1, ""), (3, ""), *((3, name) for name in late)):
        moe = MoEConfig(**sizes, **how, pipeline_chunks=chunks)
        torch.manual_seed(rank)
        layer = MoELayer(moe, dist.group.WORLD).to(device)
        if held_up == "moves":
            for name in ("dispatch", "replay", "combine", "combine_gates"):
                setattr(layer.transport, name, held(getattr(layer.transport, name)))
        elif held_up == "experts":
            layer.experts.forward = held(layer.experts.forward)
            layer.experts.register_full_backward_pre_hook(lambda *_: sleep())
        results = []
        for turn in range(3):
            x = torch.randn(60 + rank, 256, device=device, requires_grad=True)
            y, _ = layer(x)
            grads = torch.autograd.grad(y.square().sum() * (turn + 1), [x, *layer.parameters()])
            results += [y.detach(), *grads]
        with torch.no_grad():
            results.append(layer(layer(x)[0])[0])
        found.append([value.cpu() for value in results])
    whole, parts, *others = found
    for one, other in zip(whole, parts, strict=True):
        assert_close(other, one, name="of parts", tolerance=1e-4)
    return [torch.equal(*pair) for other in others for pair in zip(parts, other, strict=True)]


def held(call):
    def late(*args, **kwargs):
        sleep()
        return call(*args, **kwargs)

    return late


def sleep():
    if torch.cuda.is_available():
        torch.cuda._sleep(20_000_000)  # 10 ms of the stream that is current


def test_parts_equal_the_whole():
    ranks = run_ranks(late_steps, 2, "cpu", "collective", ("moves", "experts"))
    assert all(all(same) for same in ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["collective", "symm"])
def test_nothing_is_read_before_it_is_there(transport, require_gpu):
    late = ("moves", "experts")
    ranks = run_ranks(late_steps, 2, "cuda", transport, late, **ON_GPUS[transport])
    assert all(all(same) for same in ranks)


def captured_parts(rank):
    """Forward and backward in a graph, and forward alone in another, replayed with other tokens
    each time; and without one."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    moe = MoEConfig(
        hidden_size=128,
        intermediate_size=64,
        num_experts=8,
        top_k=2,
        num_shared_experts=1,
        transport="symm",
        max_tokens_per_rank=40,
        pipeline_chunks=3,
    )
    layer = MoELayer(moe, dist.group.WORLD).cuda().bfloat16()
    x = torch.randn(33, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [x, *layer.parameters()]

    def step():
        y, _ = layer(x)
        return (y.detach(), *torch.autograd.grad(y.square().sum(), leaves))

    @torch.no_grad()
    def infer():
        return (layer(layer(x)[0])[0],)

    layer.warmup(33)
    return replayed([capture(step), capture(infer)], x)


@pytest.mark.gpu
def test_a_graph_holds_the_parts(require_gpu):
    ranks = run_ranks(captured_parts, 2, **ON_GPUS["symm"])
    assert all(all(same) for same in ranks)
