"""Tiles and groups that the tests of grouped products share; small, for the interpreter."""

import zlib

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
    "pointers for results": SMALL._replace(tma=True, tma_store=False),
    "activation afterwards": SMALL._replace(step=0),
    "copied": SMALL._replace(tma=True, copy=True),
    "two a multiprocessor": Tile(16, 32, 32, warps=4, stages=3, per_sm=2),
}
EDGES = {"around a block": (15, 0, 16, 17, 0, 1, 33)}
SIZES = GROUPS | EDGES


def dtypes_on(device: torch.device) -> list[torch.dtype]:
    """The interpreter multiplies bf16 wrongly."""
    halves = [torch.float16] if device.type == "cpu" else [torch.float16, torch.bfloat16]
    return [torch.float32, *halves]


def one_of(dtypes: list[torch.dtype], *case: object) -> list[torch.dtype]:
    """Each case has one of them: the interpreter is slow, and a GPU compiles every case."""
    return [dtypes[zlib.crc32(repr(case).encode()) % len(dtypes)]]


def tolerance(dtype: torch.dtype) -> float:
    """One rounding of the largest, and the order of a sum in fp32."""
    return 3e-6 if dtype == torch.float32 else 0.6 * torch.finfo(dtype).eps
