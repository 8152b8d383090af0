"""The counting sort against the torch reference."""

import pytest
import torch

from ep_moe import ops
from ep_moe.kernels import pack as kernel
from tests.helpers import random_local_ids

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CASES = [
    (1, 1, 1, 0.0),
    (5, 2, 3, 0.4),
    (7, 3, 60, 0.9),
    (300, 8, 16, 0.0),  # several blocks
    (8200, 8, 9, 0.1),  # more than are scanned at a time
    (1030, 2, 257, 0.3),
    (64, 8, 8, 1.0),  # none lives here
]


@pytest.mark.parametrize("rows, top_k, experts, absent", CASES)
def test_the_same_order(rows, top_k, experts, absent, device):
    ids = random_local_ids(rows, min(top_k, experts), experts, absent=absent)
    expected = ops.pack(ids, experts)
    arrived, choice, packed, offsets = (
        value.cpu() for value in kernel.pack(ids.to(device), experts)
    )
    assert torch.equal(offsets, expected.offsets)
    assert torch.equal(packed, expected.packed_of_arrived)
    count = int(offsets[-1])
    assert torch.equal(arrived[:count], expected.arrived_of_packed)
    assert torch.equal(choice[:count], expected.choice_of_packed)
    assert not arrived[count:].any()  # rows that stand for none may be read through it
    assert not choice[count:].any()


def test_all_to_one(device):
    ids = torch.full((600, 2), 3, dtype=torch.int32)
    _, _, packed, offsets = kernel.pack(ids.to(device), 5)
    assert packed.flatten().tolist() == list(range(1200))
    assert offsets.tolist() == [0, 0, 0, 0, 1200, 1200]


def test_no_rows(device):
    *_, packed, offsets = kernel.pack(torch.empty(0, 4, dtype=torch.int32, device=device), 3)
    assert packed.shape == (0, 4)
    assert offsets.tolist() == [0, 0, 0, 0]


def test_counts(device):
    ids = random_local_ids(600, 4, 33, absent=0.2)
    counted = kernel.count(ids.to(device), 33).sum(0).cpu()
    assert counted.tolist() == torch.bincount(ids[ids >= 0].long(), minlength=33).tolist()
