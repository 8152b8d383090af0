"""Tables and plots from the records: `python -m benchmarks.report --readme README.md`.

Of each (bench, device, case) the latest run counts, with all that it measured and nothing else:
numbers of different runs do not compare. Where ours is behind, a line under the table says so.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks import wide
from benchmarks.plots import plot
from benchmarks.records import read_records
from benchmarks.rows import (
    CEILING,
    OURS,
    VARIANT,
    Row,
    key_of,
    latest_rows,
    number,
    of_model,
    text_of,
    timing_of,
    varying,
    words,
)
from ep_moe.config import parse_args

_CEILING_OF_UNIT = {"TFLOP/s": "matmul", "TB/s": "copy"}
_KEPT_IN_RECORDS = ("calls",)  # metrics that no table shows
_SECTION = re.compile(r"(<!-- (table|plot):(\w+)([^>]*?) ?-->\n).*?(<!-- /\2:\3 -->)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Tables from the records, printed or put between the markers of a README.

    `<!-- table:layer tokens=4096 device=H200 -->` to `<!-- /table:layer -->` holds the bench
    `layer`: here the rows with that value in their case and that text in their device's name. With
    `layout=wide` it has one line for a number of tokens and a load (`benchmarks.wide`). In the same
    way `<!-- plot:dispatch file=PATH metric=GB/s tokens=4096 -->` draws a picture and shows it.

    Args:
        results: folder of the records, one <bench>.jsonl each
        readme: rewrite the marked sections of this file instead of printing every table, and draw
            the plots that it shows (needs matplotlib, the extra `report`)
        plots: also draw <bench>.<device>.png into this folder, and, of layers beside their parts,
            <bench>_ratio.<device>.png (needs matplotlib, the extra `report`)
    """

    results: str = "benchmarks/results"
    readme: str | None = None
    plots: str | None = None


def table(rows: Sequence[Row]) -> str:
    """Markdown for rows of one bench: for each device what all rows share, the table, and what ours
    loses."""
    devices = dict.fromkeys(row.source.device for row in rows)
    return "\n\n".join(
        _device_table([row for row in rows if row.source.device == device]) for device in devices
    )


def wide_table(rows: Sequence[Row]) -> str:
    """The same for layers that were measured beside their parts, a line for a number of tokens and
    a load; of other rows nothing."""
    by_device: dict[str, list[Row]] = {}
    for row in wide.has_parts(rows):
        by_device.setdefault(row.source.device, []).append(row)
    return "\n\n".join(
        "\n".join([_caption(mine), "", *wide.lines(mine)]) for mine in by_device.values()
    )


def rewrite(text: str, rows_of_bench: Mapping[str, Sequence[Row]], folder: Path) -> str:
    """Fill every marked section, and draw the plots into their files in `folder`. Raises ValueError
    for a marker that matches no row, or a plot that does not name its file."""

    def section(match: re.Match[str]) -> str:
        opening, kind, bench, filters, closing = match.groups()
        wanted = dict(word.split("=", 1) for word in filters.split())
        layout, metric = wanted.pop("layout", "long"), wanted.pop("metric", None)
        file = wanted.pop("file", "")
        rows = [row for row in rows_of_bench.get(bench, ()) if _matches(row, wanted)]
        if layout == "wide":
            rows = wide.has_parts(rows)
        if kind == "plot":
            rows = [row for row in rows if "tokens" in row.case and metric in (None, *row.metrics)]
        if not rows:
            raise ValueError(
                f"{opening.strip()} matches no record; there are records of {sorted(rows_of_bench)}"
            )
        if kind == "plot":
            if not file:
                raise ValueError(f"{opening.strip()} must name a picture, such as file={bench}.svg")
            if len(devices := {row.source.device for row in rows}) > 1:
                raise ValueError(f"{opening.strip()} must say device=, one of {sorted(devices)}")
            plot(rows, folder / file, metric=metric)
            what = " ".join(
                filter(None, [bench, metric, "against tokens per rank:", words(wanted)])
            )
            return f"{opening}\n![{what}]({file})\n\n{closing}"
        made = {"long": table, "wide": wide_table}[layout](rows)
        return f"{opening}\n{made}\n\n{closing}"

    return _SECTION.sub(section, text)


def main(argv: Sequence[str] | None = None) -> None:
    config = parse_args(ReportConfig, argv)
    rows_of_bench = {
        p.stem: latest_rows(read_records(p)) for p in sorted(Path(config.results).glob("*.jsonl"))
    }
    if config.readme:
        readme = Path(config.readme)
        readme.write_text(rewrite(readme.read_text(), rows_of_bench, readme.parent))
    else:
        for bench, rows in rows_of_bench.items():
            print(f"## {bench}\n\n{table(rows)}\n")
            if parts := wide_table(rows):
                print(f"## {bench}, beside its parts\n\n{parts}\n")
    if config.plots:
        folder = Path(config.plots)
        folder.mkdir(parents=True, exist_ok=True)
        for bench, rows in rows_of_bench.items():
            by_device: dict[str, list[Row]] = {}
            for row in rows:
                if "tokens" in row.case:  # the horizontal axis
                    by_device.setdefault(row.source.device, []).append(row)
            for device, mine in by_device.items():
                name = re.sub(r"\W+", "_", device).strip("_")
                plot(mine, folder / f"{bench}.{name}.png")
                if parts := wide.has_parts(mine):
                    plot(parts, folder / f"{bench}_ratio.{name}.png", metric="ratio")


def _device_table(rows: Sequence[Row]) -> str:
    columns = _columns(rows)
    lines = [[heading for heading, _ in columns], ["---"] * len(columns)]
    lines += [[cell(row) for _, cell in columns] for row in rows]
    markdown = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([_caption(rows), "", *markdown, *_losses(rows)])


def _columns(rows: Sequence[Row]) -> list[tuple[str, Callable[[Row], str]]]:
    """(heading, what a row shows there): case values that differ, the implementation, metrics."""
    columns: list[tuple[str, Callable[[Row], str]]] = []
    for key in varying(rows):
        if key in of_model(rows):
            continue
        columns.append((key, lambda row, key=key: text_of(row.case.get(key, ""))))
    columns.append(("implementation", lambda row: row.impl))
    ours = _our_times(rows)
    longest_first = sorted(rows, key=lambda row: -len(row.metrics))  # it has all metrics in order
    units = {name: unit for row in longest_first for name, (_, unit) in row.metrics.items()}
    for metric, unit in units.items():
        if metric in _KEPT_IN_RECORDS or _is_spread(metric):
            continue
        heading = metric if metric == unit else f"{metric}, {unit}"
        columns.append((heading, lambda row, name=metric: _value(row.metrics, name)))
        if metric == "time" and ours and any(row.impl != OURS for row in rows):
            columns.append((f"time / {OURS}'s", partial(_ratio, ours=ours)))
        if bound := _CEILING_OF_UNIT.get(unit):
            columns.append((f"of {bound}", partial(_share_of_ceiling, metric=metric, bound=bound)))
    return columns


def _value(metrics: Mapping[str, tuple[float, str]], name: str) -> str:
    """`1.23 (1.20 to 1.31)` with a spread, `1.23 (40%)` beside a total, `1.23`, or nothing."""
    if name not in metrics:
        return ""
    value, unit = metrics[name]
    if f"{name}_min" in metrics:
        low, high = (number(metrics[f"{name}_{end}"][0]) for end in ("min", "max"))
        return f"{number(value)} ({low} to {high})"
    total, total_unit = metrics.get("total", (0.0, ""))
    if name != "total" and total and unit == total_unit:
        return f"{number(value)} ({value / total:.0%})"
    return number(value)


def _is_spread(metric: str) -> bool:
    return metric.endswith(("_min", "_max"))


def _ratio(row: Row, *, ours: Mapping[str, float]) -> str:
    base = ours.get(key_of(row.case))
    return f"{row.time_ms / base:.2f}" if row.time_ms and base else ""


def _share_of_ceiling(row: Row, *, metric: str, bound: str) -> str:
    if metric not in row.metrics or bound not in row.ceilings:
        return ""
    return f"{row.metrics[metric][0] / row.ceilings[bound][0]:.0%}"


def _caption(rows: Sequence[Row]) -> str:
    """Where it ran, what all rows share, what each model is, and the ceilings of each run and kind
    of window."""
    lines = {rows[0].source.device + ".": None}
    runs: dict[str, dict[str, None]] = {}
    for row in rows:
        made_by = f"commit {row.source.commit}, {words(row.source.versions)}"
        runs.setdefault(made_by, {})[row.source.run] = None
    for made_by, names in runs.items():
        lines[f"Run {', '.join(names)}: {made_by}."] = None
    for row in rows:
        if sizes := {key: row.case[key] for key in of_model(rows) if key in row.case}:
            lines[f"{row.case['model']}: {words(sizes)}."] = None
    same = {key: value for key, value in rows[0].case.items() if key not in varying(rows)}
    lines[f"In every row: {words(same)}."] = None
    for row in rows:
        if row.ceilings:
            where = words({"run": row.source.run, **timing_of(row.case)})
            names = (name for name in row.ceilings if not _is_spread(name))
            found = (
                f"{name} {_value(row.ceilings, name)} {row.ceilings[name][1]}" for name in names
            )
            lines[f"Ceilings, {where}: {', '.join(found)}."] = None
    return "  \n".join(lines)


def _losses(rows: Sequence[Row]) -> list[str]:
    """Each case in which somebody's median is below ours, in words."""
    ours = _our_times(rows)
    lost = []
    for row in rows:
        base = ours.get(key_of(row.case))
        competes = not row.impl.startswith((CEILING, VARIANT))
        if competes and base and row.time_ms and row.time_ms < base:
            differing = [key for key in varying(rows) if key not in of_model(rows)]
            where = words({key: row.case.get(key) for key in differing}) or "the only case"
            lost.append(f"- {row.impl} is {base / row.time_ms:.2f} times as fast: {where}")
    return ["", f"Where {OURS} loses:", *lost] if lost else []


def _our_times(rows: Sequence[Row]) -> dict[str, float]:
    return {key_of(row.case): row.time_ms for row in rows if row.impl == OURS and row.time_ms}


def _matches(row: Row, wanted: Mapping[str, str]) -> bool:
    device = wanted.get("device", "")
    return device in row.source.device and all(
        text_of(row.case.get(key)) == value for key, value in wanted.items() if key != "device"
    )


if __name__ == "__main__":
    main()
