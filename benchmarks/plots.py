"""Plots of the rows that the tables show. matplotlib comes with the extra `report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.rows import UNEVEN, Row, of_model, varying, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(rows: Sequence[Row], path: Path, *, metric: str | None = None) -> None:
    """Rows of one bench and device against tokens per rank, a panel for each combination of the
    other case values.

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
    size = (7, 3.5 * len(panels))
    figure, grid = pyplot.subplots(len(panels), figsize=size, squeeze=False, layout="constrained")
    for axes, (title, panel) in zip(grid[:, 0], panels.items(), strict=True):
        draw = _stages if "total" in panel[0].metrics else _lines
        panel = sorted(panel, key=lambda row: row.case["tokens"])
        if metric is None:
            draw(axes, panel)
        else:
            _lines(axes, panel, metric)
        axes.set_title(title, fontsize="small")
        axes.set_xlabel("tokens per rank")
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _lines(axes: "Axes", rows: Sequence[Row], metric: str | None = None) -> None:
    if metric is None:
        metric = "TFLOP/s" if all("TFLOP/s" in row.metrics for row in rows) else "time"
    for impl in dict.fromkeys(row.impl for row in rows):
        mine = [row for row in rows if row.impl == impl]
        axes.plot(
            [row.case["tokens"] for row in mine],
            [row.metrics[metric][0] for row in mine],
            "o-",
            label=impl,
        )
    if metric == "TFLOP/s" and "matmul" in rows[0].ceilings:
        axes.axhline(
            rows[0].ceilings["matmul"][0], color="gray", linestyle="--", label="dense product"
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(rows[0].metrics[metric][1])


def _stages(axes: "Axes", rows: Sequence[Row]) -> None:
    bottom = [0.0] * len(rows)
    for stage in (name for name in rows[0].metrics if "/" not in name and name != "total"):
        ms = [row.metrics[stage][0] for row in rows]
        color = "lightgray" if stage == "other" else None
        tokens = [str(row.case["tokens"]) for row in rows]
        axes.bar(tokens, ms, bottom=bottom, label=stage, color=color)
        bottom = [below + height for below, height in zip(bottom, ms, strict=True)]
    axes.set_ylabel("ms per call")
