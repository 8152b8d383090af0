"""The order in which a rank sends and the messages ahead of it, against a loop over tokens."""

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
    "more ranks than bits in a word": (20, 66, 5, 33),
    "one choice": (40, 6, 1, 2),
    "no tokens": (0, 8, 2, 4),
}
ABSENT = {"none absent": 0.0, "half absent": 0.5, "all absent": 1.0}
UNWRITTEN = torch.iinfo(torch.int32).max  # what poisoned memory holds


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


def send(ids, gates, experts, ranks, lines):
    form = {"top_k": ids.shape[1], "gates": gates.dtype}
    blocks = ops.empty_blocks(ranks, lines=lines, device=ids.device, **form)
    return ops.send_order(ids, gates, experts, blocks), blocks


def check(ids, gates, experts, ranks, lines=None):
    lines = len(ids) if lines is None else lines
    order, blocks = send(ids, gates, experts, ranks, lines)
    token_of_sent, sent_of_token, rows, choices = by_hand(ids, experts, ranks)
    sent, each, top_k = len(token_of_sent), experts // ranks, ids.shape[1]
    assert {value.dtype for value in (*order, blocks)} == {torch.int32}
    assert order.token_of_sent[:sent].tolist() == token_of_sent
    assert order.token_of_sent[sent:].tolist() == [0] * (len(order.token_of_sent) - sent)
    assert order.sent_of_token.tolist() == sent_of_token.tolist()
    assert order.offsets.tolist() == [sum(rows[:rank]) for rank in range(ranks + 1)]
    filled = [min(n, lines) for n in rows]
    needed = len(ids) if ranks <= 8 else max(rows)
    for rank, block in enumerate(blocks.tolist()):
        assert block[0][: ops.HEAD] == [rows[rank], choices[rank], needed]
        assert all(value == UNWRITTEN for line in block[1 + filled[rank] :] for value in line)
    blocks[:, 0, 0] = torch.tensor(filled)  # others are opened in blocks that have the room
    local_ids, arrived_gates = ops.open_blocks(blocks, filled, top_k=top_k, gates=gates.dtype)
    assert local_ids.is_contiguous()
    assert arrived_gates.is_contiguous()
    assert (local_ids.dtype, arrived_gates.dtype) == (torch.int32, gates.dtype)
    expected_ids, tokens = [], []
    for rank, begin in enumerate(order.offsets[:-1].tolist()):
        for token in token_of_sent[begin : begin + filled[rank]]:
            chosen = ids[token].tolist()
            expected_ids.append(
                [i - rank * each if i >= 0 and i // each == rank else -1 for i in chosen]
            )
            tokens.append(token)
    assert local_ids.tolist() == expected_ids
    assert torch.equal(arrived_gates, gates[tokens])


@pytest.mark.parametrize("absent", ABSENT.values(), ids=ABSENT.keys())
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_a_loop_over_tokens(case, absent, device):
    tokens, experts, top_k, ranks = case
    ids, gates = random_routing(tokens, experts, top_k, absent, device)
    check(ids, gates, experts, ranks)


@pytest.mark.parametrize("lines", [0, 7, 1000])
def test_rows_that_find_no_line_are_counted_alone(lines, device):
    ids, gates = random_routing(90, 8, 3, 0.3, device)
    check(ids, gates, 8, 4, lines)


def test_wide_ids_gates_and_strides(device):
    ids, gates = random_routing(40, 8, 4, 0.2, device, torch.int64)
    check(ids, gates.double(), 8, 4)
    check(ids[:, ::2], gates[:, ::2], 8, 4)
    check(ids[::3], gates[::3], 8, 2)


def test_the_worked_example():
    ids = torch.tensor([[0, 1], [3, 0]], dtype=torch.int32)
    gates = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    order, blocks = send(ids, gates, 4, 2, 2)
    assert [value.tolist() for value in order] == [[0, 1, 1], [[0, -1], [1, 2]], [0, 2, 3]]
    a, b, c, d = gates.flatten().view(torch.int32).tolist()
    assert [line[: ops.HEAD] for line in blocks[:, 0].tolist()] == [[2, 3, 2], [1, 1, 2]]
    assert blocks[0, 1:].tolist() == [[0, 1, a, b], [-1, 0, c, d]]
    assert blocks[1, 1].tolist() == [1, -1, c, d]


BAD_ID = """
import torch
from ep_moe import ops
ids = torch.tensor([[0], [4]], dtype=torch.int32, device="cuda")
form = {"lines": 2, "top_k": 1, "gates": torch.float32, "device": ids.device}
ops.send_order(ids, torch.ones(2, 1, device="cuda"), 4, ops.empty_blocks(2, **form))
torch.cuda.synchronize()
"""


@pytest.mark.gpu
def test_an_id_that_is_no_expert_stops_the_gpu(require_gpu):
    """It would go nowhere. In a process of its own, whose device is lost with it."""
    done = subprocess.run([sys.executable, "-c", BAD_ID], capture_output=True, text=True)
    assert done.returncode != 0
    assert "neither -1 nor an expert" in done.stderr + done.stdout
