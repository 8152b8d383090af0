"""Plots of the rows that the tables show. matplotlib comes with the extra `report`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.rows import UNEVEN, Row, of_model, varying, words

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes


def plot(rows: Sequence[Row], path: Path, *, metric: str | None = None) -> None:
    """Rows of one bench and device against tokens per rank, a panel for each combination of the
    other case values. The same rows give the same file.

    TFLOP/s with the dense product as a dashed line, or else ms; of a breakdown, stacked bars of its
    outermost stages; or the metric that is asked for, of the rows that have it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if metric is not None:
        rows = [row for row in rows if metric in row.metrics]
    panels: dict[str, list[Row]] = {}
    known = ("tokens", *UNEVEN, *of_model(rows))
    apart = [key for key in varying(rows) if key not in known]
    for row in rows:
        rest = {key: row.case[key] for key in apart if key in row.case}
        panels.setdefault(words(rest), []).append(row)
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    lines = -(-len(panels) // columns)
    size = (2 + 4 * columns, 3 * lines)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=size, squeeze=False, layout="constrained"
    )
    labels = dict.fromkeys(label for row in rows for label in (row.impl, *_stages_of(row)))
    colors = {label: f"C{i % 10}" for i, label in enumerate(labels)}
    named: dict[str, Artist] = {}
    for axes, (title, panel) in zip(grid.flat, panels.items(), strict=False):
        panel = sorted(panel, key=lambda row: row.case["tokens"])
        if metric is None and "total" in panel[0].metrics:
            _stages(axes, panel, colors)
        else:
            _lines(axes, panel, colors, metric)
        axes.set_title(title, fontsize="small")
        axes.set_xlabel("tokens per rank")
        handles, names = axes.get_legend_handles_labels()
        named |= dict(zip(names, handles, strict=True))
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    figure.legend(named.values(), named, fontsize="small", loc="outside right upper")
    with matplotlib.rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _lines(
    axes: "Axes", rows: Sequence[Row], colors: Mapping[str, str], metric: str | None
) -> None:
    if metric is None:
        metric = "TFLOP/s" if all("TFLOP/s" in row.metrics for row in rows) else "time"
    for impl in dict.fromkeys(row.impl for row in rows):
        mine = [row for row in rows if row.impl == impl]
        axes.plot(
            [row.case["tokens"] for row in mine],
            [row.metrics[metric][0] for row in mine],
            "o-",
            color=colors[impl],
            label=impl,
        )
    if metric == "TFLOP/s" and "matmul" in rows[0].ceilings:
        axes.axhline(
            rows[0].ceilings["matmul"][0], color="gray", linestyle="--", label="dense product"
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(rows[0].metrics[metric][1])


def _stages_of(row: Row) -> list[str]:
    """Of a breakdown, the outermost."""
    names = row.metrics if "total" in row.metrics else ()
    return [name for name in names if "/" not in name and name != "total"]


def _stages(axes: "Axes", rows: Sequence[Row], colors: Mapping[str, str]) -> None:
    bottom = [0.0] * len(rows)
    for stage in _stages_of(rows[0]):
        ms = [row.metrics[stage][0] for row in rows]
        color = "lightgray" if stage == "other" else colors[stage]
        tokens = [str(row.case["tokens"]) for row in rows]
        axes.bar(tokens, ms, bottom=bottom, label=stage, color=color)
        bottom = [below + height for below, height in zip(bottom, ms, strict=True)]
    axes.set_ylabel("ms per call")
