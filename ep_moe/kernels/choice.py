"""Which tile a grouped product runs with: the nearest of those measured on this kind of GPU.

`tuned/<architecture>.json` holds what `ep-moe tune` found; EP_MOE_TILES names another such file.
Without one for this GPU a default serves that every GPU can run.
"""

import functools
import json
import os
from importlib import resources
from math import log2
from pathlib import Path
from typing import NamedTuple

from ep_moe.errors import ConfigError
from ep_moe.kernels.tiles import Tile


class Product(NamedTuple):
    """What a tile is chosen for. rows: of an expert, the mean. depth: summed over. columns: of the
    result.

    Forms: hidden (rows to h, with the activation behind the product; columns are gate and up),
    product (h to rows), gradient (d_out to d_pre, through the activation), dgrad (d_pre to rows),
    wgrad (a weight's gradient: rows are summed over, depth and columns are the weight's).
    """

    form: str
    itemsize: int
    rows: int
    depth: int
    columns: int


def tile_for(product: Product, arch: str, *, exact: bool = False) -> Tile:
    """exact: the same whatever the number of rows and the table, so that a row's result does not
    depend on either."""
    if exact:
        return default_tile(product._replace(rows=1024), arch)
    return _nearest(product, arch, os.environ.get("EP_MOE_TILES"))


def default_tile(product: Product, arch: str) -> Tile:
    """For what nobody has measured. Without descriptors it fits every GPU: 64 KiB of shared
    memory."""
    form, itemsize, rows, *_ = product
    if itemsize == 4:
        return Tile(32, 64, 32, warps=4, stages=2, step=16)
    descriptors = arch in ("sm_90", "sm_100") and _has_descriptors(product)
    if rows <= 16 and form != "wgrad":  # where rows are what is summed over
        if not descriptors:
            return Tile(16, 64, 64, warps=4, stages=3)
        # A program a tile: one reads while another changes tiles, and all end together.
        stages = 5 if form == "hidden" else 3
        return Tile(16, 64, 128, warps=4, stages=stages, per_sm=64, tma=True)
    if not descriptors:
        return Tile(64 if rows <= 64 or form == "gradient" else 128, 64, 32, warps=4, stages=3)
    if rows <= 64:
        deep = 32 if form == "wgrad" else 64
        return Tile(128 if form == "wgrad" else 64, 64, deep, warps=4, stages=4, tma=True)
    if form == "gradient":
        return Tile(128, 128, 64, warps=8, stages=4, tma=True)
    return Tile(128, 128 if form == "hidden" else 256, 64, warps=8, stages=3, tma=True)


def read_table(text: str, source: str) -> list[tuple[Product, Tile]]:
    """Raises ConfigError for what is no table of tiles."""
    try:
        return [(Product(**row["product"]), Tile(**row["tile"])) for row in json.loads(text)]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(source, repr(error), "a file that `ep-moe tune` wrote") from error


@functools.lru_cache(maxsize=4096)
def _nearest(product: Product, arch: str, path: str | None) -> Tile:
    alike = [
        (other, tile)
        for other, tile in _table(arch, path)
        if (other.form, other.itemsize) == (product.form, product.itemsize)
    ]
    if not alike:
        return default_tile(product, arch)
    other, tile = min(alike, key=lambda entry: _distance(entry[0], product))
    # Between a few rows and hundreds a tile made for either reads weights or rows again.
    between = product.rows < 512 and max(product.rows, other.rows) > 16
    far = between and _doublings(product.rows, other.rows) > 1.5
    # What made it the fastest is not to be had there.
    gathers = tile.specialize and product.form in ("hidden", "gradient") and not tile.copy
    if far or (tile.tma and not _has_descriptors(product)) or (gathers and product.depth % 64):
        return default_tile(product, arch)
    return tile


def _has_descriptors(product: Product) -> bool:
    """Rows of weights and results are multiples of 16 bytes."""
    width = product.columns // 2 if product.form == "hidden" else product.columns
    numbers = 16 // product.itemsize
    return not (product.depth % numbers or width % numbers)


@functools.cache
def _table(arch: str, path: str | None) -> list[tuple[Product, Tile]]:
    if path:
        source = f"EP_MOE_TILES={path}"
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise ConfigError(source, repr(error), "a file that `ep-moe tune` wrote") from error
        return read_table(text, source)
    file = resources.files("ep_moe.kernels") / "tuned" / f"{arch}.json"
    return read_table(file.read_text(), file.name) if file.is_file() else []


def _distance(a: Product, b: Product) -> float:
    return sum(_doublings(m, n) for m, n in zip(a[2:], b[2:], strict=True))


def _doublings(m: int, n: int) -> float:
    return abs(log2(max(m, 1) / max(n, 1)))
