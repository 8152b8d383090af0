"""Plots of a run's report, from its metrics. matplotlib comes with the extra `report`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from comparison import Metrics
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from stages import stage_rows

Runs = Mapping[str, Metrics]  # by name; the first is the one that the report is about

_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
_BLUE, _ORANGE, _GREY = "#2b6cb0", "#dd6b20", "#718096"


def loss_plot(metrics: Metrics) -> Figure:
    """Training and held-out loss over steps, against the unigram entropy and the target."""
    final = metrics["final"][0]
    unigram, target = final["unigram_entropy"], final["target_gain"]
    with rc_context(_STYLE):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        axes = figure.subplots()
        for kind, style, color in (("train", "-", _BLUE), ("held_out", "o-", _ORANGE)):
            steps = [line["step"] for line in metrics[kind]]
            losses = [line["loss"] for line in metrics[kind]]
            axes.plot(steps, losses, style, color=color, markersize=4, label=kind.replace("_", " "))
        axes.axhline(unigram, color=_GREY, ls="--", lw=1, label=f"unigram entropy, {unigram:.2f}")
        axes.axhline(unigram - target, color=_GREY, ls=":", lw=1, label=f"{target:g} below it")
        axes.set(xlabel="step", ylabel="nats per byte")
        axes.legend()
    return figure


def balance_plot(runs: Runs, num_ranks: int) -> Figure:
    """MaxVio, the busiest of num_ranks ranks and the load change over steps, a line for each
    run."""
    panels = {
        "max_vio": "MaxVio",
        "busiest_rank": f"busiest of {num_ranks} ranks / mean",
        "load_change": "load change per batch",
    }
    with rc_context(_STYLE):
        figure = Figure(figsize=(8, 2.4), layout="constrained")
        grid = figure.subplots(1, len(panels))
        for axes, (name, title) in zip(grid, panels.items(), strict=True):
            for (run, metrics), color in zip(runs.items(), (_BLUE, _ORANGE), strict=False):
                lines = [line for line in metrics["train"] if line[name] is not None]
                steps = [line["step"] for line in lines]
                axes.plot(steps, [line[name] for line in lines], color=color, label=run)
            axes.set(title=title, xlabel="step")
            axes.set_ylim(bottom=1.0 if name == "busiest_rank" else 0.0)
            if name == "load_change":
                axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        if len(runs) > 1:
            figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def load_plot(runs: Runs, last_step: int) -> Figure:
    """Heat maps, a column for each run and a row for each layer: expert against step, coloured by
    load over mean load."""
    loads = {name: _loads(metrics, last_step) for name, metrics in runs.items()}
    largest = max(load.max() for _, load in loads.values())
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=max(largest, 2.0))
    num_layers = max(load.shape[1] for _, load in loads.values())
    with rc_context(_STYLE):
        figure = Figure(figsize=(8, 0.8 + 1.1 * num_layers), layout="constrained")
        grid = figure.subplots(num_layers, len(runs), sharex=True, squeeze=False)
        for (name, (edges, load)), panels in zip(loads.items(), grid.T, strict=True):
            for axes in panels[load.shape[1] :]:
                axes.set_axis_off()  # another run has more layers
            for layer in range(load.shape[1]):
                mesh = _heat_map(panels[layer], edges, load[:, layer].T, norm)
                panels[layer].set_ylabel(f"layer {layer}\nexpert")
            panels[load.shape[1] - 1].set_xlabel("step")
            if len(runs) > 1:
                panels[0].set_title(name)
        figure.colorbar(mesh, ax=grid, label="load / mean load", aspect=30, pad=0.02)
    return figure


def stage_plot(times: Mapping[str, float]) -> Figure:
    """Milliseconds per stage, forward and backward stacked."""
    rows = stage_rows(times)[::-1]  # bars are drawn from the bottom
    names = [row.stage for row in rows]
    forward, backward = [row.forward for row in rows], [row.backward for row in rows]
    with rc_context(_STYLE):
        figure = Figure(figsize=(8, 2.4), layout="constrained")
        axes = figure.subplots()
        axes.barh(names[:1], forward[:1], color=_GREY)  # the rest of the step
        axes.barh(names[1:], forward[1:], color=_BLUE, label="forward")
        axes.barh(names, backward, left=forward, color=_ORANGE, label="backward")
        for y, row in enumerate(rows):
            axes.annotate(
                f"{row.share:.0%}",
                (row.total, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
            )
        axes.margins(x=0.08)
        axes.set_xlabel("ms per step, and share of the step")
        axes.legend()
    return figure


def _loads(metrics: Metrics, last_step: int) -> tuple[list[int], np.ndarray]:
    """Up to last_step: the steps between which loads were summed, and these over their mean,
    (lines, layers, experts)"""
    train = [line for line in metrics["train"] if line["step"] <= last_step]
    edges = [metrics["start"][0]["step"], *(line["step"] for line in train)]
    counts = np.array([line["tokens_per_expert"] for line in train])
    return edges, counts / np.maximum(counts.mean(axis=2, keepdims=True), 1)


def _heat_map(axes: Axes, edges: Sequence[int], load: np.ndarray, norm: TwoSlopeNorm) -> Any:
    """load (experts, lines)"""
    experts = np.arange(len(load) + 1) - 0.5
    mesh = axes.pcolormesh(edges, experts, load, cmap="RdBu_r", norm=norm, rasterized=True)
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return mesh
