"""The table of where a step's time goes, from what `ep_moe.measure.profile_stages` measured."""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# The layer's own stages; permute (pack, gather, weighted sum) is the part of experts that only
# moves rows within the rank.
STAGES = ("route", "dispatch", "experts", "combine")
PERMUTE = "experts/permute"
REST = "rest of the step"


class StageRow(NamedTuple):
    """One line of the table: milliseconds per step, and the share of the step."""

    stage: str
    forward: float
    backward: float
    share: float

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def median_times(samples: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each range over several profiled steps; {} when there are none."""
    names = samples[0] if samples else ()
    return {name: statistics.median(sample[name] for sample in samples) for name in names}


def stage_rows(times: Mapping[str, float]) -> list[StageRow]:
    """The stages of all layers, then the rest: attention, optimizer, gradient all-reduce ..."""

    def row(label: str, stage: str) -> StageRow:
        forward, backward = _both_ways(times, stage)
        return StageRow(label, forward, backward, (forward + backward) / times["total"])

    rows = [row(stage, stage) for stage in STAGES]
    rest = times["total"] - sum(r.total for r in rows)
    rows.insert(STAGES.index("experts") + 1, row("of it permute", PERMUTE))
    return [*rows, StageRow(REST, rest, 0.0, rest / times["total"])]


def permute_share(times: Mapping[str, float]) -> float:
    """Of the experts' time, the part that moves rows instead of multiplying them."""
    return sum(_both_ways(times, PERMUTE)) / sum(_both_ways(times, "experts"))


def _both_ways(times: Mapping[str, float], stage: str) -> tuple[float, float]:
    backward = "/".join(f"{part}_backward" for part in stage.split("/"))
    return times[stage], times[backward]


def format_stages(times: Mapping[str, float]) -> str:
    """The table as text."""
    lines = [f"{'ms per step':<18}{'forward':>9}{'backward':>10}{'both':>9}{'share':>8}"]
    for row in stage_rows(times):
        ways = f"{row.forward:9.2f}{row.backward:10.2f}" if row.stage != REST else " " * 19
        lines.append(f"{row.stage:<18}{ways}{row.total:9.2f}{row.share:8.1%}")
    share = f"permute takes {permute_share(times):.1%} of the experts"
    return "\n".join([*lines, f"{'profiled step':<37}{times['total']:9.2f}; {share}"])
