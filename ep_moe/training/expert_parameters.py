"""Which parameters of a model are experts, and over which ranks they are spread."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from ep_moe.experts import Experts
from ep_moe.parallel import ExpertParallel


class ExpertParameter(NamedTuple):
    name: str
    parameter: nn.Parameter
    ep: ExpertParallel


def expert_parameters(model: nn.Module) -> Iterator[ExpertParameter]:
    """Every expert parameter by its fully qualified name; dimension 0 of each is the local
    expert."""
    for prefix, module in model.named_modules():
        if isinstance(module, Experts):
            for name, parameter in module.named_parameters(recurse=False):
                yield ExpertParameter(f"{prefix}.{name}" if prefix else name, parameter, module.ep)
