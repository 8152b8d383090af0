"""The fakes of DeepEP 2.1 and 2.5 against a loop over all tokens, and what they must refuse."""

import os

import pytest
import torch
import torch.distributed as dist

from ep_moe.testing import run_ranks
from tests.dispatch.fake_deepep import v1, v2, v25
from tests.dispatch.fake_deepep.oracle import (
    SMS,
    C,
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


def group_with_a_communicator():
    group = dist.new_group()
    dist.barrier(group)
    return group


def elastic_buffer(module, group, **settings):
    cls = module.ElasticBuffer if module is v2 else module.EPBuffer
    settings = {"num_max_tokens_per_rank": C, "hidden": H, "num_topk": K, **settings}
    return cls(group, explicitly_destroy=True, **settings)


def elastic_moves(rank, world_size, module, group, deterministic, sync, asynchronous):
    buffer = elastic_buffer(module, group, deterministic=deterministic)
    x, ids, weights = share(rank)
    expected = list(arrivals(rank, world_size))
    stats = torch.zeros(E // world_size, dtype=torch.int32)
    how = {"num_experts": E, "num_sms": SMS, "do_cpu_sync": sync}
    later = {"async_with_compute_stream": asynchronous}
    rows, orders = None, []
    for _ in range(4):
        out = buffer.dispatch(x, ids, weights, stats, expert_alignment=4, **how, **later)
        *rows, handle, event = out
        if asynchronous and expected:
            assert rows[0].isnan().all()
            assert handle.psum_num_recv_tokens_per_scaleup_rank[-1] != len(expected)
            event.current_stream_wait()
        assert len(rows[0]) == (len(expected) if sync else world_size * C)
        orders.append(answers(rows, expected, weights_everywhere=True))
    in_order = [(source, token) for source, token, *_ in expected]
    assert [s for s, _ in orders[0]] == [s for s, _ in in_order]  # grouped by source
    if deterministic:
        assert orders == [in_order] * 4
    elif len(in_order) > world_size:
        assert in_order not in orders
        assert len(set(map(tuple, orders))) > 1
    check_counts(handle, expected, world_size, sync, stats)
    arrived = len(expected)
    if arrived < len(rows[0]):
        assert rows[0][arrived:].isnan().all()
        assert (rows[1][arrived:] >= 0).all()
        assert (rows[1][arrived:] < E // world_size).all()
        assert rows[2][arrived:].isnan().any()

    again = buffer.dispatch(x * 2, handle=handle, num_sms=SMS, **later)
    if asynchronous:
        again[-1].current_stream_wait()
    assert again[2] is None
    assert again[3] is handle
    assert torch.equal(again[0][:arrived], rows[0][:arrived] * 2)
    assert torch.equal(again[1][:arrived], rows[1][:arrived])
    y = torch.full_like(rows[0], float("nan"))
    grads = torch.full_like(rows[2], float("nan"))
    for row, (source, token) in enumerate(orders[-1]):
        y[row], values = made(rank, source, token)
        grads[row] = values  # also where the expert lives elsewhere: nobody may read it
    bias = torch.randn(len(x), H).bfloat16()
    for biases in ((), (bias,), (bias, bias * 3)):
        back, back_weights, event = buffer.combine(
            y,
            handle,
            topk_weights=grads,
            bias={0: None, 1: bias, 2: biases}[len(biases)],
            **later,
        )
        if asynchronous:
            assert len(x) == 0 or back.isnan().all()
            event.current_stream_wait()
        total, wanted = combined(rank, world_size, biases)
        assert torch.equal(back, total)
        assert torch.equal(back_weights, wanted)
    assert buffer.combine(y, handle)[1] is None
    buffer.destroy()
    refused(AttributeError, "", lambda: buffer.combine(y, handle))


def check_counts(handle, expected, world_size, sync, stats):
    each = E // world_size
    real = [sum(e in ids for _, _, ids, _ in expected) for e in range(each)]
    padded = [-(-count // 4) * 4 for count in real]
    from_each = [sum(source <= r for source, *_ in expected) for r in range(world_size)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == from_each
    assert (
        handle.psum_num_recv_tokens_per_expert.tolist() == torch.tensor(padded).cumsum(0).tolist()
    )
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == real
    assert handle.num_recv_tokens_per_expert_list == (padded if sync else [])
    assert stats.tolist() == [4 * count for count in real]


def elastic_ranks(rank, world_size):
    os.environ["EP_DISABLE_GIN"] = "1"
    if world_size == 1:
        elastic_refusals_before_a_buffer()
    group = group_with_a_communicator()
    for module in (v2, v25):
        for deterministic, sync, asynchronous in (
            (False, True, False),
            (False, False, True),
            (True, True, True),
            (True, False, False),
        ):
            elastic_moves(rank, world_size, module, group, deterministic, sync, asynchronous)
        if world_size == 1:
            elastic_refusals(module, group)
        if world_size == 2:
            elastic_disagreements(rank, module, group)
    if world_size == 1:
        handles_and_their_ids(group)
    return rank


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_elastic(world_size):
    assert run_ranks(elastic_ranks, world_size, world_size) == list(range(world_size))


def elastic_refusals_before_a_buffer():
    world = dist.group.WORLD
    for module in (v2, v25):
        refused(RuntimeError, "no communicator", lambda m=module: elastic_buffer(m, world))
        dist.barrier(world)  # too late: the first answer was kept
        refused(RuntimeError, "no communicator", lambda m=module: elastic_buffer(m, world))
    group = group_with_a_communicator()
    del os.environ["EP_DISABLE_GIN"]
    refused(RuntimeError, "GIN is unavailable", lambda: elastic_buffer(v25, group))
    elastic_buffer(v2, group)  # V2.1 asks for it from two ranks on
    os.environ["EP_DISABLE_GIN"] = "1"
    assert not hasattr(v25, "Buffer")
    assert not hasattr(v25, "ElasticBuffer")
    assert not hasattr(v1, "topk_idx_t")


def elastic_refusals(module, group):
    refused(RuntimeError, "hidden > 0", lambda: elastic_buffer(module, group, hidden=0))
    refused(RuntimeError, "num_bytes|kNum", lambda: elastic_buffer(module, group, num_bytes=4096))
    buffer = elastic_buffer(module, group)
    x, ids, weights = share(0)
    how = {"num_experts": E, "num_sms": SMS}

    def dispatch(x=x, ids=ids, weights=weights, **more):
        return buffer.dispatch(x, ids, weights, **{**how, **more})

    wide = share(0)[1].repeat(1, 12)
    many = torch.zeros(C + 1, H).bfloat16()
    cases = [
        (RuntimeError, "topk_idx_t", {"ids": ids.int()}),
        (RuntimeError, "type Float but found Double", {"weights": weights.double()}),
        (RuntimeError, "contiguous", {"x": x.T.contiguous().T}),
        (RuntimeError, "contiguous", {"ids": ids.T.contiguous().T}),
        (RuntimeError, "contiguous", {"weights": weights.T.contiguous().T}),
        (RuntimeError, "num_tokens_", {"ids": ids[:-1].clone()}),
        (RuntimeError, "<= num_max", {"x": many, "ids": ids, "weights": weights}),
        (RuntimeError, "<= num_max", {"num_max_tokens_per_rank": 4}),
        (RuntimeError, "buffer_size", {"num_max_tokens_per_rank": 1 << 14}),
        (RuntimeError, "sizeof", {"x": x[:, :4].contiguous()}),
        (RuntimeError, "Alignment", {"x": x[:, :24].contiguous()}),
        (RuntimeError, "one or two bytes", {"x": x.float()}),
        (RuntimeError, "32, Too many", {"ids": wide, "weights": weights.repeat(1, 12)}),
        (RuntimeError, "get_num_sms", {"num_sms": 200}),
        (RuntimeError, "illegal memory", {"ids": ids + E}),
        (RuntimeError, "duplicate", {"ids": torch.zeros_like(ids)}),
        (TypeError, "num_experts", {"num_experts": None}),
        (TypeError, "", {"num_experts": None, "num_sms": 0}),
        (AttributeError, "", {"ids": None}),
        (AssertionError, "QPs", {"num_qps": 1000}),
        (TypeError, "previous_event", {"previous_event": module.EventOverlap()}),
        (RuntimeError, "allocate_on", {"previous_event": buffer.capture()}),
        (NotImplementedError, "compact", {"do_expand": True}),
        (RuntimeError, "do_expand", {"do_zero_padding": True}),
    ]
    for error, match, change in cases:
        refused(error, match, lambda change=change: dispatch(**change))
    half, quarter = x.half(), x.to(torch.float8_e4m3fn)
    assert torch.equal(dispatch(x=half)[0].sum(), half[(ids >= 0).any(1)].sum())
    scales = torch.rand(len(x), 2)
    (rows, recv_scales), *_ = dispatch(x=(quarter, scales), do_cpu_sync=False)
    assert rows.dtype == torch.float8_e4m3fn
    assert recv_scales.shape == (C, 2)

    rows, _, recv_weights, handle, _ = dispatch()
    cached = {"handle": handle, "num_sms": SMS}
    refused(TypeError, "", lambda: buffer.dispatch(x, handle=handle))
    refused(AssertionError, "", lambda: buffer.dispatch(x, ids, **cached))
    refused(AssertionError, "sync", lambda: buffer.dispatch(x, do_cpu_sync=True, **cached))
    refused(AssertionError, "", lambda: buffer.dispatch(x, expert_alignment=8, **cached))
    refused(RuntimeError, "num_tokens", lambda: buffer.dispatch(x[1:].clone(), **cached))
    stats = torch.zeros(E, dtype=torch.int32)
    refused(RuntimeError, "null", lambda: buffer.dispatch(x, None, None, stats, **cached))
    assert torch.equal(buffer.dispatch(x, None, weights, **cached)[2], recv_weights)

    bias = torch.zeros(len(x), H)
    combines = [
        ("kBFloat16", (rows.half(), handle), {}),
        ("contiguous", (rows.T.contiguous().T, handle), {}),
        ("num_reduced_tokens", (rows[1:].clone(), handle), {}),
        ("Invalid hidden", (rows[:, :128].contiguous(), handle), {}),
        ("kFloat", (rows, handle, recv_weights.double()), {}),
        ("num_topk", (rows, handle, recv_weights[:, :2].contiguous()), {}),
        ("bias", (rows, handle), {"bias": bias}),
        ("bias", (rows, handle), {"bias": bias[1:].bfloat16()}),
    ]
    for match, given, more in combines:
        refused(RuntimeError, match, lambda g=given, m=more: buffer.combine(*g, **m))
    refused(AttributeError, "", lambda: buffer.combine(rows, None))
    torch.use_deterministic_algorithms(True)
    refused(AssertionError, "", dispatch)
    torch.use_deterministic_algorithms(False)
    assert buffer.get_theoretical_num_sms(E, K) == 132
    buffer.destroy()
    buffer.destroy()
    refused(AttributeError, "", dispatch)
    refused(AssertionError, "", lambda: module_buffer(module, group).destroy())


def module_buffer(module, group):
    cls = module.ElasticBuffer if module is v2 else module.EPBuffer
    return cls(group, num_max_tokens_per_rank=C, hidden=H)


def handles_and_their_ids(group):
    """Who keeps a clone of the ids, who notices a write, and who is simply wrong afterwards."""
    x, ids, weights = share(0)
    new, old = elastic_buffer(v25, group), elastic_buffer(v2, group)
    how = {"num_experts": E, "num_sms": SMS}
    refused(
        AssertionError,
        "do_handle_copy",
        lambda: new.dispatch(x, ids, weights, do_handle_copy=True, **how),
    )
    rows, _, _, handle, _ = new.dispatch(x, ids, weights, **how)
    new.combine(rows, handle)
    ids.add_(0)
    refused(AssertionError, "must not be modified", lambda: new.combine(rows, handle))
    refused(AssertionError, "modified", lambda: new.dispatch(x, handle=handle, num_sms=SMS))
    rows, _, _, handle, _ = old.dispatch(x, ids, weights, **how)
    wanted = old.combine(rows, handle)[0]
    ids.fill_(-1)
    assert torch.equal(old.combine(rows, handle)[0], wanted)
    assert not hasattr(v2.EventOverlap, "wait")
    ids = share(0)[1]
    event = new.dispatch(
        x, ids, weights, async_with_compute_stream=True, defer_epilogue=True, **how
    )
    rows, _, _, handle = event.wait()
    event = new.combine(rows, handle, async_with_compute_stream=True, defer_epilogue=True)
    assert torch.equal(event.wait()[0], wanted)
    refused(RuntimeError, "async", lambda: new.combine(rows, handle, defer_epilogue=True))
    refused(AssertionError, "", lambda: new.combine(rows, handle)[2].wait())


def elastic_disagreements(rank, module, group):
    """What hangs or corrupts memory on GPUs raises on every rank."""
    buffer = elastic_buffer(module, group, num_max_tokens_per_rank=2 * C)
    x, ids, weights = share(rank)
    how = {"num_experts": E, "num_sms": SMS}
    bound = C + rank
    refused(
        RuntimeError,
        "timeout",
        lambda: buffer.dispatch(x, ids, weights, num_max_tokens_per_rank=bound, **how),
    )
    twice = torch.zeros_like(ids)  # rank 1 has no tokens, and fails all the same
    refused(RuntimeError, "duplicate", lambda: buffer.dispatch(x, twice, weights, **how))
    rows, *_, handle, _ = buffer.dispatch(x, ids, weights, **how)
    calls = (
        lambda: buffer.combine(rows, handle),
        lambda: buffer.dispatch(x, handle=handle, num_sms=SMS),
    )
    refused(RuntimeError, "timeout", calls[rank])
    os.environ["EP_DISABLE_GIN"] = "0"
    refused(RuntimeError, "GIN is unavailable", lambda: elastic_buffer(module, group))
    os.environ["EP_DISABLE_GIN"] = "1"
    assert buffer.get_theoretical_num_sms(E, K) == 4
