"""The order in which a rank sends, against a loop over tokens."""

import subprocess
import sys

import pytest
import torch

from ep_moe import ops

CASES = {  # tokens, experts, choices, ranks
    "one rank": (7, 4, 2, 1),
    "two ranks": (300, 12, 3, 2),
    "more ranks than choices": (129, 16, 2, 8),
    "an expert a rank": (50, 3, 3, 3),
    "no tokens": (0, 8, 2, 4),
}
ABSENT = {"none absent": 0.0, "half absent": 0.5, "all absent": 1.0}


def random_routing(tokens, experts, top_k, absent, device="cpu", ids_dtype=torch.int32):
    ids = torch.rand(tokens, experts).argsort(1)[:, :top_k]
    ids[torch.rand(tokens, top_k) < absent] = -1
    gates = torch.rand(tokens, top_k)
    return ids.to(device, ids_dtype), gates.to(device)


def by_hand(ids, experts, ranks):
    """token_of_sent, sent_of_token, rows and choices of each rank"""
    each = experts // ranks
    token_of_sent, sent_of_token = [], torch.full((len(ids), ranks), -1)
    rows, choices = [0] * ranks, [0] * ranks
    for rank in range(ranks):
        for token, chosen in enumerate(ids.tolist()):
            here = sum(rank * each <= id < (rank + 1) * each for id in chosen)
            choices[rank] += here
            if here:
                sent_of_token[token, rank] = len(token_of_sent)
                token_of_sent.append(token)
                rows[rank] += 1
    return token_of_sent, sent_of_token, rows, choices


def check(ids, gates, experts, ranks):
    order = ops.send_order(ids, experts, ranks)
    token_of_sent, sent_of_token, rows, choices = by_hand(ids, experts, ranks)
    sent, each = len(token_of_sent), experts // ranks
    assert order.token_of_sent.dtype == order.sent_of_token.dtype == torch.int32
    assert order.token_of_sent[:sent].tolist() == token_of_sent
    assert order.token_of_sent[sent:].tolist() == [0] * (len(order.token_of_sent) - sent)
    assert order.sent_of_token.tolist() == sent_of_token.tolist()
    assert order.offsets.diff().tolist() == rows
    assert order.choices.tolist() == choices
    message = ops.message(ids, gates, order, each)[:sent].cpu()
    top_k = ids.shape[1]
    destination = [rank for rank in range(ranks) for _ in range(rows[rank])]
    for row, token, rank in zip(message, token_of_sent, destination, strict=True):
        local = [id - rank * each if id // each == rank and id >= 0 else -1 for id in ids[token]]
        assert row[:top_k].tolist() == local
        assert torch.equal(row[top_k:].view(gates.dtype), gates[token].cpu())


@pytest.mark.parametrize("absent", ABSENT.values(), ids=ABSENT.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_a_loop_over_tokens(case, absent, device):
    tokens, experts, top_k, ranks = case
    ids, gates = random_routing(tokens, experts, top_k, absent, device)
    check(ids, gates, experts, ranks)


def test_wide_ids_gates_and_strides(device):
    ids, gates = random_routing(40, 8, 4, 0.2, device, torch.int64)
    check(ids, gates.double(), 8, 4)
    check(ids[:, ::2], gates[:, ::2], 8, 4)
    check(ids[::3], gates[::3], 8, 2)


def test_the_worked_example():
    ids = torch.tensor([[0, 1], [3, 0]], dtype=torch.int32)
    order = ops.send_order(ids, 4, 2)
    assert [value.tolist() for value in order] == [[0, 1, 1], [[0, -1], [1, 2]], [0, 2, 3], [3, 1]]


BAD_ID = """
import torch
from ep_moe import ops
ops.send_order(torch.tensor([[0], [4]], dtype=torch.int32, device="cuda"), 4, 2)
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_an_id_that_is_no_expert_stops_the_gpu(require_gpu):
    """It would go nowhere. In a process of its own, whose device is lost with it."""
    done = subprocess.run([sys.executable, "-c", BAD_ID], capture_output=True, text=True)
    assert done.returncode != 0
    assert "neither -1 nor an expert" in done.stderr + done.stdout
