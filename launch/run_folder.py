"""runs/<name>/: what a run leaves behind.

config.yaml      the resolved config; `--config` reads it back
metrics.jsonl    one JSON object a line: kind (start, train, held_out, stages, final), step, ...
events.out.*     the same numbers for TensorBoard
routing.npz      with record_routing: which experts each token went to, for ep_moe.traces
checkpoint/      written by the trainer, sharded over the ranks
report.html      made by report.py from config.yaml and metrics.jsonl, also of the compared run
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ep_moe.errors import BackendUnavailable, ConfigError


class RunFolder:
    """The folder of one run. Every rank knows its path; the one with `writes` makes and fills it.

    Raises ConfigError when the folder exists and config.overwrite is False, BackendUnavailable
    when config.tensorboard asks for what is not installed.
    """

    def __init__(self, config: Any, *, writes: bool) -> None:
        self.path = path = Path(config.runs_dir) / config.name
        self._metrics = self._events = None
        if not writes:
            return
        if path.exists() and not config.overwrite:
            rule = f"a new name, as {path} exists (--overwrite=true replaces that run)"
            raise ConfigError("name", config.name, rule)
        writer = _summary_writer() if config.tensorboard else None
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        # Overwriting is asked for each time, never read back from the file.
        values = asdict(config) | {"overwrite": False}
        (path / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        self._metrics = (path / "metrics.jsonl").open("w", buffering=1)  # line by line: kill-proof
        self._events = writer(str(path)) if writer else None

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write one line of metrics.jsonl; its numbers go to TensorBoard as well."""
        if self._metrics is None:
            return
        self._metrics.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        if self._events is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush and close the files."""
        for file in (self._metrics, self._events):
            if file is not None:
                file.close()


def read_metrics(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of a run's metrics.jsonl by kind."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for line in (path / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        by_kind.setdefault(values.pop("kind"), []).append(values)
    return by_kind


def _summary_writer() -> type:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        rule = "install ep-moe[train], or pass --tensorboard=false"
        raise BackendUnavailable(f"tensorboard = True needs {error.name}: {rule}") from error
    return SummaryWriter
