"""Copy arrived rows into packed order. Its adjoint is `weighted_sum` without gates."""

from torch import Tensor

from ep_moe.ops.numerics import served_by_kernel


def gather(
    rows: Tensor,
    arrived_of_packed: Tensor,
    offsets: Tensor,
    *,
    first: int = 0,
    into: Tensor | None = None,
) -> Tensor:
    """packed[s] = rows[arrived_of_packed[s] - first] for s < offsets[-1].

    rows (A,H), arrived_of_packed (S,) int32 -> (S,H); written to `into` (S,H) where given, of rows'
    dtype and contiguous, which keeps what no row here is for: rows may be a piece, from row `first`
    on, of more that are gathered.

    rows [[5],[6]] from row 2 on, arrived_of_packed [3,0,2] -> into [[6],[as it was],[5]]
    """
    if served_by_kernel(rows):
        from ep_moe.kernels.gather import gather as kernel

        return kernel(rows, arrived_of_packed, offsets, first=first, into=into)
    if into is None:
        return rows.index_select(0, arrived_of_packed - first)
    index = arrived_of_packed - first
    here = (index >= 0) & (index < len(rows))
    into[here] = rows[index[here]]
    return into
