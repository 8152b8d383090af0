"""Who goes where: selection, the router module, balance losses and figures, forced routings for
benchmarks.

Nothing here knows about ranks.
"""

from ep_moe.ops import dense_probabilities
from ep_moe.routing.balance import (
    aux_loss,
    busiest_rank,
    count_tokens,
    dead_experts,
    dropped_share,
    load_change,
    max_vio,
    total_aux,
    updated_bias,
    z_loss,
)
from ep_moe.routing.capacity import Admitted, admit, expert_capacity
from ep_moe.routing.router import Router
from ep_moe.routing.selection import Choice, grouped_topk, select_experts

__all__ = [
    "Admitted",
    "Choice",
    "Router",
    "admit",
    "aux_loss",
    "busiest_rank",
    "count_tokens",
    "dead_experts",
    "dense_probabilities",
    "dropped_share",
    "expert_capacity",
    "grouped_topk",
    "load_change",
    "max_vio",
    "select_experts",
    "total_aux",
    "updated_bias",
    "z_loss",
]
