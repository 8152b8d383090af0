"""Work in CUDA graphs, held to what it does without one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Work = Callable[[], tuple[Tensor, ...]]


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]
    work: Work


def capture(work: Work, **how: Any) -> Captured:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **how):
        outputs = work()
    return Captured(graph, outputs, work)


def replayed(graphs: Sequence[Captured], x: Tensor) -> list[bool]:
    """Whether each output is what the work gives, bit for bit, with other tokens in x each time: in
    two rounds, in each of which the first graph comes twice in a row."""
    same = []
    for graph, outputs, work in [graphs[0], *graphs] * 2:
        with torch.no_grad():
            x.normal_()
        graph.replay()
        found = [value.clone() for value in outputs]
        same += [torch.equal(*pair) for pair in zip(found, work(), strict=True)]
    return same
