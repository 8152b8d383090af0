"""Experts that several ranks hold a copy of (expert parallel x data parallel)."""

import torch
import torch.distributed as dist
from torch import nn

from ep_moe.experts import Experts


@torch.no_grad()
def sync_expert_grads(model: nn.Module) -> None:
    """After backward, before clipping: reduce the experts' gradients over their replicas, as DDP
    does for the dense part. Does nothing for layers whose `ep` is not a two-dimensional DeviceMesh.

    loss_reduction mean averages, sum adds. All ranks must call it; trainable experts whose backward
    never ran on this rank take part with zeros.
    """
    for module in model.modules():
        if not isinstance(module, Experts) or module.ep.replicas is None:
            continue
        for parameter in module.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=module.ep.replicas)
            if module.config.loss_reduction == "mean":
                parameter.grad /= module.ep.replicas.size()
