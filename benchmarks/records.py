"""What a measurement leaves behind: one JSON object a line in `<results>/<bench>.jsonl`."""

import json
import os
import platform
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ep_moe.host import loaded_nccl
from ep_moe.parallel import Process


@dataclass(frozen=True)
class Record:
    """One number. `case` holds all that was asked for (sizes, how it was timed), `metric` what came
    of it (the median as `time`, its spread as `time_min` and `time_max`): equal cases compare.

    run: the process that measured it; numbers of different runs do not compare.
    """

    bench: str
    impl: str
    case: dict[str, Any]
    metric: str
    value: float
    unit: str
    device: str
    versions: dict[str, str]
    commit: str
    date: str
    run: str


@dataclass(frozen=True)
class Recorder:
    """Appends the records of one run, on rank 0 only."""

    results: Path
    writes: bool
    device: str
    versions: dict[str, str]
    commit: str
    date: str
    run: str

    @classmethod
    def start(
        cls, results: str | Path, process: Process, *, packages: Sequence[str] = ()
    ) -> "Recorder":
        """packages: distributions whose versions matter, besides python, torch, CUDA, NCCL and
        triton."""
        now = datetime.now(UTC)
        return cls(
            results=Path(results),
            writes=process.rank == 0,
            device=device_name(process.device),
            versions=_versions(packages),
            commit=_commit(),
            date=now.isoformat(timespec="seconds"),
            run=f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(2)}",
        )

    def add(
        self,
        bench: str,
        impl: str,
        case: Mapping[str, Any],
        metrics: Mapping[str, tuple[float, str]],
    ) -> None:
        """One record per metric, given as name -> (value, unit). Raises ValueError for a value that
        is not finite."""
        if not self.writes:
            return
        origin = (self.device, self.versions, self.commit, self.date, self.run)
        lines = []
        for metric, (value, unit) in metrics.items():
            record = Record(bench, impl, dict(case), metric, value, unit, *origin)
            lines.append(json.dumps(asdict(record), allow_nan=False) + "\n")
        self.results.mkdir(parents=True, exist_ok=True)
        with (self.results / f"{bench}.jsonl").open("a") as file:
            file.writelines(lines)

    def written(self, bench: str) -> list[Record]:
        """What this run has recorded of a bench so far."""
        path = self.results / f"{bench}.jsonl"
        return [r for r in read_records(path) if r.run == self.run] if path.exists() else []


def read_records(path: Path) -> list[Record]:
    """All records of one file. Raises ValueError naming the line that is not a record."""
    expected = {f.name for f in fields(Record)}
    records = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        values = json.loads(line)
        if set(values) != expected:
            got, rule = sorted(values), sorted(expected)
            raise ValueError(f"{path}:{number} has the keys {got}, but a record has {rule}")
        records.append(Record(**values))
    return records


def device_name(device: torch.device) -> str:
    """The GPU's name; of a CPU its model and the threads that torch uses on each rank."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    threads = torch.get_num_threads()
    return f"{models[0] if models else platform.machine()}, {threads} thread(s) per rank"


def _versions(packages: Sequence[str]) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda and torch.cuda.is_available():
        versions["cuda"] = torch.version.cuda
        versions["nccl"] = loaded_nccl() or "none"
    for name in ("triton", *packages):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # not installed: it had no part in the numbers
    return versions


def _commit() -> str:
    """The commit measured, `-dirty` with changes outside the results; EP_MOE_COMMIT, where it is
    set, for a copy that has left its repository."""
    if given := os.environ.get("EP_MOE_COMMIT"):
        return given

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        changes = git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changes else head
