"""ep_moe: an expert-parallel Mixture-of-Experts runtime for PyTorch."""

from ep_moe.config import MoEConfig, SelectionConfig
from ep_moe.dispatch import make_transport
from ep_moe.errors import (
    BackendUnavailable,
    CallMismatch,
    ConfigError,
    DispatchTimeout,
    InputError,
    PeerLost,
    RecomputationMismatch,
    ReentrantCheckpoint,
    SplitMismatch,
)
from ep_moe.experts import Experts
from ep_moe.layer import MoELayer, moe
from ep_moe.parallel import ExpertParallel, Process, init_process
from ep_moe.replay import RoutingRecord, record_routing, replay, replay_routing
from ep_moe.routing import (
    busiest_rank,
    dead_experts,
    dropped_share,
    grouped_topk,
    load_change,
    max_vio,
    select_experts,
    total_aux,
)
from ep_moe.training import (
    balance_hook,
    clip_grad_norm_,
    ddp_ignore,
    load_checkpoint,
    save_checkpoint,
    sync_expert_grads,
)
from ep_moe.types import Routing, RoutingStats

__all__ = [
    "BackendUnavailable",
    "CallMismatch",
    "ConfigError",
    "DispatchTimeout",
    "ExpertParallel",
    "Experts",
    "InputError",
    "MoEConfig",
    "MoELayer",
    "PeerLost",
    "Process",
    "RecomputationMismatch",
    "ReentrantCheckpoint",
    "Routing",
    "RoutingRecord",
    "RoutingStats",
    "SelectionConfig",
    "SplitMismatch",
    "balance_hook",
    "busiest_rank",
    "clip_grad_norm_",
    "ddp_ignore",
    "dead_experts",
    "dropped_share",
    "grouped_topk",
    "init_process",
    "load_change",
    "load_checkpoint",
    "make_transport",
    "max_vio",
    "moe",
    "record_routing",
    "replay",
    "replay_routing",
    "save_checkpoint",
    "select_experts",
    "sync_expert_grads",
    "total_aux",
]
