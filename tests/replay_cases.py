"""Two layers called in several ways, checkpointed or not, and what comes out."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import ep_moe
from tests.helpers import small_config

AUX = {"aux_loss_coef": 0.1, "z_loss_coef": 0.1}
CONFIGS = {
    "plain": {},
    "micro-batch": AUX,
    "sequence": {**AUX, "aux_loss_scope": "sequence"},
    "global": {**AUX, "aux_loss_scope": "global"},
    "DeepSeek-V3": {
        "scoring_func": "sigmoid",
        "num_expert_group": 4,
        "topk_group": 2,
        "group_score": "top2_sum",
        "expert_bias": True,
    },
    "dropping": {"capacity_factor": 0.75, "capacity_policy": "probability", **AUX},
    "rerouting": {"capacity_factor": 1.0, "capacity_policy": "reroute"},
}


INPUTS = {
    "random": torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(3)).double(),
    "all ties": torch.zeros(2, 7, 16, dtype=torch.float64),
    "no tokens": torch.zeros(2, 0, 16, dtype=torch.float64),
}


def two_layers(ep=None, **changes):
    """They end in combine: nothing behind it hides where a recomputation stops."""
    torch.manual_seed(0)  # the same on all ranks
    return nn.ModuleList([ep_moe.MoELayer(small_config(**changes), ep=ep) for _ in "ab"]).double()


def through(layers, x):
    """y of one layer after the other, and the sum of their losses."""
    losses = 0.0
    for layer in layers:
        x, stats = layer(x)
        losses = losses + stats.aux_loss + stats.z_loss
    return x, losses


def plainly(layers, x, recompute):
    return through(layers, x)


def as_one_block(layers, x, recompute):
    return recompute(partial(through, layers), x)


def layer_by_layer(layers, x, recompute):
    x, first = recompute(partial(through, layers[:1]), x)
    y, second = recompute(partial(through, layers[1:]), x)
    return y, first + second


def nested(layers, x, recompute):
    return recompute(partial(layer_by_layer, layers, recompute=recompute), x)


def twice_nested(layers, x, recompute):
    return recompute(partial(nested, layers, recompute=recompute), x)


BLOCKS = (as_one_block, layer_by_layer, nested, twice_nested)
REPLAYING = partial(checkpoint, use_reentrant=False, context_fn=ep_moe.replay())
DECIDING_AGAIN = partial(checkpoint, use_reentrant=False)


def results(layers, x, block, recompute=REPLAYING):
    """y, then every gradient."""
    x = x.clone().requires_grad_()
    y, losses = block(layers, x, recompute=recompute)
    d_y = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad((y * d_y).sum() + losses, [x, *layers.parameters()])]
