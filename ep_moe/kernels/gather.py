"""Copy arrived rows into packed order."""

import triton
import triton.language as tl
from torch import Tensor

from ep_moe.kernels.launch import bound, cdiv, next_power_of_2

ROWS, COLUMNS = 4, 1024


def gather(
    rows: Tensor,
    arrived_of_packed: Tensor,
    offsets: Tensor,
    *,
    first: int = 0,
    into: Tensor | None = None,
) -> Tensor:
    """rows (A,H), arrived_of_packed (S,) -> (S,H) contiguous; of the first offsets[-1] of them
    those are written whose index is one of `first` to `first` + A - 1."""
    rows = rows.contiguous()
    slots, width = arrived_of_packed.shape[0], rows.shape[1]
    packed = rows.new_empty(slots, width) if into is None else into
    columns = min(COLUMNS, next_power_of_2(width))
    if slots:
        grid = (cdiv(slots, ROWS), cdiv(width, columns), 1)
        constants = {"H": width, "ROWS": ROWS, "COLUMNS": columns}
        numbers = (offsets.shape[0] - 1, first, rows.shape[0])
        _gather(grid, (rows, arrived_of_packed, offsets, packed), numbers, constants)
    return packed


@bound
@triton.jit(do_not_specialize=["last", "first", "number"])
def _gather(
    rows,
    arrived_of_packed,
    offsets,
    packed,
    last,
    first,
    number,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Grid (blocks of packed rows, blocks of columns)."""
    s = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    owned = s < tl.load(offsets + last)
    arrived = tl.load(arrived_of_packed + s, mask=owned, other=0) - first
    here = owned & (arrived >= 0) & (arrived < number)
    mask = here[:, None] & (c < H)[None, :]
    block = tl.load(rows + arrived.to(tl.int64)[:, None] * H + c[None, :], mask=mask)
    tl.store(packed + s.to(tl.int64)[:, None] * H + c[None, :], block, mask=mask)
