"""Kernels run on the GPU, and without one in Triton's interpreter."""

import sys
from pathlib import Path

import pytest
import torch

import ep_moe.ops.select  # noqa: F401  # the module is looked up below


def pytest_collection_modifyitems(items):
    for item in items:
        if torch.cuda.is_available() and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device(monkeypatch):
    """Where kernels run here. On a CPU selection takes its kernel for once, in the interpreter."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    ops = sys.modules["ep_moe.ops.select"]  # the package has a function of that name
    monkeypatch.setattr(ops, "served_by_kernel", lambda logits: logits.dtype != torch.float64)
    return torch.device("cpu")
