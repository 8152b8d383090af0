"""A routing trace: where the tokens of a real training run went, in a file small enough to commit.

Balanced random routing hides every problem of expert parallelism, so benchmarks replay these.
`launch/train_lm.py --record_routing.steps '[...]'` writes them.
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ep_moe.errors import InputError
from ep_moe.types import Routing

_FORMAT = 1
_HEADER = ("format", "num_experts", "top_k", "steps", "layers", "tokens_per_step", "origin")


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """S optimizer steps of L layers, each with the T tokens of all ranks, in rank order.

    num_experts   E
    steps         numbers of the recorded optimizer steps, (S)
    layers        numbers of the recorded layers in their model, from 0, (L)
    ids           (S,L,T,K), of `ids_dtype(E)`; -1 = the choice went nowhere (padding, dropped)
    gate_weights  (S,L,T,K) fp16: three digits, enough for timing and no reference for numerics
    hidden        (S,L,T,H) fp16, what the router saw; None = not recorded
    origin        what made it: device, corpus, commit, versions; plain JSON values
    """

    num_experts: int
    steps: tuple[int, ...]
    layers: tuple[int, ...]
    ids: Tensor
    gate_weights: Tensor
    hidden: Tensor | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> int:
        """T"""
        return self.ids.shape[2]

    @property
    def top_k(self) -> int:
        """K"""
        return self.ids.shape[3]

    def routing(self, step: int, layer: int) -> Routing:
        """All tokens of one recorded step and layer, on the CPU."""
        at = (_index("step", step, self.steps), _index("layer", layer, self.layers))
        return Routing(self.ids[at].int(), self.gate_weights[at].float())

    def save(self, path: str | Path) -> None:
        """Write a compressed npz file. Raises InputError as `load` would."""
        self.validate(str(path))
        header = {
            "format": _FORMAT,
            "num_experts": self.num_experts,
            "top_k": self.top_k,
            "steps": self.steps,
            "layers": self.layers,
            "tokens_per_step": self.tokens_per_step,
            "origin": self.origin,
        }
        arrays: dict[str, Any] = {"header": np.array(json.dumps(header))}
        for name in ("ids", "gate_weights", "hidden"):
            if (values := getattr(self, name)) is not None:
                arrays[name] = values.numpy()
        np.savez_compressed(path, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> "RoutingTrace":
        """Read and check a file. Raises InputError naming the file, what is wrong in it and what
        would be right."""
        rule = "a routing trace, as launch/train_lm.py --record_routing.steps writes it"
        with Path(path).open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise InputError(str(path), "no npz file", rule)
            with np.load(file, allow_pickle=False) as arrays:
                found = dict(arrays)
        if missing := [name for name in ("header", "ids", "gate_weights") if name not in found]:
            raise InputError(str(path), f"an npz file without {missing}", rule)
        header = json.loads(str(found["header"]))
        if missing := [name for name in _HEADER if name not in header]:
            raise InputError(f"{path}: header", f"without {missing}", f"of {list(_HEADER)}")
        if header["format"] != _FORMAT:
            raise InputError(f"{path}: format", header["format"], f"{_FORMAT}: record it again")
        trace = cls(
            num_experts=header["num_experts"],
            steps=tuple(header["steps"]),
            layers=tuple(header["layers"]),
            ids=torch.from_numpy(found["ids"]),
            gate_weights=torch.from_numpy(found["gate_weights"]),
            hidden=torch.from_numpy(found["hidden"]) if "hidden" in found else None,
            origin=header["origin"],
        )
        sizes = [len(trace.steps), len(trace.layers), header["tokens_per_step"], header["top_k"]]
        _require_shape(f"{path}: ids", trace.ids, sizes)
        trace.validate(str(path))
        return trace

    def validate(self, name: str = "routing trace") -> None:
        """Refuse what no router of `num_experts` experts gives. Raises InputError."""
        sizes = [len(self.steps), len(self.layers), *self.ids.shape[2:]]
        _require_shape(f"{name}: ids", self.ids, sizes)
        _require_shape(f"{name}: gate_weights", self.gate_weights, sizes)
        dtypes = {"ids": ids_dtype(self.num_experts), "gate_weights": torch.float16}
        if self.hidden is not None:
            _require_shape(f"{name}: hidden", self.hidden, [*sizes[:3], self.hidden.shape[-1]])
            dtypes["hidden"] = torch.float16
        for part, dtype in dtypes.items():
            values = getattr(self, part)
            if values.dtype != dtype:
                raise InputError(f"{name}: {part}", values.dtype, str(dtype))
            if not values.isfinite().all():
                rule = "finite in fp16, whose largest value is 65,504"
                raise InputError(f"{name}: {part}", "not finite everywhere", rule)
        if not self.ids.numel():
            raise InputError(f"{name}: ids", f"empty, {sizes}", "at least one token")
        low, high = int(self.ids.min()), int(self.ids.max())
        if low < -1 or high >= self.num_experts:
            rule = f"-1 (nowhere) or 0 to {self.num_experts - 1}"
            raise InputError(f"{name}: ids", f"between {low} and {high}", rule)
        ordered = self.ids.sort(dim=-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if twice.any():
            s, layer, t = twice.any(dim=-1).nonzero()[0].tolist()
            where = f"step {self.steps[s]}, layer {self.layers[layer]}, token {t}"
            got = f"{self.ids[s, layer, t].tolist()} at {where}"
            raise InputError(f"{name}: ids", got, "distinct experts in each token")


def ids_dtype(num_experts: int) -> torch.dtype:
    """The smallest signed type that holds the ids of so many experts, and -1."""
    for dtype in (torch.int8, torch.int16):
        if num_experts - 1 <= torch.iinfo(dtype).max:
            return dtype
    return torch.int32


def _index(what: str, number: int, recorded: Sequence[int]) -> int:
    if number not in recorded:
        raise InputError(what, number, f"one that the trace holds: {list(recorded)}")
    return recorded.index(number)


def _require_shape(name: str, values: Tensor, shape: Sequence[int]) -> None:
    if values.ndim != 4 or list(values.shape) != list(shape):
        got = f"of shape {tuple(values.shape)}"
        raise InputError(name, got, f"{tuple(shape)}: steps, layers, tokens, last dimension")
