"""Small inputs, memory layouts and layers that several tests share."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ep_moe import MoEConfig, MoELayer
from ep_moe.testing import TOLERANCE

DTYPES = list(TOLERANCE)

# Rows of each expert.
GROUPS = {
    "ragged": (3, 1, 17, 0, 5),
    "empty first and last": (0, 4, 0),
    "one takes all": (0, 0, 33),
    "all empty": (0, 0, 0),
    "one expert": (5,),
}

NOT_POWERS_OF_TWO = (1, 3, 5, 6, 7, 12, 20, 48, 60, 65, 72, 96, 160, 257, 384)

LAYOUTS = ("contiguous", "transposed", "margin")


def offsets_of(sizes: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """(2,0,3) -> [0,2,2,5]"""
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)


def owners_of(sizes: Sequence[int]) -> list[int]:
    """(2,0,3) -> [0,0,2,2,2]"""
    return [e for e, size in enumerate(sizes) for _ in range(size)]


def random_local_ids(
    rows: int, top_k: int, num_experts: int, *, absent: float, device: torch.device | str = "cpu"
) -> Tensor:
    """(A,K) int32: distinct experts in each row, a share of them -1."""
    ids = torch.rand(rows, num_experts).argsort(dim=1)[:, :top_k]
    return ids.masked_fill(torch.rand(rows, top_k) < absent, -1).int().to(device)


def in_layout(matrix: Tensor, layout: str) -> Tensor:
    """The same values, stored otherwise. With a margin of NaN any stray read shows."""
    if layout == "transposed":
        return matrix.t().contiguous().t()
    if layout == "margin":
        rows, columns = matrix.shape
        storage = matrix.new_full((rows + 2, columns + 3), float("nan"))
        storage[1:-1, 2:-1] = matrix
        return storage[1:-1, 2:-1]
    return matrix


def leaf(value: Tensor) -> Tensor:
    """A float64 copy that collects a gradient."""
    return value.detach().double().requires_grad_()


def small_config(**changes: Any) -> MoEConfig:
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_experts": 8, "top_k": 2}
    return MoEConfig(**(sizes | changes))


def random_layer(config: MoEConfig, dtype: torch.dtype = torch.float64) -> MoELayer:
    """Every parameter and buffer random, biases and the selection bias too."""
    layer = MoELayer(config)
    with torch.no_grad():
        for value in layer.state_dict().values():
            value.normal_(std=0.4)
    return layer.to(dtype)
