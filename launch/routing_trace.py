"""runs/<name>/routing.npz: which experts each token went to at some steps, for `ep_moe.traces`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ep_moe
from ep_moe.traces import RoutingTrace, ids_dtype


@dataclass(frozen=True, kw_only=True)
class RecordingConfig:
    """Whose routing is written to routing.npz.

    Args:
        steps: optimizer steps; none = no recording
        layers: from 0; none = all
        hidden: also the hidden states that the router saw, 2 bytes a number
    """

    steps: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    hidden: bool = False


class RoutingRecorder:
    """Records the chosen steps of a run that goes through `steps`. Every rank has one and calls it
    alike; rank 0 keeps all ranks' tokens.

    Raises ConfigError for steps or layers that the run does not have.
    """

    def __init__(
        self,
        config: RecordingConfig,
        layers: Sequence[ep_moe.MoELayer],
        process: ep_moe.Process,
        steps: range,
    ) -> None:
        self.config, self.process = config, process
        rule = f"among the steps of this run, {steps.start} to {steps.stop - 1}, each once"
        _require_among("record_routing.steps", config.steps, steps, rule)
        rule = f"among the model's layers, 0 to {len(layers) - 1}, each once"
        _require_among("record_routing.layers", config.layers, range(len(layers)), rule)
        chosen = sorted(config.layers) or range(len(layers))
        self.layers = {number: layers[number] for number in chosen}
        self.parts: list[dict[str, Tensor]] = []  # one a recorded step, each value (L,T,...)

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Inside, each layer is called once. Nothing happens at a step that was not chosen."""
        if step not in self.config.steps:
            yield
            return
        seen: dict[int, dict[str, Tensor]] = {}
        hooks = [
            layer.router.register_forward_hook(self._keep_in(seen, number))
            for number, layer in self.layers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        mine = [seen[number] for number in self.layers]
        part = {name: self._gather(torch.stack([s[name] for s in mine])) for name in mine[0]}
        if self.process.rank == 0:
            self.parts.append(part)

    def write(self, path: Path, origin: dict[str, Any]) -> None:
        """On rank 0, if a step was chosen."""
        if not self.parts:
            return
        (layer, *_) = self.layers.values()
        values = {name: torch.stack([part[name] for part in self.parts]) for name in self.parts[0]}
        RoutingTrace(
            num_experts=layer.config.num_experts,
            steps=tuple(sorted(self.config.steps)),
            layers=tuple(self.layers),
            ids=values["ids"].to(ids_dtype(layer.config.num_experts)),
            gate_weights=values["gate_weights"],
            hidden=values.get("hidden"),
            origin=origin,
        ).save(path)

    def _keep_in(self, seen: dict[int, dict[str, Tensor]], number: int) -> Any:
        def keep(router: torch.nn.Module, inputs: Any, output: Any) -> None:
            routing, _ = output
            seen[number] = {"ids": routing.ids, "gate_weights": routing.gate_weights.half()}
            if self.config.hidden:
                seen[number]["hidden"] = inputs[0].half()

        return torch.no_grad()(keep)

    def _gather(self, mine: Tensor) -> Tensor:
        """(L,T,...) of this rank -> on rank 0 (L,W*T,...), in rank order, on the CPU"""
        if self.process.group is None:
            return mine.cpu()
        ranks = range(self.process.world_size)
        all_ranks = [torch.empty_like(mine) for _ in ranks] if self.process.rank == 0 else None
        dist.gather(mine, all_ranks, group=self.process.group, group_dst=0)
        return torch.cat(all_ranks, dim=1).cpu() if all_ranks else mine


def _require_among(name: str, chosen: Sequence[int], accepted: range, rule: str) -> None:
    if len(set(chosen)) < len(chosen) or not set(chosen) <= set(accepted):
        raise ep_moe.ConfigError(name, chosen, rule)
