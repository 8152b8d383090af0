"""The one rule about precision that every op follows."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for fp32 and everything narrower; fp64 for fp64, so that finite differences mean
    something."""
    return torch.float64 if dtype == torch.float64 else torch.float32
