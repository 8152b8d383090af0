"""EP_MOE_CHECK=1: faults that would hang, or give wrong numbers, are named on every rank."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import ep_moe
from ep_moe import ops
from ep_moe.check import Splits
from ep_moe.dispatch import dispatch
from ep_moe.dispatch.collective import exchange
from ep_moe.testing import assert_close, run_ranks

CONFIG = ep_moe.MoEConfig(
    hidden_size=8,
    intermediate_size=8,
    num_experts=6,
    top_k=2,
    aux_loss_coef=0.01,
    aux_loss_scope="global",
)
CHECK = {"EP_MOE_CHECK": "1"}
LIMIT = 60.0  # seconds, for starting the ranks too
TIMEOUT = timedelta(seconds=5)  # of a group in which somebody waits in vain


# Splits (BB-67)


def rank_exchanges(rank, send, expect):
    """The rows that arrived, or the error. Row i to rank d holds [rank, d, i]."""
    ep = ep_moe.ExpertParallel.resolve(dist.group.WORLD)
    rows = [[rank, d, i] for d, n in enumerate(send[rank]) for i in range(n)]
    rows = torch.tensor(rows, dtype=torch.float32).view(-1, 3)
    try:
        return exchange(rows, Splits(send[rank], expect[rank]), ep=ep, stage="the test").tolist()
    except ep_moe.SplitMismatch as error:
        return error.bad, str(error)


SENT = [[2, 3], [4, 5]]
CASES = {
    "BB-67": (SENT, [[2, 4], [3, 6]], [(1, 1, 5, 6)]),
    "one row less": (SENT, [[2, 3], [3, 5]], [(1, 0, 4, 3)]),
    "transposed": (SENT, SENT, [(0, 1, 3, 4), (1, 0, 4, 3)]),
    "nothing sent": ([[0, 0], [0, 0]], [[0, 0], [0, 1]], [(1, 1, 0, 1)]),
}


@pytest.mark.parametrize("send, expect, bad", CASES.values(), ids=CASES.keys())
def test_corrupt_splits_are_named_on_every_rank(send, expect, bad):
    for got_bad, text in run_ranks(rank_exchanges, 2, send, expect, environ=CHECK, timeout=LIMIT):
        assert got_bad == bad
        for source, destination, sent, expected in bad:
            assert (
                f"rank {source} sends rank {destination} {sent} rows, which expects {expected}"
                in text
            )


def test_right_splits_pass():
    got = run_ranks(rank_exchanges, 2, SENT, [[2, 4], [3, 5]], environ=CHECK, timeout=LIMIT)
    for rank, rows in enumerate(got):
        assert rows == [[source, rank, i] for source in (0, 1) for i in range(SENT[source][rank])]


# Order and number of calls (BB-101)


def rank_calls(rank, orders, backward):
    """This rank calls the layers that orders[rank] names, then their backward passes if asked to;
    the error, or what it computed."""
    group = dist.new_group(timeout=TIMEOUT)
    torch.manual_seed(0)
    layers = {name: ep_moe.MoELayer(CONFIG, ep=group) for name in "AB"}
    x = torch.randn(5 * rank, 8, requires_grad=True)  # rank 0 has no tokens
    try:
        y, losses = x, []
        for name in orders[rank]:
            y, stats = layers[name](y)
            losses.append(stats)
        if backward:
            (y.sum() + ep_moe.total_aux(losses)).backward()
    except (ep_moe.CallMismatch, ep_moe.DispatchTimeout) as error:
        return type(error).__name__, str(error)
    return y.detach(), x.grad


SUM = r"the sum of a tensor of shape \(7,\), after"
MISMATCHES = {
    "swapped": (("AB", "BA"), False, "layer 0, call 1, forward, ", "layer 1, call 1, forward, "),
    "skipped": (("AB", "A"), True, f"{SUM} layer 0, call 1, forward, ", "layer 0, .*backward, "),
    "repeated": (("AB", "AAB"), True, "layer 1, call 1, forward, ", "layer 0, call 2, forward, "),
    "once more": (("A", "AA"), True, "layer 0, .*backward, ", f"{SUM} layer 0, call 1, forward, "),
}


@pytest.mark.parametrize("orders, backward, at_0, at_1", MISMATCHES.values(), ids=MISMATCHES.keys())
def test_other_calls_are_named_on_every_rank(orders, backward, at_0, at_1):
    for error, text in run_ranks(rank_calls, 2, orders, backward, environ=CHECK, timeout=LIMIT):
        assert error == "CallMismatch"
        assert re.search(f"rank 0 is at {at_0}.*; rank 1 is at {at_1}", text), text


def rank_calls_between_sends(rank, swapped):
    """Layers with groups of their own, and between them an exchange of activations, and then of
    their gradients, as a pipeline makes it; rank 1 has the layers the other way round if asked."""
    layers = []
    for _ in "AB":
        torch.manual_seed(len(layers))
        layers.append(ep_moe.MoELayer(CONFIG, ep=dist.new_group(timeout=TIMEOUT)).double())
    first, second = layers[:: -1 if swapped and rank == 1 else 1]
    x = torch.randn(3 + rank, 8, dtype=torch.float64, requires_grad=True)
    try:
        between, _ = first(x)
        arrived = swap(between.detach(), 4 - rank).requires_grad_()
        y, _ = second(arrived)
        y.square().sum().backward()
        between.backward(swap(arrived.grad, 3 + rank))
    except ep_moe.DispatchTimeout as error:
        return str(error)
    return x.detach(), y.detach(), x.grad


def swap(mine, rows):
    """What the other rank has, through the world."""
    theirs, peer = mine.new_empty(rows, 8), 1 - dist.get_rank()
    for work in [dist.isend(mine, peer), dist.irecv(theirs, peer)]:
        work.wait()
    return theirs


@pytest.mark.parametrize("environ", [{}, CHECK], ids=["plain", "checked"])
def test_groups_of_their_own_between_the_sends_of_a_pipeline(environ):
    """BB-101, its other half."""
    torch.manual_seed(0)
    first = ep_moe.MoELayer(CONFIG).double()
    torch.manual_seed(1)
    second = ep_moe.MoELayer(CONFIG).double()
    got = run_ranks(rank_calls_between_sends, 2, False, environ=environ, timeout=LIMIT)
    for rank, (x, _, d_x) in enumerate(got):
        y = second(first(x.requires_grad_())[0])[0]
        assert_close(got[1 - rank][1], y.detach(), name="y, at the other rank")
        assert_close(d_x, torch.autograd.grad(y.square().sum(), x)[0], name="dx")


def test_groups_of_their_own_in_another_order_end_in_time():
    """BB-101: without a check, too. Each rank waits in the group of another layer."""
    for rank, text in enumerate(run_ranks(rank_calls_between_sends, 2, True, timeout=LIMIT)):
        assert re.match(rf"rank {rank} waited [56]\.\d s at the sum of a tensor", text), text
        assert f"rank {1 - rank} is at work after the start" in text


def test_a_rank_that_calls_no_more_is_named():
    got = run_ranks(rank_calls, 2, ("AB", "A"), False, environ=CHECK, timeout=LIMIT)
    error, text = got[0]
    assert error == "DispatchTimeout"
    assert "rank 0 waited 5" in text
    assert "at the check before the sum of a tensor" in text
    assert "rank 1 is at work after layer 0, call 1, forward, rows back" in text


def test_equal_calls_pass_and_change_nothing():
    checked, plain = (
        run_ranks(rank_calls, 2, ("ABA", "ABA"), True, environ=environ, timeout=LIMIT)
        for environ in (CHECK, {})
    )
    for (y, d_x), (expected_y, expected_d_x) in zip(checked, plain, strict=True):
        assert torch.equal(y, expected_y)
        assert torch.equal(d_x, expected_d_x)


def rank_checkpoints(rank, context_fn):
    layer = ep_moe.MoELayer(CONFIG, ep=dist.group.WORLD)
    x = torch.randn(4 * rank, 8, requires_grad=True)
    extra = {} if context_fn is None else {"context_fn": context_fn()}
    y = checkpoint(lambda x: layer(x)[0], x, use_reentrant=False, **extra)
    y.sum().backward()


@pytest.mark.parametrize("context_fn", [None, ep_moe.replay])
def test_recomputation_passes(context_fn):
    run_ranks(rank_checkpoints, 2, context_fn, environ=CHECK, timeout=LIMIT)


# Indices and offsets


def rank_dispatches(rank, bad_id):
    """In the second call, rank 1 sends a token to an expert that does not exist."""
    transport = ep_moe.make_transport("auto", ep_moe.ExpertParallel.resolve(dist.group.WORLD))
    for other in (1, bad_id if rank == 1 else 1):
        ids = torch.tensor([[0, other]])
        dispatch(torch.randn(1, 8), ep_moe.Routing(ids, torch.ones(1, 2)), 6, transport)


@pytest.mark.parametrize("bad_id", [-2, 6])
def test_ids_out_of_range_end_every_rank(bad_id):
    with pytest.raises(AssertionError) as failed:
        run_ranks(rank_dispatches, 2, bad_id, environ=CHECK, timeout=LIMIT)
    text = str(failed.value)
    named = rf"InputError: routing.ids is between .*{bad_id}.*, but it must be -1 .* or 0 to 5"
    assert re.search(rf"rank 1:\n(.*\n)*.*{named}", text), text
    assert re.search(rf"PeerLost: rank 0 lost rank 1 at .*: rank 1 ended with {named}", text), text


@pytest.mark.parametrize("bad_id", [-2, 6])
def test_ids_out_of_range_alone(bad_id, monkeypatch, device):
    monkeypatch.setenv("EP_MOE_CHECK", "1")
    transport = ep_moe.make_transport("auto", ep_moe.ExpertParallel())
    x, ids = torch.randn(1, 8, device=device), torch.tensor([[0, bad_id]], device=device)
    with pytest.raises(ep_moe.InputError, match=r"routing\.ids is between"):
        dispatch(x, ep_moe.Routing(ids, torch.ones(1, 2, device=device)), 6, transport)


@pytest.mark.parametrize("bad_id", [-2, 3])
def test_local_ids_out_of_range(bad_id, monkeypatch, device):
    local_ids = torch.tensor([[0, -1], [bad_id, 2]], dtype=torch.int32, device=device)
    monkeypatch.setenv("EP_MOE_CHECK", "1")
    with pytest.raises(ep_moe.InputError, match=r"local_ids is between .* or 0 to 2"):
        ops.pack(local_ids, 3)


@pytest.mark.parametrize(
    "offsets", [[0, 2, 1, 3], [0, 1, 3], [1, 1, 2, 3], [0, 1, 2, 4], [0, -1, 2, 3], []]
)
def test_wrong_offsets(offsets, monkeypatch, device):
    monkeypatch.setenv("EP_MOE_CHECK", "1")
    x, weight = torch.randn(3, 4, device=device), torch.randn(3, 5, 4, device=device)
    offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
    with pytest.raises(ep_moe.InputError, match=r"offsets is .*4 exclusive cumulative sums"):
        ops.grouped_gemm(x, weight, offsets)


@pytest.mark.parametrize("value", ["", "0"])
def test_off(value, monkeypatch):
    monkeypatch.setenv("EP_MOE_CHECK", value)
    ops.pack(torch.tensor([[-2]], dtype=torch.int32), 3)  # taken for absent, not looked at
