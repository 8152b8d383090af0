"""Keep DistributedDataParallel's hands off the experts: each rank has its own, and DDP would
average them away."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ep_moe.training.expert_parameters import expert_parameters


def ddp_ignore(model: nn.Module) -> nn.Module:
    """Call before `DistributedDataParallel(model)`. Returns the model.

    DDP's broadcast names a parameter on its root `w`, its reducer `.w`; the list holds both forms.
    """
    names = [e.name for e in expert_parameters(model) if e.ep.size > 1 or e.ep.replicas]
    names += [f".{name}" for name in names if "." not in name]
    names += getattr(model, "_ddp_params_and_buffers_to_ignore", [])  # somebody else's
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    return model
