"""Rows written into the peers' memory: whole layers, waits that end, graphs. The moves themselves
are in `test_transports`."""

import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ep_moe import (
    BackendUnavailable,
    ConfigError,
    ExpertParallel,
    InputError,
    MoEConfig,
    MoELayer,
    Routing,
)
from ep_moe.dispatch import dispatch, make_transport, symm
from ep_moe.errors import CallMismatch, DispatchTimeout
from ep_moe.kernels.window import ARRIVAL, SLOTS, layout
from ep_moe.testing import run_ranks
from tests.dispatch.ep_cases import compare, expert_parallel, one_process
from tests.dispatch.test_expert_parallel import CASES
from tests.dispatch.test_transports import Kind, check_moves, moves
from tests.dispatch.windows import ON_GPUS, needs_interpreter, share_files
from tests.graphs import capture, replayed

MOST = 40  # tokens of a rank


def over_windows(case):
    return replace(case, config=replace(case.config, transport="symm", max_tokens_per_rank=MOST))


def layers(rank, cases, folder, device):
    if device == "cpu":
        share_files(folder)
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return [expert_parallel(rank, over_windows(case), device) for case in cases]


def check_layers(world_size, names, folder, device="cpu", **how):
    cases = [CASES[name] for name in names]
    ranks = run_ranks(layers, world_size, cases, str(folder), device, **how)
    for i, case in enumerate(cases):
        compare(case, [got[i] for got in ranks], one_process(case, device))


@needs_interpreter
def test_layers_equal_one_process(tmp_path):
    names = ("uneven, 2", "no tokens anywhere", "padding", "checkpoint, one empty rank", "bf16")
    check_layers(2, names, tmp_path, timeout=120.0)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_layers_equal_one_process_on_gpu(world_size, require_gpu):
    names = [name for name, case in CASES.items() if case.world_size == world_size]
    check_layers(world_size, names, None, "cuda", **ON_GPUS["symm"])


def many_tokens(rank, world_size, most, folder, device):
    """There and back: each token as often as it goes to a rank. More than are summed in one launch,
    of which those with two experts of a rank go there once, and one in five goes nowhere."""
    if device == "cpu":
        share_files(folder, programs=2 * world_size)
    else:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    ep = ExpertParallel.resolve(dist.group.WORLD)
    transport = symm.SymmTransport(ep, most)
    found = []
    for tokens in (most - rank, most * rank // world_size):
        x = torch.randn(tokens, 256, dtype=torch.bfloat16, device=device)
        ids = torch.randint(0, 4 * world_size, (tokens, 3), dtype=torch.int32, device=device)
        ids[torch.rand(tokens, device=device) < 0.2] = -1
        goes = torch.stack([(ids // 4 == r).any(1) for r in range(world_size)]).sum(0)
        routing = Routing(ids, torch.rand(tokens, 3, device=device))
        for keep in (True, False):
            plan, rows, gates = transport.dispatch(x, routing, 4 * world_size, keep=keep)
            y = transport.combine(plan, rows)
            found.append(torch.equal(y, (x.float() * goes[:, None]).bfloat16()))
            gates = gates.masked_fill(plan.local_ids < 0, 0.0)
            back = routing.gate_weights.masked_fill(ids < 0, 0.0)
            found.append(torch.equal(transport.combine_gates(plan, gates), back))
    return found


@needs_interpreter
def test_many_tokens(tmp_path):
    ranks = run_ranks(many_tokens, 2, 2, 45, str(tmp_path), "cpu")
    assert ranks == [[True] * 8] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_many_tokens_on_gpu(world_size, require_gpu):
    how = ON_GPUS["symm"]
    ranks = run_ranks(many_tokens, world_size, world_size, 3000, None, "cuda", **how)
    assert ranks == [[True] * 8] * world_size


def captured_steps(rank, transport):
    """Forward and backward in a graph, and forward alone in another, replayed with other tokens
    each time; and without one."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(0)
    config = MoEConfig(
        hidden_size=128,
        intermediate_size=64,
        num_experts=8,
        top_k=2,
        transport=transport,
        max_tokens_per_rank=MOST,
    )
    layer = MoELayer(config, dist.group.WORLD).cuda().bfloat16()
    x, d_y = torch.randn(2, 33, 128, device="cuda", dtype=torch.bfloat16)
    leaves = [x.requires_grad_(), *layer.parameters()]

    def step():
        y, _ = layer(x)
        return (y.detach(), *torch.autograd.grad(y, leaves, d_y))

    @torch.no_grad()
    def infer():
        return (layer(layer(x)[0])[0],)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
            infer()
        torch.cuda.set_sync_debug_mode("error")
        step()
        infer()
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    return replayed([capture(step, stream=stream), capture(infer, stream=stream)], x)


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [2, 8])
def test_a_graph_equals_eager(world_size, require_gpu):
    ranks = run_ranks(captured_steps, world_size, "symm", **ON_GPUS["symm"])
    assert all(all(same) for same in ranks)


def alone(rank, folder):
    """Rank 1 stays away."""
    share_files(folder)
    case = over_windows(CASES["balanced, 2"])
    layer = MoELayer(case.config, dist.group.WORLD)
    layer(torch.randn(4, case.config.hidden_size))
    layer.ep.peers._timeout = 0.0005
    if rank == 0:
        with pytest.raises(
            DispatchTimeout, match=r"rank 0 .*layer 0, call 2.*for rank 1 to begin \(move 3\)"
        ):
            layer(torch.randn(4, case.config.hidden_size))


@needs_interpreter
def test_an_absent_peer_is_named(tmp_path):
    run_ranks(alone, 2, str(tmp_path))


def test_what_it_refuses(monkeypatch):
    ep = ExpertParallel(rank=0, size=2)
    with pytest.raises(ConfigError, match="max_tokens_per_rank"):
        make_transport("symm", replace(ep, group=object()))
    with pytest.raises(BackendUnavailable, match=r"symm.* needs GPUs.*collective or auto"):
        symm.allocate(128, ep, torch.device("cpu"))


def test_a_group_without_a_timeout():
    peers = SimpleNamespace(timeout=math.inf, layers=iter("1"))
    transport = symm.SymmTransport(SimpleNamespace(peers=peers, rank=0), 3)
    window = SimpleNamespace(peers=None, epochs=None, failure=None)
    assert transport._link(window).timeout_ns == 2**62


def too_many(rank, folder):
    share_files(folder)
    config = replace(over_windows(CASES["balanced, 2"]).config, max_tokens_per_rank=3)
    layer = MoELayer(config, dist.group.WORLD)
    with pytest.raises(InputError, match=r"of 4, .*at most max_tokens_per_rank = 3 tokens"):
        layer(torch.randn(4, config.hidden_size))


@needs_interpreter
def test_more_tokens_than_the_buffers_hold(tmp_path):
    run_ranks(too_many, 1, str(tmp_path))


def odd_rows(rank, folder):
    """Of 10 bytes, from the middle of a row of memory; and columns side by side."""
    share_files(folder)
    ep = ExpertParallel.resolve(dist.group.WORLD)
    transport = symm.SymmTransport(ep, MOST)
    x = torch.arange(61.0, dtype=torch.bfloat16)[1:].view(12, 5)
    ids, gates = torch.tensor([[0], [1]] * 6), torch.ones(12, 1)
    found = []
    for values in (x, x.view(5, 12).t()):
        sent = transport.dispatch(values, Routing(ids, gates), 2)
        here = (sent.plan.local_ids >= 0).any(1)
        expected = values[ids[:, 0] == rank]
        found.append(torch.equal(sent.rows[here], torch.cat([expected, expected])))
        found.append(torch.equal(transport.combine(sent.plan, sent.rows), values))
    return found


@needs_interpreter
def test_rows_of_any_width(tmp_path):
    assert run_ranks(odd_rows, 2, str(tmp_path)) == [[True] * 4] * 2


def late_reader(rank, folder):
    """Rank 1 reads what has arrived only when rank 0 has long been at its next move."""
    share_files(folder)
    ep = ExpertParallel.resolve(dist.group.WORLD)
    transport = symm.SymmTransport(ep, MOST)
    x = torch.randn(6, 8)
    routing = Routing(torch.tensor([[0, 1]] * 6), torch.ones(6, 2))
    plan, rows, _ = transport.dispatch(x, routing, 2, keep=False)
    in_place = ep.peers.shared["symm"].holds(rows)
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
    right = torch.equal(rows[:6], x) and torch.equal(rows[MOST : MOST + 6], x)
    again = transport.replay(plan, -x, keep=False)
    dist.barrier()
    if rank == 0:
        time.sleep(0.5)
    right &= torch.equal(again[:6], -x) and torch.equal(again[MOST : MOST + 6], -x)
    return in_place, right, torch.equal(transport.combine(plan, 3 * again), -6 * x)


@needs_interpreter
def test_rows_stay_until_the_next_move(tmp_path):
    assert run_ranks(late_reader, 2, str(tmp_path)) == [(True, True, True)] * 2


def without_grad(rank, folder):
    """Layers in turn, as in inference, beside the same with rows that are kept."""
    share_files(folder)
    config = over_windows(CASES["balanced, 2"]).config
    layers = [MoELayer(config, dist.group.WORLD) for _ in "12"]
    x = torch.randn(7 - 5 * rank, config.hidden_size)
    found = []
    for _ in "123":  # five moves and one step of training between
        with torch.no_grad():
            y = layers[1](layers[0](x)[0])[0]
        kept = layers[1](layers[0](x)[0])[0]
        found.append(torch.equal(y, kept))
        layers[0](x)[0].sum().backward()
    return all(found)


@needs_interpreter
def test_inference_equals_training(tmp_path):
    assert run_ranks(without_grad, 2, str(tmp_path)) == [True, True]


def unlike(rank, folder):
    share_files(folder)
    config = over_windows(CASES["balanced, 2"]).config
    layer = MoELayer(replace(config, max_tokens_per_rank=MOST + rank), dist.group.WORLD)
    with pytest.raises(ConfigError, match=r"max_tokens_per_rank.*the same on every rank"):
        layer(torch.randn(4, config.hidden_size))


@needs_interpreter
def test_buffers_of_other_sizes_on_other_ranks(tmp_path):
    run_ranks(unlike, 2, str(tmp_path))


def unlike_programs(rank, folder):
    share_files(folder)
    config = over_windows(CASES["balanced, 2"]).config
    layer, x = MoELayer(config, dist.group.WORLD), torch.randn(4, config.hidden_size)
    layer.transport.sms = 129
    with pytest.raises(ConfigError, match=r"sms = 129.*1 to 128"):
        layer(x)
    layer.transport.sms = 2 + rank
    with pytest.raises(ConfigError, match=r"sms = \[2, 3\].*same on every rank"):
        layer(x)


@needs_interpreter
def test_programs(tmp_path):
    assert SLOTS.value == symm.MOST_SMS
    run_ranks(unlike_programs, 2, str(tmp_path))


def unlike_with_a_window(rank, folder):
    """The window of an earlier layer is large enough for both."""
    share_files(folder)
    config = over_windows(CASES["balanced, 2"]).config
    x = torch.randn(4, config.hidden_size)
    MoELayer(config, dist.group.WORLD)(x)
    layer = MoELayer(replace(config, max_tokens_per_rank=5 + rank), dist.group.WORLD)
    with pytest.raises(ConfigError, match=r"max_tokens_per_rank = \[5, 6\].*same on every rank"):
        layer(x)


@needs_interpreter
def test_unlike_numbers_of_tokens_in_one_window(tmp_path):
    run_ranks(unlike_with_a_window, 2, str(tmp_path))


def one_expert_for_all_choices(rank, folder):
    """More choices live on one rank than it has experts."""
    share_files(folder)
    config = over_windows(CASES["balanced, 2"]).config
    config = replace(config, num_experts=2, top_k=2, max_tokens_per_rank=3)
    layer = MoELayer(config, dist.group.WORLD)
    x, ids = torch.randn(3, config.hidden_size), torch.zeros(3, 2, dtype=torch.int32)
    arrived = dispatch(x, Routing(ids, torch.ones(3, 2)), 2, layer.transport)
    return int((arrived.local_ids >= 0).sum()), arrived.max_packed


@needs_interpreter
def test_an_expert_that_is_named_twice_has_room(tmp_path):
    (here, room), (none, _) = run_ranks(one_expert_for_all_choices, 2, str(tmp_path))
    assert (here, none) == (12, 0)
    assert room >= here


def different_order(rank, folder):
    share_files(folder)
    case = over_windows(CASES["balanced, 2"])
    layers = [MoELayer(case.config, dist.group.WORLD) for _ in "12"]
    x = torch.randn(4, case.config.hidden_size)
    layers[0](x)
    with pytest.raises(CallMismatch, match=r"rank 1 is at layer 1, call 1, forward, rows out"):
        layers[rank](x)


@needs_interpreter
def test_ranks_that_call_different_layers(tmp_path):
    run_ranks(different_order, 2, str(tmp_path), environ={"EP_MOE_CHECK": "1"})


WINDOWS = ((16, 40), (64, 40), (32, 40), (32, 100), (128, 40), (256, 40))


def growing(rank, folder):
    """Layers of wider rows or more tokens; a CUDA graph holds the second one's window."""
    share_files(folder)
    config = over_windows(CASES["balanced, 2"]).config
    windows = []
    for hidden_size, most in WINDOWS:
        sizes = {"hidden_size": hidden_size, "max_tokens_per_rank": most}
        layer = MoELayer(replace(config, **sizes), dist.group.WORLD)
        with torch.inference_mode():
            layer(torch.randn(3 + rank, hidden_size))
        layer(torch.randn(3 + rank, hidden_size))[0].sum().backward()
        windows.append(layer.ep.peers.shared["symm"])
        windows[-1].captured |= hidden_size == 64
    first, second, same, third, fourth, fifth = windows
    assert same is second
    sizes = [layout(2, most, 4 * h, 2, 4).total for h, most in WINDOWS if h != 32 or most > 40]
    assert [len(w.memory) for w in (first, second, third, fourth, fifth)] == sizes
    assert [w.kept for w in (first, second, third, fourth, fifth)] == [None, None, *[second] * 3]
    assert not any(w.seen.is_inference() or w.memory.is_inference() for w in windows)
    first.seen[:] = torch.tensor([ARRIVAL.value, 1 - rank, 7])
    with pytest.raises(DispatchTimeout, match=rf"rank {1 - rank} for what it sends \(move 7\)"):
        layer(torch.randn(4, 256))


@needs_interpreter
def test_windows_grow(tmp_path):
    """A failure of any of them stays one, and what a graph writes stays memory."""
    run_ranks(growing, 2, str(tmp_path))


def around_the_end_of_the_epochs(rank, folder):
    share_files(folder)
    found = [moves(rank, Kind("symm"), (6, 5), "random", "cpu")]
    window = ExpertParallel.resolve(dist.group.WORLD).peers.shared["symm"]
    dist.barrier()
    window.epochs.fill_(2**31 - 3)
    found += [moves(rank, Kind("symm"), (6, 5), "random", "cpu") for _ in range(2)]
    assert window.epochs[0] < 0
    return found


@needs_interpreter
def test_epochs_wrap_around(tmp_path):
    ranks = run_ranks(around_the_end_of_the_epochs, 2, str(tmp_path))
    for found in zip(*ranks, strict=True):
        check_moves(Kind("symm"), (6, 5), "random", list(found))
