"""What a training loop needs around the layer: DDP's ignore list, clipping, checkpoints."""

from ep_moe.training.balance_hook import balance_hook
from ep_moe.training.checkpoint import load_checkpoint, save_checkpoint
from ep_moe.training.ddp import ddp_ignore
from ep_moe.training.norms import clip_grad_norm_

__all__ = [
    "balance_hook",
    "clip_grad_norm_",
    "ddp_ignore",
    "load_checkpoint",
    "save_checkpoint",
]
