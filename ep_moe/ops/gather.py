"""Copy arrived rows into packed order. Its adjoint is `weighted_sum` without gates."""

from torch import Tensor

from ep_moe.ops.numerics import served_by_kernel


def gather(rows: Tensor, arrived_of_packed: Tensor, offsets: Tensor) -> Tensor:
    """packed[s] = rows[arrived_of_packed[s]] for s < offsets[-1].

    rows (A,H), arrived_of_packed (S,) int32 -> (S,H)
    """
    if served_by_kernel(rows):
        from ep_moe.kernels.gather import gather as kernel

        return kernel(rows, arrived_of_packed, offsets)
    return rows.index_select(0, arrived_of_packed)
