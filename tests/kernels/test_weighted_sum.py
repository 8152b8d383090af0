"""Sums over a row's choices, and copies into packed order, against torch."""

import pytest
import torch

from ep_moe import ops
from ep_moe.kernels.gather import gather
from ep_moe.kernels.weighted_sum import sum_parts, weighted_sum
from ep_moe.testing import assert_close
from tests.helpers import LAYOUTS, in_layout, random_local_ids
from tests.kernels.cases import dtypes_on, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# A, K, E, H, absent
CASES = [
    (0, 2, 3, 8, 0.0),
    (1, 1, 1, 1, 0.0),
    (7, 3, 5, 17, 0.4),
    (4, 2, 3, 2050, 0.3),
    (5, 8, 9, 64, 1.0),
]


def make(A, K, E, absent, device):
    packed = ops.pack(random_local_ids(A, K, E, absent=absent, device=device), E)
    gates = torch.rand(A, K, device=device).masked_fill(packed.packed_of_arrived < 0, torch.nan)
    return packed, gates, len(packed.arrived_of_packed)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("A,K,E,H,absent", CASES)
def test_weighted_sum(A, K, E, H, absent, weighted, device):
    packed, gates, S = make(A, K, E, absent, device)
    for dtype in dtypes_on(device):
        y = torch.randn(S + 2, H, device=device).to(dtype)
        y[S:] = torch.nan
        gate_weights = gates if weighted else None
        got = weighted_sum(y, gate_weights, packed.packed_of_arrived)
        expected = ops.weighted_sum(y[:S].double(), gate_weights, packed.packed_of_arrived)
        assert got.dtype == dtype
        assert_close(got, expected, name="out", tolerance=tolerance(dtype))


def test_in_the_order_of_the_choices(device):
    """1 + 2^25 - 2^25 is 0 in fp32, and 1 from behind; 2^25 - 2^25 + 1 is 1, and 0 from behind."""
    y = torch.tensor([[1.0], [2.0**25], [-(2.0**25)]], device=device)
    index = torch.tensor([[0, 1, 2], [1, 2, 0]], dtype=torch.int32, device=device)
    assert weighted_sum(y, None, index).tolist() == [[0.0], [1.0]]
    parts = y.expand(3, 2).contiguous()  # three blocks of two packed rows
    assert sum_parts(parts, index[:1, :2]).tolist() == [[0.0, 0.0]]
    assert sum_parts(parts[[1, 2, 0]], index[:1, :2]).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("blocks", [1, 5])
@pytest.mark.parametrize("A,K,E,H,absent", CASES)
def test_sum_parts(A, K, E, H, absent, blocks, device):
    packed, _, S = make(A, K, E, absent, device)
    parts = torch.randn(blocks, S + 3, device=device)
    parts[:, S:] = torch.nan
    index = packed.packed_of_arrived
    expected = torch.zeros(A, K, dtype=torch.float64, device=device)
    expected[index >= 0] = parts.double().sum(0)[index[index >= 0].long()]
    for layout in LAYOUTS[:2]:
        got = sum_parts(parts, in_layout(index, layout))
        assert_close(got, expected, name="sum", tolerance=1e-6)


@pytest.mark.parametrize("A,K,E,H,absent", CASES)
def test_gather(A, K, E, H, absent, device):
    packed, _, S = make(A, K, E, absent, device)
    index = torch.cat([packed.arrived_of_packed, packed.offsets.new_full((3,), -(2**30))])
    for dtype in dtypes_on(device):
        rows = torch.randn(A, H, device=device).to(dtype)
        got = gather(rows, index, packed.offsets)
        assert torch.equal(got[:S], rows[packed.arrived_of_packed.long()])
        assert got[S:].isnan().all()
