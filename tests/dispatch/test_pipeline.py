"""Parts of a call that follow each other give what the whole gives, whatever each rank has and
whatever runs around them."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ep_moe
from ep_moe import ConfigError, InputError, MoELayer, Routing
from ep_moe.dispatch.pipeline import cut
from ep_moe.testing import assert_close, run_ranks
from tests.dispatch.ep_cases import (
    Case,
    compare,
    config,
    expert_parallel,
    make_layer,
    note_moves,
    one_process,
)
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


def whole(case, device="cpu"):
    return one_process(in_parts(case, 1, transport="auto"), device)


def many(rank, cases, device="cpu"):
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    return [expert_parallel(rank, case, device) for case in cases]


def check_cases(world_size, cases, device="cpu", **how):
    ranks = run_ranks(many, world_size, cases, device, **how)
    for i, case in enumerate(cases):
        compare(case, [got[i] for got in ranks], whole(case, device))


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
    layers = [make_layer(case, dist.group.WORLD) for case in cases]
    layer = layers[0]
    with torch.no_grad():
        x = torch.randn(4, 16, dtype=cases[0].dtype)
        inferred = layer(x)[0]
    assert_close(inferred, layer(x)[0], name="y without autograd")
    return found, [layer.transport.max_tokens for layer in layers]


@needs_interpreter
def test_parts_through_windows(tmp_path):
    """Windows have room for a part of the most tokens, and no more."""
    shared = Case((8, 3), config(num_shared_experts=1))
    cases = [
        in_parts(shared, 3, transport="symm", max_tokens_per_rank=8),
        in_parts(
            Case((6, 0), config(), checkpoint=True), 3, transport="symm", max_tokens_per_rank=6
        ),
    ]
    ranks = run_ranks(over_windows, 2, str(tmp_path), cases, timeout=150.0)
    assert [most for _, most in ranks] == [[3, 2]] * 2
    for i, case in enumerate(cases):
        compare(case, [got[i] for got, _ in ranks], whole(case))


def over_deepep(rank, case):
    stand_in("v2")
    return expert_parallel(rank, case)


def test_parts_over_deepep():
    case = Case((12, 5), config(hidden_size=256), dtype=torch.bfloat16)
    case = in_parts(case, 2, transport="deepep", max_tokens_per_rank=12)
    compare(case, run_ranks(over_deepep, 2, case), whole(case))


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
