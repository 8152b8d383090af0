"""What every test may ask for: a device, and memory in which an unwritten output shows."""

import os

import hypothesis
import pytest
import torch

# Deterministic cuBLAS asks for it before the first product.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
if not torch.cuda.is_available():  # Triton reads it when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run, and no database of them that makes machines differ.
hypothesis.settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def require_gpu():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU: torch.cuda.is_available() is False")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda":
        request.getfixturevalue("require_gpu")
    return torch.device(request.param)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """torch.empty returns NaN (the largest value for integers), and an op without a deterministic
    form raises."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
