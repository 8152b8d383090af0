"""The fixture that the other tests here lean on does what it says."""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("allocate", [torch.empty, torch.ones(0).new_empty])
def test_unwritten_floats_are_nan(allocate, dtype, device):
    assert allocate(3, 4, dtype=dtype, device=device).isnan().all()


def test_unwritten_indices_are_out_of_range(device):
    unwritten = torch.empty(5, dtype=torch.int32, device=device)
    assert (unwritten == torch.iinfo(torch.int32).max).all()


def test_an_op_whose_result_may_vary_raises(device):
    out, index = torch.zeros(3, device=device), torch.tensor([0, 0], device=device)
    with pytest.raises(RuntimeError, match="deterministic"):
        out.put_(index, torch.ones(2, device=device))
