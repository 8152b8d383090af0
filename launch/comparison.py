"""Two runs beside each other at the last step at which both looked at the held-out text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from run_folder import read_metrics

from ep_moe.errors import ConfigError

Metrics = Mapping[str, Sequence[Mapping[str, Any]]]  # by kind

# No differences: what a run is called, where it is kept, what is shown of it, when it ends.
_NO_DIFFERENCE = ("name", "runs_dir", "compare_with", "tensorboard", "report", "stop_after")


class Run(NamedTuple):
    """What a finished run left behind."""

    name: str
    metrics: Metrics
    config: Mapping[str, Any]


class Difference(NamedTuple):
    """A field of the config with its value here and there."""

    field: str
    here: Any
    there: Any


def read_run(path: Path, *, field: str = "run") -> Run:
    """Raises ConfigError, in the name of `field`, when the folder does not hold a finished run."""
    files = [path / name for name in ("config.yaml", "metrics.jsonl")]
    if not all(file.is_file() for file in files) or "final" not in read_metrics(path):
        raise ConfigError(field, path.name, f"the name of a finished run in {path.parent}")
    return Run(path.name, read_metrics(path), yaml.safe_load(files[0].read_text()))


def read_runs(path: Path) -> list[Run]:
    """The finished run in the folder `path`, and the one that it is compared with, if any."""
    run = read_run(path)
    other = run.config["compare_with"]
    return [run, read_run(path.parent / other)] if other else [run]


def last_common_step(here: Metrics, there: Metrics) -> int | None:
    """None when the held-out text was never read at the same step."""
    ours, theirs = ({line["step"] for line in metrics["held_out"]} for metrics in (here, there))
    return max(ours & theirs, default=None)


def figures_at(step: int, metrics: Metrics) -> dict[str, Any]:
    """The training figures at a step, and `held_out_loss`."""

    def line(kind: str) -> Mapping[str, Any]:
        return next(line for line in metrics[kind] if line["step"] == step)

    return {**line("train"), "held_out_loss": line("held_out")["loss"]}


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[Difference]:
    """Fields of two configs that hold other values, by dotted names."""
    ours, theirs = _flat(here), _flat(there)
    return [
        Difference(name, ours.get(name), theirs.get(name))
        for name in dict.fromkeys([*ours, *theirs])
        if name not in _NO_DIFFERENCE and ours.get(name) != theirs.get(name)
    ]


def summary(here: Run, there: Run) -> str:
    """One line for the end of a run."""
    changes = "; ".join(
        f"{d.field} {d.there}, here {d.here}" for d in differences(here.config, there.config)
    )
    step = last_common_step(here.metrics, there.metrics)
    beside = f"beside {there.name} ({changes})"
    if step is None:
        return f"{beside}: no step at which both looked at the held-out text"
    ours, theirs = (figures_at(step, run.metrics) for run in (here, there))
    return f"{beside}, at step {step}: " + ", ".join(
        f"{label} {ours[name]:{digits}} instead of {theirs[name]:{digits}}"
        for name, label, digits in (
            ("max_vio", "MaxVio", ".2f"),
            ("held_out_loss", "held-out loss", ".3f"),
        )
    )


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
