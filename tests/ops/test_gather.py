"""Copying rows into packed order is exact, and its adjoint adds in k order and rounds once."""

import pytest
import torch

from ep_moe import ops
from ep_moe.testing import assert_close
from tests.helpers import DTYPES, LAYOUTS, in_layout, random_local_ids

SHAPES = [(0, 2, 5), (1, 1, 1), (33, 3, 17), (6, 5, 3)]  # A, K, H


def pack(rows, top_k, device, absent=0.3):
    return ops.pack(random_local_ids(rows, top_k, 5, absent=absent, device=device), 5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("A,K,H", SHAPES)
def test_forward_copies(A, K, H, dtype, layout, device):
    packed = pack(A, K, device)
    index = packed.arrived_of_packed
    rows = in_layout(torch.randn(A, H, device=device).to(dtype), layout)
    got = ops.gather(rows, index, packed.offsets)
    assert torch.equal(got, torch.stack([rows[a] for a in index.tolist()]) if len(index) else got)
    assert got.shape == (len(index), H)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_of_the_rows_give_the_whole(dtype, device):
    """Each its own rows, wherever they go; what stood there before stays where none is for."""
    packed = pack(33, 3, device)
    index = packed.arrived_of_packed
    rows = torch.randn(33, 17, device=device).to(dtype)
    into = torch.full((len(index), 17), 7.0, device=device, dtype=dtype)
    for first, piece in ((20, rows[20:]), (4, rows[4:4]), (4, rows[4:20])):
        got = ops.gather(piece.clone(), index, packed.offsets, first=first, into=into)
        assert got.data_ptr() == into.data_ptr()
    expected = rows[index.long()].masked_fill((index < 4)[:, None], 7.0)
    assert torch.equal(into, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("A,K,H", SHAPES)
def test_backward_is_the_adjoint(A, K, H, dtype, layout, device):
    packed = pack(A, K, device)
    S = len(packed.arrived_of_packed)
    d_packed = in_layout(torch.randn(S, H, device=device).to(dtype), layout)
    rows = torch.zeros(A, H, dtype=torch.float64, device=device, requires_grad=True)
    rows[packed.arrived_of_packed.long()].backward(d_packed.double())
    got = ops.weighted_sum(d_packed, None, packed.packed_of_arrived)
    assert got.dtype == dtype
    # one rounding at the end: half an ulp of the largest
    assert_close(got, rows.grad, name="d_rows", tolerance=max(torch.finfo(dtype).eps, 1e-6))


def test_a_row_without_experts_here_gets_a_zero_gradient(device):
    packed = pack(4, 2, device, absent=1.0)
    d_rows = ops.weighted_sum(torch.ones(0, 3, device=device), None, packed.packed_of_arrived)
    assert torch.equal(d_rows, torch.zeros(4, 3, device=device))


def test_small_terms_survive_in_bf16(device):
    """256 and seven 1s: a running bf16 sum stays at 256, the fp32 sum 263 rounds to 264."""
    d_packed = torch.tensor([[256.0]] + [[1.0]] * 7, device=device).bfloat16()
    index = torch.arange(8, dtype=torch.int32, device=device)[None]
    assert ops.weighted_sum(d_packed, None, index).item() == 264.0
