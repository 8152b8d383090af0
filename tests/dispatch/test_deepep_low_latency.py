"""DeepEP's low-latency path: layers without autograd equal one process, and what cannot be is said
in words. Against stand-ins for V1 and V2."""

import copy
import sys
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
    MoELayer,
    Routing,
    make_transport,
    moe,
)
from ep_moe.dispatch import TRANSPORTS, deepep_buffers, deepep_low_latency, dispatch
from ep_moe.experts import Experts
from ep_moe.testing import assert_close, run_ranks
from tests.dispatch.ep_cases import Case, config, inputs, make_layer
from tests.dispatch.fake_deepep import stand_in
from tests.hosts import CPU, V1, V2, h200s

NAME = "deepep_low_latency"
MOST = 16  # tokens of a rank; slots, where exact
BF16 = torch.bfloat16


def case(*tokens, route_to=(), padding=False, **changes):
    return Case(tokens, config(**changes), route_to, BF16, padding)


CASES = {
    "even": case(12, 12),
    "uneven": case(1, 16),
    "an empty rank": case(0, 9),
    "empty ranks, 4": case(5, 0, 0, 1),
    "uneven, 4": case(7, 16, 2, 3),
    "no tokens anywhere": case(0, 0),
    "all to one expert": case(16, 4, 0, 6, top_k=1, renormalize=False, route_to=(5,)),
    "all to one rank": case(8, 6, route_to=(0, 1)),
    "every expert": case(6, 3, 5, 2, top_k=8),
    "one expert a rank": case(6, 3, 5, 2, num_experts=4),
    "padding": case(10, 13, padding=True),
    "padding, 4": case(3, 1, 16, 0, padding=True),
    "shared experts and biases": case(10, 3, num_shared_experts=1, mlp_bias=True),
    "one after the other": case(10, 3, num_shared_experts=1, shared_expert_overlap=False),
    "dropped choices": case(12, 7, capacity_factor=1.25, route_to=(0, 1)),
    "as wide as a kernel": case(5, 3, hidden_size=2048),
    "between two widths": case(5, 3, hidden_size=2050),
    "between others in v1": case(4, 7, hidden_size=2562),
}


def over_deepep(case, **changes):
    changes = {"transport": NAME, "max_tokens_per_rank": MOST} | changes
    return replace(case, config=replace(case.config, **changes))


@torch.no_grad()
def outputs(layer, case, rank):
    x, _, mask = inputs(case, rank)
    return layer(x.to(case.dtype), mask)[0]


def rank_outputs(rank, generation, cases):
    stand_in(generation)
    torch.set_num_threads(1)
    return [outputs(make_layer(case, dist.group.WORLD), case, rank) for case in cases]


def one_process(case):
    layer = make_layer(case, None)
    return [outputs(layer, case, rank) for rank in range(case.world_size)]


@pytest.mark.parametrize("generation", ["v1", "v2"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_layers_equal_one_process(world_size, generation):
    names = [name for name, case in CASES.items() if case.world_size == world_size]
    cases = [over_deepep(CASES[name]) for name in names]
    ranks = run_ranks(rank_outputs, world_size, generation, cases, timeout=120.0)
    for name, *found in zip(names, *ranks, strict=True):
        for rank, (y, expected) in enumerate(zip(found, one_process(CASES[name]), strict=True)):
            assert_close(y, expected, name=f"y of rank {rank}, {name}")


@pytest.mark.parametrize("world_size", [2, 4])
def test_exact_numerics_are_exact(world_size):
    """To the last bit, in whatever order rows arrive."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    exact = case(*(8, 3, 0, 5)[:world_size], numerics="exact", num_shared_experts=1)
    ranks = run_ranks(rank_outputs, world_size, "v1", [over_deepep(exact)] * 2)
    expected = one_process(exact)
    torch.set_num_threads(threads)
    for rank, both in enumerate(ranks):
        assert all(torch.equal(y, expected[rank]) for y in both)


def arrivals(rank):
    """What experts are given: each row with its one expert, gate 1, and NaN behind them."""
    stand_in("v1")
    ep = ExpertParallel.resolve(dist.group.WORLD)
    transport = make_transport(NAME, ep, max_tokens_per_rank=5)
    x = (torch.arange(3.0) + 10 * rank)[:, None].expand(3, 6).to(BF16)
    ids = torch.tensor([[0, 3, 2], [-1, 3, -1], [3, 1, 0]], dtype=torch.int32)
    gates = torch.rand(3, 3)
    with torch.no_grad():
        arrived = dispatch(x, Routing(ids, gates), 4, transport)
    plan, room = arrived.plan, 2 * 8
    assert arrived.rows.shape == (2 * room, 6)
    assert arrived.gate_weights.eq(1).all()
    assert arrived.gate_weights.dtype == torch.float32
    assert arrived.local_ids.shape == arrived.gate_weights.shape == (2 * room, 1)
    assert arrived.local_ids.dtype == torch.int32
    assert arrived.max_packed == room * 2
    found = []
    for expert in range(2):
        here = arrived.local_ids[:, 0] == expert
        found.append(sorted(arrived.rows[here].float().mean(1).tolist()))
    routing = Routing(ids.clone(), gates.clone())
    ids.fill_(-1)  # a plan outlives the call
    gates.fill_(7.0)
    y = transport.combine(plan, 2 * arrived.rows)
    weighed = routing.gate_weights.masked_fill(routing.ids < 0, 0.0).sum(1, keepdim=True)
    assert_close(y, 2 * x * weighed, name="y")
    ids = routing.ids.long()[:, 1:2]  # every third of them, and of the dtype that DeepEP takes
    few = transport.dispatch(x, Routing(ids, torch.ones(3, 1)), 4, keep=False)
    assert few.plan.max_packed == room
    ids.fill_(0)
    assert torch.equal(transport.combine(few.plan, few.rows), x)
    return found


def test_rows_arrive_by_expert():
    first, second = run_ranks(arrivals, 2)
    assert first == [[0.0, 2.0, 10.0, 12.0], [2.0, 12.0]]
    assert second == [[0.0, 10.0], [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]]


LAYOUTS = ({}, {"num_experts": 4}, {"max_tokens_per_rank": 3}, {})


def decode(rank, generation):
    """Many calls of layers of three layouts in turn: results that are kept stay as they were."""
    stand_in(generation)
    cases = [over_deepep(case(3, 2, hidden_size=2048), **changes) for changes in LAYOUTS]
    layers = [make_layer(each, dist.group.WORLD) for each in cases]
    layers[3] = copy.deepcopy(layers[0])
    assert layers[3].transport.layer != layers[0].transport.layer
    layers = [*zip(layers, cases, strict=True)]
    turns = [[outputs(*layer, rank) for layer in layers] for _ in range(3)]
    pool = layers[0][0].ep.peers.shared[NAME]
    return turns, {tuple(layout): b.num_rdma_bytes for layout, b in pool.buffers.items()}


@pytest.mark.parametrize("generation", ["v1", "v2"])
def test_results_outlive_later_calls(generation):
    ranks = run_ranks(decode, 2, generation)
    expected = [
        one_process(replace(c, config=replace(c.config, transport="auto")))
        for c in (over_deepep(case(3, 2, hidden_size=2048), **changes) for changes in LAYOUTS)
    ]
    for rank, (turns, buffers) in enumerate(ranks):
        for turn, ys in enumerate(turns):
            for layer, (y, each) in enumerate(zip(ys, expected, strict=True)):
                assert_close(y, each[rank], name=f"y of layer {layer}, turn {turn}")
        assert set(buffers) == {(16, 2048, 8), (16, 2048, 4), (4, 2048, 8)}
        assert len(set(buffers.values())) == 3


def in_place(rank):
    stand_in("v1")
    ep = ExpertParallel.resolve(dist.group.WORLD)
    transport = make_transport(NAME, ep, max_tokens_per_rank=4)
    x = torch.ones(4, 2048, dtype=BF16)
    routing = Routing(torch.arange(2).repeat(4, 1), torch.ones(4, 2))
    rows = [transport.dispatch(x, routing, 2, keep=False).rows for _ in "123"]
    return [bool(some[:8].isnan().all()) for some in rows]


def test_arrived_rows_are_overwritten():
    assert TRANSPORTS[NAME].caps.in_place
    assert run_ranks(in_place, 2) == [[True, False, False]] * 2


def widths(rank, generation):
    stand_in(generation)
    ep, found = ExpertParallel.resolve(dist.group.WORLD), []
    transport = make_transport(NAME, ep, max_tokens_per_rank=2)
    routing = Routing(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    for columns in (1, 2048, 2049, 2561, 3073, 4097, 5121, 6145, 7169, 8192):
        x = torch.randint(-9, 9, (1, columns)).to(BF16)
        sent = transport.dispatch(x, routing, 2, keep=False)
        assert sent.rows.shape[1] == columns
        assert torch.equal(transport.combine(sent.plan, sent.rows), x)
        found.append(sent.plan.handle[3])
    with pytest.raises(InputError, match=r"hidden_size is 8193, .* at most 8192 .*symm"):
        transport.dispatch(torch.zeros(1, 8193, dtype=BF16), routing, 2, keep=False)
    return found


@pytest.mark.parametrize("generation, fourth", [("v1", 4096), ("v2", 3072)])
def test_rows_of_any_width(generation, fourth):
    expected = [2048, 2048, 2560, fourth, 4096, 5120, 6144, 7168, 8192, 8192]
    assert run_ranks(widths, 2, generation) == [expected] * 2


def without_backward(rank):
    stand_in("v2")
    each = over_deepep(case(4, 3))
    layer = make_layer(each, dist.group.WORLD)
    x = inputs(each, rank)[0].to(BF16)
    says = rf"{NAME}.* has no backward.*torch.no_grad\(\).*symm, deepep, collective"
    refused = pytest.raises(BackendUnavailable, match=says)
    with refused:
        layer(x)
    with refused:
        layer.warmup(3)
    layer.warmup(3, 0, MOST, backward=False)
    transport = layer.transport
    sent = transport.dispatch(
        x, Routing(torch.zeros(len(x), 1).int(), torch.ones(len(x), 1)), 8, keep=False
    )
    for call in (
        lambda: transport.replay(sent.plan, x),
        lambda: transport.replay_gates(sent.plan, torch.ones(len(x), 1)),
        lambda: transport.combine_gates(sent.plan, sent.gate_weights),
    ):
        with refused:
            call()
    with torch.inference_mode():
        y = layer(x)[0]
    return torch.equal(y, outputs(layer, each, rank))


def test_it_has_no_backward():
    run_ranks(without_backward, 2)


def refusals(rank):
    stand_in("v1")
    each = over_deepep(case(4, 3))
    layer = make_layer(each, dist.group.WORLD)
    x, ids, gates = torch.zeros(2, 16, dtype=BF16), torch.zeros(2, 1).int(), torch.ones(2, 1)

    def refuses(match, x=x, ids=ids, gates=gates, error=InputError):
        with pytest.raises(error, match=match):
            layer.transport.dispatch(x, Routing(ids, gates), 8, keep=False)

    refuses(r"of 17, .* at most max_tokens_per_rank = 16 tokens", x=x.new_zeros(17, 16))
    refuses(r"float32 and torch.float32.*bfloat16", x=x.float())
    refuses(r"float64.*torch.float32", gates=gates.double())
    many = ids.repeat(1, 12)
    refuses(
        r"routing\.ids is of 12, .* at most 11 experts a token", ids=many, gates=gates.repeat(1, 12)
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    refuses("fill_uninitialized_memory = False", error=BackendUnavailable)
    torch.utils.deterministic.fill_uninitialized_memory = False
    outputs(layer, each, rank)
    torch.use_deterministic_algorithms(False)
    deepep_low_latency.capturing = lambda: True
    other = make_layer(over_deepep(each, max_tokens_per_rank=3), dist.group.WORLD)
    with pytest.raises(BackendUnavailable, match=r"captured.*layer.warmup\(tokens, backward=False"):
        outputs(other, case(2, 2), rank)
    outputs(layer, each, rank)  # whose buffer is there
    layer.ep.peers.shared.clear()
    deepep_buffers.load = None  # a look at the machine is nothing for a capture
    with pytest.raises(BackendUnavailable, match="captured"):
        outputs(layer, each, rank)


def test_what_it_refuses():
    run_ranks(refusals, 2)


def unlike(rank):
    stand_in("v1")
    layer = make_layer(over_deepep(case(1, 1), max_tokens_per_rank=4 + rank), dist.group.WORLD)
    with pytest.raises(ConfigError, match=r"as a power of two, = \[4, 8\].*same on every rank"):
        outputs(layer, case(1, 1), rank)
    layer = make_layer(over_deepep(case(1, 1), max_tokens_per_rank=5 + rank), dist.group.WORLD)
    outputs(layer, case(1, 1), rank)


def test_ranks_that_were_told_other_bounds():
    run_ranks(unlike, 2)


@pytest.mark.parametrize("ranks", [1, 3, 5, 6, 7])
def test_numbers_of_ranks(ranks):
    ep = ExpertParallel(rank=0, size=ranks, group=SimpleNamespace())
    with pytest.raises(ConfigError, match=rf"{ranks} rank\(s\).*auto.*serves 2, 4, 8"):
        make_transport(NAME, ep, max_tokens_per_rank=8)


def test_more_than_eight_ranks():
    ep = ExpertParallel(rank=0, size=16, group=SimpleNamespace())
    with pytest.raises(ConfigError, match=f"{NAME}.*16 ranks"):
        make_transport(NAME, ep, max_tokens_per_rank=8)


def test_it_needs_a_group_and_a_bound():
    with pytest.raises(ConfigError, match="without a process group"):
        make_transport(NAME, ExpertParallel(), max_tokens_per_rank=8)
    ep = ExpertParallel(rank=0, size=2, group=SimpleNamespace())
    with pytest.raises(ConfigError, match="max_tokens_per_rank = None"):
        make_transport(NAME, ep)


def test_bounds(monkeypatch):
    """Powers of two, but for the last: queues of 1,024 messages hold those of 510 tokens."""
    bound = deepep_low_latency._bound
    assert [bound(n) for n in (1, 2, 3, 16, 17, 256, 257, 510)] == [2, 2, 4, 16, 32, 256, 510, 510]
    with pytest.raises(ConfigError, match=r"= 511, .* at most 510 .*NVSHMEM_QP_DEPTH to 1026"):
        bound(511)
    monkeypatch.setenv("NVSHMEM_QP_DEPTH", "1026")
    assert bound(511) == 512


def gates_on_the_inputs(rank):
    ep = ExpertParallel.resolve(dist.group.WORLD)
    says = rf"gate_on = 'input'.*output with transport = '{NAME}'.*another transport"
    on_input = config(transport=NAME, max_tokens_per_rank=8, gate_on="input")
    with pytest.raises(ConfigError, match=says):
        MoELayer(on_input, ep)
    MoELayer(replace(on_input, gate_on="output"), ep)
    MoELayer(replace(on_input, transport="symm"), ep)
    transport = make_transport(NAME, ep, max_tokens_per_rank=8)
    routing = Routing(torch.zeros(3, 1).int(), torch.ones(3, 1))
    with pytest.raises(ConfigError, match=says):
        moe(torch.zeros(3, 16), routing, Experts(on_input, ep), transport)


def test_gates_on_the_inputs_are_refused():
    run_ranks(gates_on_the_inputs, 2)


def own_router(rank):
    """`moe` with a routing from outside, over this transport and over none."""
    stand_in("v2")
    settings = config(num_experts=4)
    torch.manual_seed(0)
    alone = Experts(settings, ExpertParallel()).to(BF16)
    torch.manual_seed(0)
    ep = ExpertParallel.resolve(dist.group.WORLD)
    mine = Experts(settings, ep).to(BF16)
    ids = torch.tensor([[3, 0], [-1, 2], [1, -1]])  # int64
    x, gates = torch.randn(3, 16).to(BF16), torch.rand(2, 3).T  # of columns side by side
    with torch.no_grad():
        y = moe(x, Routing(ids, gates), mine, make_transport(NAME, ep, max_tokens_per_rank=3))
        gates = gates.masked_fill(ids < 0, 0.0)
        expected = moe(x, Routing(ids, gates), alone, make_transport("local", ExpertParallel()))
    assert_close(y, expected, name="y")


def test_a_router_of_ones_own():
    run_ranks(own_router, 2)


@pytest.mark.parametrize(
    "host, says",
    [
        (CPU, r"DeepEP: missing, needs v1 or v2: its class Buffer.*ep-moe\[deepep\]"),
        (h200s(2), r"DeepEP: v2.5 \(deepinfer-ep 2.5.0\), needs v1 or v2"),
        (replace(h200s(1), deepep=V1), r"GPUs: 1, needs 2"),
        (replace(h200s(2), deepep=V2, nccl="2.28.9"), r"NCCL: 2.28.9, needs 2.30.4"),
    ],
)
def test_what_is_missing_is_said(host, says, monkeypatch):
    monkeypatch.setattr(deepep_buffers.Host, "look", lambda: host)
    with pytest.raises(
        BackendUnavailable, match=rf"^transport = '{NAME}' cannot run here: .*{says}"
    ):
        deepep_buffers.load(NAME, 2, torch.device("cuda"))


def nothing_there(rank):
    deepep_buffers.Host.look = lambda: CPU
    each = over_deepep(case(1, 1))
    with pytest.raises(BackendUnavailable, match=f"transport = '{NAME}' needs GPUs.*x is on cpu"):
        outputs(make_layer(each, dist.group.WORLD), each, rank)


def test_a_layer_says_what_is_missing():
    run_ranks(nothing_there, 2)


WITH_CARDS = replace(h200s(2), deepep=V1, network_cards=("mlx5_0",))


def test_a_failing_import_is_said(monkeypatch):
    monkeypatch.setattr(deepep_buffers.Host, "look", lambda: WITH_CARDS)
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(BackendUnavailable, match=f"^transport = '{NAME}' cannot import deep_ep"):
        deepep_buffers.load(NAME, 2, torch.device("cuda"))
