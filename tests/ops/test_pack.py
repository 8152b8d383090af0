"""The order in which experts work on rows: what `pack` promises, and worked examples."""

import pytest
import torch

from ep_moe import ops
from tests.helpers import NOT_POWERS_OF_TWO, random_local_ids


def loop(local_ids, num_experts):
    """The definition: for each expert, each row, each choice."""
    pairs = [
        (e, a, k)
        for e in range(num_experts)
        for a, row in enumerate(local_ids.tolist())
        for k, choice in enumerate(row)
        if choice == e
    ]
    packed_of_arrived = [[-1] * local_ids.shape[1] for _ in range(len(local_ids))]
    for s, (_, a, k) in enumerate(pairs):
        packed_of_arrived[a][k] = s
    offsets = [sum(e < bound for e, _, _ in pairs) for bound in range(num_experts + 1)]
    return [a for _, a, _ in pairs], [k for _, _, k in pairs], packed_of_arrived, offsets


def check(local_ids, num_experts):
    packed = ops.pack(local_ids, num_experts)
    for got, expected in zip(vars(packed).values(), loop(local_ids, num_experts), strict=True):
        assert got.dtype == torch.int32
        assert got.device == local_ids.device
        assert got.tolist() == expected
    return packed


@pytest.mark.parametrize(
    "rows,top_k,num_experts,absent",
    [(0, 2, 4, 0.3), (1, 1, 1, 0.0), (5, 3, 4, 1.0), (33, 2, 5, 0.5), (64, 8, 20, 0.0)],
)
def test_equals_the_definition(rows, top_k, num_experts, absent, device):
    check(random_local_ids(rows, top_k, num_experts, absent=absent, device=device), num_experts)


@pytest.mark.parametrize("num_experts", NOT_POWERS_OF_TWO)
def test_any_number_of_experts(num_experts, device):
    ids = random_local_ids(40, min(2, num_experts), num_experts, absent=0.2, device=device)
    check(ids, num_experts)


@pytest.mark.parametrize("expert", [0, 2, 3])
def test_one_expert_takes_all(expert, device):
    packed = check(torch.full((9, 1), expert, dtype=torch.int32, device=device), 4)
    assert packed.offsets.tolist() == [0] * (expert + 1) + [9] * (4 - expert)


def test_rows_keep_their_order_within_an_expert(device):
    """A sort that is not stable passes on few rows and two runs stop agreeing on many."""
    ids = torch.randint(3, (4096, 1), dtype=torch.int32, device=device)
    packed = ops.pack(ids, 3)
    for start, stop in zip(packed.offsets[:-1], packed.offsets[1:], strict=True):
        assert (packed.arrived_of_packed[start:stop].diff() > 0).all()


def test_absent_choices_shift_nothing(device):
    """Case BB-21: a signed sort would put -1 first and give the rows [0,2,0,1]."""
    packed = check(torch.tensor([[0, -1], [1, 0], [-1, 1]], dtype=torch.int32, device=device), 2)
    assert packed.arrived_of_packed.tolist() == [0, 1, 1, 2] != [0, 2, 0, 1]
    assert packed.packed_of_arrived.tolist() == [[0, -1], [2, 1], [-1, 3]]
    assert packed.offsets.diff().tolist() == [2, 2]


def test_the_last_expert_is_counted_once(device):
    """Case BB-19: five experts in blocks of four counted as [2,2,2,1,2]."""
    packed = check(
        torch.tensor([[0], [1], [2], [3], [4], [4]], dtype=torch.int32, device=device), 5
    )
    assert packed.offsets.diff().tolist() == [1, 1, 1, 1, 2] != [2, 2, 2, 1, 2]
    assert packed.arrived_of_packed.tolist() == [0, 1, 2, 3, 4, 5]


def test_offsets_are_exclusive(device):
    """Two rows for each of three experts: [0,2,4] where they start (and 6 to close), not their
    inclusive ends [2,4,6]."""
    packed = check(torch.tensor([[0, 1], [1, 2], [2, 0]], dtype=torch.int32, device=device), 3)
    assert packed.offsets.tolist() == [0, 2, 4, 6]
