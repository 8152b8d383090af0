"""Who goes where: selection, the router module, balance losses and figures, forced routings for
benchmarks.

Nothing here knows about ranks.
"""

from ep_moe.routing.balance import (
    aux_loss,
    count_tokens,
    dead_experts,
    max_vio,
    total_aux,
    z_loss,
)
from ep_moe.routing.router import Router
from ep_moe.routing.selection import dense_probabilities, grouped_topk, select_experts

__all__ = [
    "Router",
    "aux_loss",
    "count_tokens",
    "dead_experts",
    "dense_probabilities",
    "grouped_topk",
    "max_vio",
    "select_experts",
    "total_aux",
    "z_loss",
]
