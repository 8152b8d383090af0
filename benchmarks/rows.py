"""What the records say, a row for each implementation in each case of the latest runs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.records import Record

OURS = "ep_moe"
VARIANT = f"{OURS}, "  # an implementation so named is ours with another option, and no competitor
CEILING = "ceiling"  # an implementation so named, or `ceiling: ...`, is a bound and no competitor
UNEVEN = ("max_vio", "busiest_rank")  # of a case: what its tokens turned out to be
_TIMING = (
    "method",
    "window_ms",
    "rest_ms",
    "rounds",
)  # how a case was timed, rather than what it is


@dataclass(frozen=True)
class Row:
    """What one run measured of one implementation in one case.

    metrics   name -> (value, unit)
    ceilings  what this run found the machine able to do in equal windows; empty if it did not look
    source    any of the records
    """

    case: dict[str, Any]
    impl: str
    metrics: dict[str, tuple[float, str]]
    ceilings: dict[str, tuple[float, str]]
    source: Record

    @property
    def time_ms(self) -> float | None:
        return self.metrics["time"][0] if "time" in self.metrics else None


def latest_rows(records: Sequence[Record]) -> list[Row]:
    """The rows of the latest run of each (bench, device, case), in the order of their records."""
    latest: dict[tuple[str, ...], tuple[str, str]] = {}
    ceilings: dict[tuple[str, str], dict[str, tuple[float, str]]] = {}
    for r in records:
        place = (r.bench, r.device, key_of(r.case))
        latest[place] = max(latest.get(place, ("", "")), (r.date, r.run))
        if r.impl == CEILING:
            ceilings.setdefault((r.run, key_of(timing_of(r.case))), {})[r.metric] = (
                r.value,
                r.unit,
            )
    rows: dict[tuple[str, ...], Row] = {}
    for r in records:
        place = (r.bench, r.device, key_of(r.case))
        if r.impl == CEILING or latest[place] != (r.date, r.run):
            continue
        bounds = ceilings.get((r.run, key_of(timing_of(r.case))), {})
        row = rows.setdefault((*place, r.impl), Row(r.case, r.impl, {}, bounds, r))
        row.metrics[r.metric] = (r.value, r.unit)
    return list(rows.values())


def varying(rows: Sequence[Row]) -> list[str]:
    """The case keys that do not have one value in all rows."""
    keys = dict.fromkeys(key for row in rows for key in row.case)
    return [key for key in keys if len({json.dumps(row.case.get(key)) for row in rows}) > 1]


def of_model(rows: Sequence[Row]) -> list[str]:
    """Case keys whose values differ with the model alone, where there are several."""

    def values(row: Row, key: str) -> str:
        return text_of(row.case.get(key))

    models = {values(row, "model") for row in rows}
    return [
        key
        for key in varying(rows)
        if key != "model"
        and len({(values(row, "model"), values(row, key)) for row in rows}) == len(models) > 1
    ]


def words(case: Mapping[str, Any]) -> str:
    """`tokens 64, dtype bfloat16`"""
    return ", ".join(f"{key} {text_of(value)}" for key, value in case.items())


def timing_of(case: Mapping[str, Any]) -> dict[str, Any]:
    return {key: case[key] for key in _TIMING if key in case}


def key_of(case: Mapping[str, Any]) -> str:
    return json.dumps(case, sort_keys=True)


def text_of(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """Three digits that mean something: 0.0123, 1.23, 123, 12,345"""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
