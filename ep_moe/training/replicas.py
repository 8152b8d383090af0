"""Experts that several ranks hold a copy of (expert parallel x data parallel)."""

import torch
import torch.distributed as dist
from torch import nn

from ep_moe.training.expert_parameters import distinct_expert_parameters


@torch.no_grad()
def sync_expert_grads(model: nn.Module) -> None:
    """After backward, before clipping: reduce the experts' gradients over their replicas, as DDP
    does for the dense part. Does nothing for layers whose `ep` is not a two-dimensional DeviceMesh.

    loss_reduction mean averages, sum adds. All ranks must call it; trainable experts whose backward
    never ran on this rank take part with zeros.
    """
    for _, parameter, experts in distinct_expert_parameters(model):
        replicas = experts.ep.replicas
        if replicas is None or not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=replicas)
        if experts.config.loss_reduction == "mean":
            parameter.grad /= replicas.size()
