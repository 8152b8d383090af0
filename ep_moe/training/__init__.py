"""What a training loop needs around the layer: DDP's ignore list, clipping, checkpoints."""

from ep_moe.training.balance_hook import balance_hook
from ep_moe.training.checkpoint import load_checkpoint, save_checkpoint
from ep_moe.training.ddp import ddp_ignore
from ep_moe.training.norms import clip_grad_norm_
from ep_moe.training.replicas import sync_expert_grads

__all__ = [
    "balance_hook",
    "clip_grad_norm_",
    "ddp_ignore",
    "load_checkpoint",
    "save_checkpoint",
    "sync_expert_grads",
]
