"""Parts of a call that follow each other: the same results as in one, whatever each rank has; the
same moves in the same order on every rank. Waits and lifetimes are watched on CPUs, where the same
code runs without streams; on a GPU moves and experts that are late show a missing wait."""

import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ep_moe
from ep_moe import ConfigError, InputError, MoEConfig, MoELayer, Routing, ops
from ep_moe.dispatch import pipeline
from ep_moe.dispatch.pipeline import cut, pipelined
from ep_moe.kernels.device import leaving, left
from ep_moe.testing import assert_close, run_ranks
from tests.dispatch.ep_cases import Case, compare, config, expert_parallel, make_layer, one_process
from tests.dispatch.fake_deepep import stand_in
from tests.dispatch.test_expert_parallel import CASES
from tests.dispatch.windows import ON_GPUS, needs_interpreter, share_files

CHECK = {"EP_MOE_CHECK": "1"}
NAMES = {  # by the number of ranks
    2: (
        "uneven, 2",
        "no tokens anywhere",
        "padding",
        "shared experts and biases",
        "DeepSeek-V3 form",
        "sum",
        "a loss that only touches y",
        "checkpoint, one empty rank",
        "fp32",
    ),
    4: ("uneven and empty, 4", "checkpoint, uneven, 4", "K touches every rank"),
}
MORE = {
    "fewer tokens than parts": Case((1, 2), config()),
    "a last part of none": Case((4, 5), config()),
    "shared experts, one after the other": Case(
        (5, 9), config(num_shared_experts=1, shared_expert_overlap=False)
    ),
    "shared experts in a checkpoint": Case((5, 0), config(num_shared_experts=1), checkpoint=True),
    "tokens that are dropped": Case((9, 7), config(capacity_factor=1.25)),
    "gates on the input": Case((6, 5), config(gate_on="input")),
    "rows alone are kept": Case((6, 5), config(experts_keep="rows")),
}


def in_parts(case, chunks, **changes):
    return replace(case, config=replace(case.config, pipeline_chunks=chunks, **changes))


def many(rank, cases, device="cpu"):
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return [expert_parallel(rank, case, device) for case in cases]


def check_cases(world_size, cases, device="cpu", **how):
    ranks = run_ranks(many, world_size, cases, device, **how)
    for i, case in enumerate(cases):
        compare(case, [got[i] for got in ranks], one_process(case, device))


@pytest.mark.parametrize("chunks", [2, 3])
def test_equals_one_process(chunks):
    cases = [CASES[name] for name in NAMES[2]] + list(MORE.values())
    check_cases(2, [in_parts(case, chunks) for case in cases])


def test_four_ranks_equal_one_process():
    check_cases(4, [in_parts(CASES[name], 3) for name in NAMES[4]])


def test_ranks_that_check_each_other_agree():
    """Before every move, of the forward, its recomputation and the backward."""
    cases = [
        CASES["uneven, 2"],
        CASES["checkpoint, one empty rank"],
        MORE["fewer tokens than parts"],
    ]
    check_cases(2, [in_parts(case, 3) for case in cases], environ=CHECK)


def test_parts():
    def sizes(tokens, chunks):
        x, ids, gates = torch.rand(tokens, 4), torch.zeros(tokens, 2).int(), torch.rand(tokens, 2)
        parts = cut(x, Routing(ids, gates), chunks)
        for whole, kind in ((x, lambda p: p[0]), (gates, lambda p: p[1].gate_weights)):
            assert torch.equal(torch.cat([kind(part) for part in parts]), whole)
        assert all(len(rows) == len(of.ids) == len(of.gate_weights) for rows, of in parts)
        return [len(rows) for rows, _ in parts]

    assert sizes(5, 3) == [2, 2, 1]
    assert sizes(4, 3) == [2, 2, 0]
    assert sizes(0, 2) == [0, 0]
    assert sizes(1, 4) == [1, 0, 0, 0]
    assert sizes(9, 2) == [5, 4]


# The order of moves


def note_moves(transport, events):
    """Each move as the number of its part and a word."""
    plans = []

    def note(name, word):
        move = getattr(transport, name)

        def noted(*args, **kwargs):
            if name != "dispatch":
                if args[0] in plans:  # else the end of a dispatch
                    events.append((plans.index(args[0]), word))
                return move(*args, **kwargs)
            events.append((len(plans), word))
            sent = move(*args, **kwargs)
            plans.append(sent.plan)
            return sent

        setattr(transport, name, noted)

    note("dispatch", "out")
    note("replay", "out again")
    note("combine", "back")
    note("combine_gates", "gates back")


def ordered_moves(rank, tokens, needs):
    """needs[rank]: what of x and the gate weights needs a gradient."""
    layer, events = make_layer(Case((1, 1), config(pipeline_chunks=3)), dist.group.WORLD), []
    note_moves(layer.transport, events)
    x = torch.randn(tokens[rank], 16, dtype=torch.float64).requires_grad_("x" in needs[rank])
    ids = torch.randint(0, 8, (len(x), 2), dtype=torch.int32)
    gates = torch.rand(len(x), 2, dtype=torch.float64).requires_grad_("g" in needs[rank])
    y = ep_moe.moe(x, Routing(ids, gates), layer.experts, layer.transport)
    y.square().sum().backward()
    return events


@pytest.mark.parametrize(
    "tokens, needs", [((7, 5), ("xg", "xg")), ((7, 0), ("xg", "g")), ((0, 4), ("x", "g"))]
)
def test_every_rank_makes_the_same_moves(tokens, needs):
    out, back = [(0, "out"), (1, "out"), (0, "back"), (2, "out"), (1, "back"), (2, "back")], []
    for part, move in ((2, "C"), (1, "C"), (2, "D"), (0, "C"), (1, "D"), (0, "D")):
        words = ["out again"] if move == "C" else ["back", "gates back"]
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
            self.events.append(word)
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
        assert seen == [("forward", 5)] * 2 + [("back", 5)] * 4
        assert others == [0, 0]


def test_they_are_taken_again_whatever_happens():
    with pytest.raises(RuntimeError, match="no way"), leaving(3):
        fail()
    assert left() == 0


# Around it


def other_ways(rank):
    """y and gradients in a checkpoint that replays; y without autograd; with choices of another
    run; after a warm-up; x that is changed."""
    case = Case((7, 3), config(num_shared_experts=1))
    plain = make_layer(case, dist.group.WORLD)
    layer = make_layer(in_parts(case, 3), dist.group.WORLD)
    x = torch.randn(7 - 4 * rank, 16, dtype=torch.float64, requires_grad=True)
    with ep_moe.record_routing() as record:
        expected, _ = plain(x)
    expected.square().sum().backward()
    d_x, x.grad = x.grad, None

    events = []
    note_moves(layer.transport, events)
    y = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False, context_fn=ep_moe.replay())
    assert_close(y, expected, name="y")
    y.square().sum().backward()
    assert_close(x.grad, d_x, name="d_x")
    for (name, one), other in zip(plain.named_parameters(), layer.parameters(), strict=True):
        assert_close(other.grad, one.grad, name=name)
    assert sum(word == "out" for _, word in events) == 3

    with ep_moe.replay_routing(record), ep_moe.record_routing() as again:
        assert_close(layer(x)[0], expected, name="y of the recorded choices")
    assert [len(choice.ids) for choice in again.choices] == [len(x)]
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert_close(layer(x)[0], expected, name="y without autograd")
    calls = []
    handle = layer.experts.register_forward_hook(lambda *_: calls.append(0))
    layer.warmup(5)
    handle.remove()
    assert len(calls) == 6

    z = x.detach().clone().requires_grad_() * 1
    y, _ = layer(z)
    y += z
    y.sum().backward()
    z = x.detach().clone().requires_grad_() * 1
    y, _ = layer(z)
    z.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_whatever_runs_around_it():
    run_ranks(other_ways, 2)


def test_on_one_rank_nothing_changes():
    case = Case((5,), config())
    results, calls = [], []
    for chunks in (1, 3):
        layer = make_layer(in_parts(case, chunks), None)
        layer.experts.register_forward_hook(lambda *_: calls.append(0))
        torch.manual_seed(0)
        results.append(layer(torch.randn(5, 16, dtype=torch.float64))[0])
    assert torch.equal(*results)
    assert len(calls) == 2


# Buffers of a fixed size


def over_windows(rank, folder, cases):
    share_files(folder)
    found = [expert_parallel(rank, case) for case in cases]
    layer = make_layer(cases[0], dist.group.WORLD)
    with torch.no_grad():
        x = torch.randn(4, 16, dtype=cases[0].dtype)
        assert_close(layer(x)[0], layer(x)[0].clone(), name="y without autograd")
    return found, layer.transport.max_tokens


@needs_interpreter
def test_parts_through_windows(tmp_path):
    """Windows have room for a part of the most tokens, and no more."""
    how = {"transport": "symm", "max_tokens_per_rank": 8}
    cases = [
        in_parts(Case((8, 3), config(num_shared_experts=1)), 3, **how),
        in_parts(Case((7, 0), config(), checkpoint=True), 3, **how),
    ]
    ranks = run_ranks(over_windows, 2, str(tmp_path), cases, timeout=150.0)
    assert [most for _, most in ranks] == [3, 3]
    for i, case in enumerate(cases):
        compare(case, [got[i] for got, _ in ranks], one_process(case))


def over_deepep(rank, case):
    stand_in("v2")
    return expert_parallel(rank, case)


def test_parts_over_deepep():
    case = Case((12, 5), config(hidden_size=256), dtype=torch.bfloat16)
    case = in_parts(case, 2, transport="deepep", max_tokens_per_rank=12)
    compare(case, run_ranks(over_deepep, 2, case), one_process(case))


def too_many(rank, folder):
    share_files(folder)
    moe = config(transport="symm", max_tokens_per_rank=7, pipeline_chunks=3)
    layer = MoELayer(moe, dist.group.WORLD)
    assert layer.transport.max_tokens == 3
    layer(torch.randn(7, 16))
    for tokens in (8, 10):  # which parts of three have room for, and have not
        with pytest.raises(InputError, match=rf"of {tokens}, .*at most max_tokens_per_rank = 7"):
            layer(torch.randn(tokens, 16))
        ids, gates = torch.zeros(tokens, 2).int(), torch.ones(tokens, 2)
        with pytest.raises(InputError, match=rf"of {tokens}, .*at most max_tokens_per_rank = 7"):
            ep_moe.moe(torch.randn(tokens, 16), Routing(ids, gates), layer.experts, layer.transport)


@needs_interpreter
def test_more_tokens_than_the_parts_have_room_for(tmp_path):
    run_ranks(too_many, 1, str(tmp_path))


def without_backward(rank):
    stand_in("v1")
    moe = config(transport="deepep_low_latency", max_tokens_per_rank=8, pipeline_chunks=2)
    with pytest.raises(ConfigError, match=r"pipeline_chunks = 2.*deepep_low_latency.*few tokens"):
        MoELayer(moe, dist.group.WORLD)


def test_the_low_latency_path_is_not_cut():
    run_ranks(without_backward, 2)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["collective", "symm"])
def test_equals_one_process_on_gpu(transport, require_gpu):
    cases = [CASES[name] for name in NAMES[2]] + list(MORE.values())
    how = {"transport": transport, "max_tokens_per_rank": 40}
    cases = [in_parts(case, 2 + i % 2, **how) for i, case in enumerate(cases)]
    check_cases(2, cases, "cuda", **ON_GPUS[transport])


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
    graphs = []
    for work in (step, infer):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = work()
        graphs.append((graph, captured, work))
    pairs = []
    for turn in range(6):
        with torch.no_grad():
            x.normal_()
        graph, captured, work = graphs[turn % 3 // 2]
        graph.replay()
        found = [value.clone() for value in captured]
        pairs += zip(found, work(), strict=True)
    return [torch.equal(got, expected) for got, expected in pairs]


@pytest.mark.gpu
def test_a_graph_holds_the_parts(require_gpu):
    ranks = run_ranks(captured_parts, 2, **ON_GPUS["symm"])
    assert all(all(same) for same in ranks)
