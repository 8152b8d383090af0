"""The kernels behind the order of sending: the cases of `tests.ops.test_send`."""

import pytest
import torch

from ep_moe import ops
from ep_moe.kernels import pack as pack_kernel
from ep_moe.kernels import send
from tests.ops import test_send as cases

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Every op takes its kernel, on a CPU too."""

    def order(ids, num_experts, ranks):
        destinations, choices = send.destinations(ids, num_experts // ranks, ranks)
        most = len(ids) * min(ranks, ids.shape[1])
        arrived, _, packed, offsets = pack_kernel.pack(destinations, ranks)
        return ops.SendOrder(arrived[:most], packed, offsets, choices)

    def message(ids, gates, order, experts_per_rank):
        index, offsets = order.token_of_sent, order.offsets
        return send.message(ids, gates, index, offsets, experts_per_rank=experts_per_rank)

    monkeypatch.setattr(ops, "send_order", order)
    monkeypatch.setattr(ops, "message", message)


@pytest.mark.parametrize("absent", cases.ABSENT.values(), ids=cases.ABSENT.keys())
@pytest.mark.parametrize("case", cases.CASES.values(), ids=cases.CASES.keys())
def test_equals_a_loop_over_tokens(case, absent, device):
    tokens, experts, top_k, ranks = case
    ids, gates = cases.random_routing(tokens, experts, top_k, absent, device)
    cases.check(ids, gates, experts, ranks)


def test_wide_ids_gates_and_strides(device):
    cases.test_wide_ids_gates_and_strides(device)


def test_rows_that_nobody_owns_are_not_written(device):
    ids, gates = cases.random_routing(200, 8, 3, 0.5, device)
    order = ops.send_order(ids, 8, 4)
    sent = int(order.offsets[-1])
    assert 0 < sent < len(order.token_of_sent)
    message = ops.message(ids, gates, order, 2)
    assert (message[sent:] == torch.iinfo(torch.int32).max).all()
