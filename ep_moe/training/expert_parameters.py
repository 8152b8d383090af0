"""Which parameters of a model are experts, and over which ranks they are spread."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from ep_moe.experts import Experts
from ep_moe.parallel import ExpertParallel


class ExpertParameter(NamedTuple):
    name: str
    parameter: nn.Parameter
    experts: Experts

    @property
    def ep(self) -> ExpertParallel:
        return self.experts.ep


def expert_parameters(model: nn.Module) -> Iterator[ExpertParameter]:
    """Every expert parameter by its fully qualified name, all its names when layers share it;
    dimension 0 of each is the local expert."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Experts):
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                yield ExpertParameter(f"{prefix}.{name}" if prefix else name, parameter, module)


def distinct_expert_parameters(model: nn.Module) -> list[ExpertParameter]:
    """Each once, by one of its names, for what must not happen to it twice."""
    return list({id(e.parameter): e for e in expert_parameters(model)}.values())
