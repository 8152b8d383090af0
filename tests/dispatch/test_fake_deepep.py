"""The fakes of DeepEP against a loop over all tokens, and everything that they must refuse."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ep_moe.testing import run_ranks
from tests.dispatch.fake_deepep import v1, v2, v25

E, K, H, C = 12, 3, 256, 8
TOKENS = (5, 0, 7, 8)
SMS = 8


def share(rank, seed=0):
    """x[t] = (rank, t, ...), so that a row says where it came from."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    tokens = TOKENS[rank]
    x = torch.randn(tokens, H, generator=generator).bfloat16()
    x[:, 0], x[:, 1] = rank, torch.arange(tokens)
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :K]
    ids[torch.rand(tokens, K, generator=generator) < 0.2] = -1
    return x, ids.contiguous(), torch.rand(tokens, K, generator=generator)


def made(of_rank, source, token):
    """What a rank makes of an arrived row, and a gradient for each of its gate weights."""
    generator = torch.Generator().manual_seed(10_000 * of_rank + 100 * source + token)
    return (
        torch.randn(H, generator=generator).bfloat16(),
        torch.rand(K, generator=generator),
    )


def arrivals(me, world_size):
    """(source, token, local ids, weights) of every row that must arrive, in order."""
    each = E // world_size
    for source in range(world_size):
        _, ids, weights = share(source)
        for token in range(len(ids)):
            local = [i - me * each if 0 <= i - me * each < each else -1 for i in ids[token]]
            if max(local) >= 0:
                yield source, token, local, weights[token]


def combined(me, world_size, biases=()):
    """The sum that must come back, in fp32 and rounded once, and the weights' gradients."""
    each, (x, ids, _) = E // world_size, share(me)
    total = torch.zeros(len(x), H)
    for bias in biases:
        total += bias.float()
    grads = torch.zeros(len(x), K)
    for token in range(len(x)):
        for rank in sorted({int(i) // each for i in ids[token] if i >= 0}):
            row, weights = made(rank, me, token)
            total[token] += row.float()
            for k in range(K):
                if ids[token, k] >= 0 and ids[token, k] // each == rank:
                    grads[token, k] = weights[k]
    return total.bfloat16(), grads


def group_with_a_communicator():
    group = dist.new_group()
    dist.barrier(group)
    return group


def elastic_buffer(module, group, **settings):
    cls = module.ElasticBuffer if module is v2 else module.EPBuffer
    settings = {"num_max_tokens_per_rank": C, "hidden": H, "num_topk": K, **settings}
    return cls(group, explicitly_destroy=True, **settings)


def answers(rows, expected, weights_everywhere):
    """Rows in the order they came; checks ids and weights of each."""
    recv_x, recv_ids, recv_weights = rows
    wanted = {(source, token): (ids, weights) for source, token, ids, weights in expected}
    found = []
    for row in range(len(expected)):
        source, token = int(recv_x[row, 0]), int(recv_x[row, 1])
        ids, weights = wanted.pop((source, token))
        assert torch.equal(recv_x[row], share(source)[0][token])
        assert recv_ids[row].tolist() == ids
        if not weights_everywhere:
            weights = weights.masked_fill(torch.tensor(ids) < 0, 0.0)
        assert torch.equal(recv_weights[row], weights)
        found.append((source, token))
    assert not wanted
    return found


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


def refused(error, match, call):
    with pytest.raises(error, match=match or None):
        call()


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
