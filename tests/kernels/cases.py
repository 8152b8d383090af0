"""Tiles and groups that the tests of grouped products share; small, for the interpreter."""

import torch

from ep_moe.kernels.tiles import Tile
from tests.helpers import GROUPS

SMALL = Tile(16, 16, 16, warps=4, stages=2, group_m=2)
TILES = {
    "pointers": SMALL,
    "descriptors": SMALL._replace(tma=True),
    "flattened": SMALL._replace(tma=True, flatten=True),
    "swapped": SMALL._replace(tma=True, swap=True),
    "swapped pointers": SMALL._replace(swap=True),
    "wide": Tile(32, 64, 16, warps=4, stages=2, group_m=1, step=16, tma=True),
    "two a multiprocessor": Tile(16, 32, 32, warps=4, stages=3, per_sm=2),
}
EDGES = {"around a block": (15, 0, 16, 17, 0, 1, 33)}
SIZES = GROUPS | EDGES


# The interpreter multiplies bf16 wrongly.
def dtypes_on(device: torch.device) -> list[torch.dtype]:
    halves = [torch.float16] if device.type == "cpu" else [torch.float16, torch.bfloat16]
    return [torch.float32, *halves]


def tolerance(dtype: torch.dtype) -> float:
    """One rounding of the largest, and the order of a sum in fp32."""
    return 3e-6 if dtype == torch.float32 else 0.6 * torch.finfo(dtype).eps
