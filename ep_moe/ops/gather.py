"""Copy arrived rows into packed order, and its adjoint."""

from torch import Tensor

from ep_moe.ops.numerics import served_by_kernel
from ep_moe.ops.weighted_sum import weighted_sum


def gather(rows: Tensor, arrived_of_packed: Tensor, offsets: Tensor) -> Tensor:
    """packed[s] = rows[arrived_of_packed[s]] for s < offsets[-1].

    rows (A,H), arrived_of_packed (S,) int32 -> (S,H)
    """
    if served_by_kernel(rows):
        from ep_moe.kernels.gather import gather as kernel

        return kernel(rows, arrived_of_packed, offsets)
    return rows.index_select(0, arrived_of_packed)


def gather_backward(d_packed: Tensor, packed_of_arrived: Tensor) -> Tensor:
    """d_rows[a] = sum_k d_packed[packed_of_arrived[a,k]], in k order.  (S,H), (A,K) int32 ->
    (A,H)"""
    return weighted_sum(d_packed, None, packed_of_arrived)
