"""The fake of DeepEP 1.x, and of `Buffer` as 2.1 keeps it, against a loop over all tokens."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ep_moe.testing import run_ranks
from tests.dispatch.fake_deepep import v1, v2
from tests.dispatch.fake_deepep.oracle import (
    SMS,
    E,
    H,
    K,
    answers,
    arrivals,
    combined,
    made,
    refused,
    share,
)


def v1_buffer(module, group, **settings):
    config = module.Config(SMS, 6, 256, 6, 128)
    size = config.get_nvl_buffer_size_hint(2 * H, group.size())
    return module.Buffer(group, size, explicitly_destroy=True, **settings), config


def v1_moves(rank, world_size, module, asynchronous, worst):
    buffer, config = v1_buffer(module, dist.group.WORLD)
    x, ids, weights = share(rank)
    expected = list(arrivals(rank, world_size))
    later = {"async_finish": asynchronous}
    per_rank, rdma, per_expert, in_rank, event = buffer.get_dispatch_layout(ids, E, **later)
    layout = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": rdma,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
    }
    chained = {}
    if asynchronous:
        chained = {"previous_event": event, "allocate_on_comm_stream": True}
    *rows, lengths, handle, event = buffer.dispatch(
        x, **layout, topk_idx=ids, topk_weights=weights, expert_alignment=4,
        num_worst_tokens=worst, config=config, **later, **chained,
    )  # fmt: skip
    arrived = len(expected)
    if asynchronous:
        assert rows[0].isnan().all()
        event.current_stream_wait()
    assert len(rows[0]) == (worst or arrived)
    order = answers(rows, expected, weights_everywhere=False)
    assert order == [(source, token) for source, token, *_ in expected]
    each = E // world_size
    real = [sum(e in ids for _, _, ids, _ in expected) for e in range(each)]
    assert lengths == ([] if worst else [-(-count // 4) * 4 for count in real])
    assert rows[0][arrived:].isnan().all()
    assert (rows[1][arrived:] == -1).all()
    assert rows[2][arrived:].isnan().all()
    again = buffer.dispatch(x * 2, handle=handle, config=config, num_worst_tokens=worst)
    assert again[1:5] == (None, None, None, None)
    assert torch.equal(again[0][:arrived], rows[0][:arrived] * 2)

    y, grads = torch.full_like(rows[0], float("nan")), torch.full_like(rows[2], float("nan"))
    dirty = torch.zeros(len(x), K)
    for row, (source, token) in enumerate(order):
        y[row], grads[row] = made(rank, source, token)
    for source in range(world_size):  # this generation adds what every rank sends
        for token in {t for _, t, *_ in every_arrival(source, rank, world_size)}:
            dirty[token] += made(source, rank, token)[1]
    bias = torch.randn(len(x), H).bfloat16()
    back, back_weights, event = buffer.combine(
        y, handle, grads, bias=(bias, bias * 3), config=config, **later
    )
    if asynchronous:
        event.current_stream_wait()
    assert torch.equal(back, combined(rank, world_size, (bias, bias * 3))[0])
    torch.testing.assert_close(back_weights, dirty, rtol=0, atol=1e-6)
    here = (rows[1] >= 0).logical_or(torch.arange(len(grads))[:, None] >= arrived)
    clean = buffer.combine(y, handle, grads.masked_fill(~here, 0.0), config=config)[1]
    assert torch.equal(clean, combined(rank, world_size)[1])
    buffer.destroy()
    refused(AttributeError, "", lambda: buffer.combine(y, handle, config=config))
    refused(AttributeError, "", buffer.destroy)


def every_arrival(of_rank, source, world_size):
    return [item for item in arrivals(of_rank, world_size) if item[0] == source]


def v1_ranks(rank, world_size):
    for module in (v1, v2):
        for asynchronous, worst in ((False, 0), (True, 0), (False, 40), (True, 40)):
            v1_moves(rank, world_size, module, asynchronous, worst)
        if world_size == 2:
            v1_refusals(rank, module)
            low_latency(rank, world_size, module)
    return rank


@pytest.mark.parametrize("world_size", [2, 4])
def test_v1(world_size):
    assert run_ranks(v1_ranks, world_size, world_size) == list(range(world_size))


def v1_refusals(rank, module):
    buffer, config = v1_buffer(module, dist.group.WORLD)
    x, ids, weights = share(0)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, E)
    given = {
        "x": x, "num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert, "topk_idx": ids, "topk_weights": weights,
        "config": config,
    }  # fmt: skip
    cases = [
        (RuntimeError, "type Long but found Int", {"topk_idx": ids.int()}),
        (RuntimeError, "kFloat32", {"topk_weights": weights.double()}),
        (RuntimeError, "has_value", {"topk_weights": None}),
        (RuntimeError, "contiguous", {"x": x.T.contiguous().T}),
        (RuntimeError, "contiguous", {"topk_idx": ids.T.contiguous().T}),
        (RuntimeError, "sizeof", {"x": x[:, :4].contiguous()}),
        (RuntimeError, "hidden_int4", {"x": x[:, :8].contiguous()}),
        (RuntimeError, "bf16", {"x": x.float()}),
        (RuntimeError, "num_nvl_bytes", {"config": module.Config(SMS, 6, 4096, 6, 128)}),
        (RuntimeError, "disagrees", {"num_tokens_per_rank": per_rank + 1}),
        (RuntimeError, "kBool", {"is_token_in_rank": in_rank.int()}),
        (RuntimeError, "kInt32", {"num_tokens_per_expert": per_expert.long()}),
        (RuntimeError, "num_worst_tokens", {"num_worst_tokens": 1}),
        (RuntimeError, "async", {"allocate_on_comm_stream": True}),
        (AssertionError, "", {"num_tokens_per_expert": None}),
    ]
    for error, match, change in cases:
        refused(error, match, lambda change=change: buffer.dispatch(**{**given, **change}))
    rows, _, recv_weights, _, handle, event = buffer.dispatch(**given)
    refused(AssertionError, "", event.current_stream_wait)
    cached = {"handle": handle, "config": config}
    refused(AssertionError, "", lambda: buffer.dispatch(x, topk_idx=ids, **cached))
    refused(AssertionError, "", lambda: buffer.dispatch(x, topk_weights=weights, **cached))
    other = module.Config(SMS + 2, 6, 256, 6, 128)
    refused(RuntimeError, "num_channels", lambda: buffer.dispatch(x, handle=handle, config=other))
    combines = [
        ("Unsupported type", (rows.half(), handle)),
        ("size.0. == num_tokens", (rows[1:].clone(), handle)),
        ("kFloat32", (rows, handle, recv_weights.double())),
        ("contiguous", (rows.T.contiguous().T, handle)),
    ]
    for match, arguments in combines:
        refused(RuntimeError, match, lambda a=arguments: buffer.combine(*a, config=config))
    refused(RuntimeError, "timeout", (
        lambda: buffer.dispatch(**given),
        lambda: buffer.combine(rows, handle, config=config),
    )[rank])  # fmt: skip
    refused(AssertionError, "even", lambda: buffer.set_num_sms(7))
    refused(AssertionError, "explicitly", lambda: module.Buffer(dist.group.WORLD, 128).destroy())
    refused(RuntimeError, "low_latency_mode", lambda: module.Buffer(dist.group.WORLD, 0, 128))
    refused(RuntimeError, "ALIGNMENT", lambda: module.Buffer(dist.group.WORLD, 100))
    refused(ValueError, "group", lambda: module.Buffer(None))


def other_sizes(rank, world_size):
    """One rank, or three: no tuned configuration, and no kernel either."""
    buffer, config = v1_buffer(v1, dist.group.WORLD)
    x, ids, weights = share(rank)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, E)
    given = {
        "num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert, "topk_idx": ids, "topk_weights": weights,
    }  # fmt: skip
    match = f"Unsupported number of EP ranks: {world_size}"
    refused(AssertionError, match, lambda: buffer.dispatch(x, **given))
    refused(AssertionError, match, lambda: v1.Buffer.get_combine_config(world_size))
    refused(RuntimeError, "Unsupported ranks", lambda: buffer.dispatch(x, **given, config=config))
    return rank


@pytest.mark.parametrize("world_size", [1, 3])
def test_v1_serves_few_sizes(world_size):
    assert run_ranks(other_sizes, world_size, world_size) == list(range(world_size))


def low_latency(rank, world_size, module):
    wide, bound, experts = 2048, 4, 4
    size = module.Buffer.get_low_latency_rdma_size_hint(bound, wide, world_size, experts)
    settings = {"low_latency_mode": True, "num_qps_per_rank": 2}
    buffer = module.Buffer(dist.group.WORLD, 0, size, **settings)
    tokens = (3, 1)
    every = []
    for source in range(world_size):
        generator = torch.Generator().manual_seed(source)
        x = torch.randn(tokens[source], wide, generator=generator).bfloat16()
        ids = torch.rand(tokens[source], experts, generator=generator).argsort(1)[:, :2]
        ids[0, 0] = -1
        every.append(SimpleNamespace(x=x, ids=ids.contiguous(), weights=torch.rand(ids.shape)))
    my = every[rank]
    given = {"num_max_dispatch_tokens_per_rank": bound, "num_experts": experts, "use_fp8": False}
    for hooked in (False, True):
        received, count, handle, event, hook = buffer.low_latency_dispatch(
            my.x, my.ids, **given, return_recv_hook=hooked
        )
        assert event.event is None
        if hooked:
            assert received.isnan().all()
            hook()
        assert received.shape == (experts // world_size, world_size * bound, wide)
        for block in range(experts // world_size):
            expert, rows = rank * (experts // world_size) + block, received[block]
            wanted = torch.cat([s.x[(s.ids == expert).any(1)] for s in every])
            assert count[block] == len(wanted)
            got = rows[: len(wanted)]
            assert torch.equal(got.float().sum(1).sort()[0], wanted.float().sum(1).sort()[0])
            assert rows[len(wanted) :].isnan().all()
        y = received * 2
        back, _, hook = buffer.low_latency_combine(
            y, my.ids, my.weights, handle, return_recv_hook=hooked
        )
        if hooked:
            hook()
        gates = my.weights.masked_fill(my.ids < 0, 0.0)
        total = torch.zeros(my.x.shape)
        for slot in range(2):
            total += my.x.float() * 2 * gates[:, slot, None]
        assert torch.equal(back, total.bfloat16())
    low_latency_refusals(buffer, my, given, handle, y, module, size, settings)


def low_latency_refusals(buffer, my, given, handle, y, module, size, settings):
    dispatch = buffer.low_latency_dispatch
    many = torch.zeros(5, 2048).bfloat16()
    eleven = my.ids.repeat(1, 6)
    cases = [
        (RuntimeError, "kBFloat16", (my.x.half(), my.ids)),
        (RuntimeError, "kInt64", (my.x, my.ids.int())),
        (RuntimeError, "num_max_dispatch", (many, my.ids)),
        (RuntimeError, "128", (my.x[:, :1000].contiguous(), my.ids)),
        (RuntimeError, "Unsupported hidden", (my.x[:, :1024].contiguous(), my.ids)),
        (RuntimeError, "kNumMaxTopK", (my.x, eleven)),
        (RuntimeError, "illegal memory", (my.x, my.ids + 4)),
    ]
    for error, match, arguments in cases:
        refused(error, match, lambda a=arguments: dispatch(*a, **given))
    more = {**given, "num_max_dispatch_tokens_per_rank": 8}
    refused(RuntimeError, "num_rdma_bytes", lambda: dispatch(my.x, my.ids, **more))
    refused(
        NotImplementedError, "bf16", lambda: dispatch(my.x, my.ids, **{**given, "use_fp8": True})
    )
    both = {"async_finish": True, "return_recv_hook": True}
    refused(RuntimeError, "async", lambda: dispatch(my.x, my.ids, **given, **both))
    combine = buffer.low_latency_combine
    refused(RuntimeError, "Float", lambda: combine(y, my.ids, my.weights.double(), handle))
    refused(RuntimeError, "kBFloat16", lambda: combine(y.half(), my.ids, my.weights, handle))
    narrow = y[:, :-1].contiguous()
    refused(RuntimeError, "size.1.", lambda: combine(narrow, my.ids, my.weights, handle))
    few = module.Buffer(dist.group.WORLD, 0, size, low_latency_mode=True, num_qps_per_rank=1)
    refused(RuntimeError, "num_rc_per_pe", lambda: few.low_latency_dispatch(my.x, my.ids, **given))
    normal = module.Buffer(dist.group.WORLD, 0, 0)
    # V2.1 asks for the queues' depth first, which only the low-latency mode has set
    error = RuntimeError if module is v1 else AttributeError
    refused(error, "", lambda: normal.low_latency_dispatch(my.x, my.ids, **given))

    first = dispatch(my.x, my.ids, **given)
    second = dispatch(my.x, my.ids, **given)
    assert (first[0] == first[0]).any() or not first[1].any()
    dispatch(my.x, my.ids, **given)
    assert first[0].isnan().all()
    assert not second[0].isnan().all() or not second[1].any()
