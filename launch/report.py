"""report.html of a run: its figures and plots in one file that needs no other.

`python launch/report.py runs/NAME` writes it again from metrics.jsonl.
"""

import html
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from run_folder import read_metrics
from stages import REST, permute_share, stage_rows

from ep_moe.errors import BackendUnavailable

try:
    from matplotlib import rc_context
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    rule = "install ep-moe[report], or pass --report=false"
    raise BackendUnavailable(f"report = True needs {error.name}: {rule}") from error

_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
}
Metrics = Mapping[str, Sequence[Mapping[str, Any]]]  # by kind

_BLUE, _ORANGE, _GREY = "#2b6cb0", "#dd6b20", "#718096"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #1a202c; background: white;
       max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
h1 {{ font-size: 1.5rem; }}
h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
td, th {{ padding: .2rem 1.2rem .2rem 0; border-bottom: 1px solid #e2e8f0; text-align: left; }}
figure {{ margin: 1rem 0; }}
figure svg {{ width: 100%; height: auto; }}
figcaption {{ color: #4a5568; }}
pre {{ background: #f7fafc; padding: 1rem; overflow-x: auto; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def write_report(path: Path) -> Path:
    """Read the run in the folder `path` and write its report.html; returns that file."""
    metrics = read_metrics(path)
    start, final = metrics["start"][0], metrics["final"][0]
    parts = [
        "<h2>Result</h2>",
        _table(_result_rows(final)),
        "<h2>Loss</h2>",
        _figure(loss_plot(metrics), "On the training text, and on files that were held out."),
        "<h2>Expert load</h2>",
        _figure(
            load_plot(metrics),
            "Tokens of each expert over all ranks, relative to perfect balance: white is balanced, "
            "red has more than its part, blue has less.",
        ),
    ]
    if times := final["stages"]:
        head = ("stage", "forward, ms", "backward, ms", "both, ms", "share of the step")
        parts += [
            "<h2>Time per stage</h2>",
            _figure(stage_plot(times), "Median over the profiled steps of the mean over ranks."),
            _table(_stage_table(times), head=head),
            f"<p>Permute (pack, gather, weighted sum) takes {permute_share(times):.1%} "
            "of the experts' time.</p>",
        ]
    parts += [
        "<h2>Where it ran</h2>",
        _table([(k.replace("_", " "), _number(v)) for k, v in start.items() if k != "step"]),
        f"<h2>Config</h2><pre>{html.escape((path / 'config.yaml').read_text())}</pre>",
    ]
    report = path / "report.html"
    title = html.escape(f"Run {path.resolve().name}")
    report.write_text(_PAGE.format(title=title, body="\n".join(parts)), encoding="utf-8")
    return report


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


def load_plot(metrics: Metrics) -> Figure:
    """Heat maps, one a layer: expert against step, coloured by load over mean load."""
    train = metrics["train"]
    edges = [metrics["start"][0]["step"], *(line["step"] for line in train)]
    counts = np.array([line["tokens_per_expert"] for line in train])  # (lines, layers, experts)
    load = counts / np.maximum(counts.mean(axis=2, keepdims=True), 1)
    num_layers, num_experts = load.shape[1:]
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=max(load.max(), 2.0))
    with rc_context(_STYLE):
        figure = Figure(figsize=(8, 0.6 + 1.1 * num_layers), layout="constrained")
        panels = figure.subplots(num_layers, sharex=True, squeeze=False)[:, 0]
        for layer, axes in enumerate(panels):
            mesh = axes.pcolormesh(
                edges,
                np.arange(num_experts + 1) - 0.5,
                load[:, layer].T,
                cmap="RdBu_r",
                norm=norm,
                rasterized=True,
            )
            axes.invert_yaxis()
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_ylabel(f"layer {layer}\nexpert")
        panels[-1].set_xlabel("step")
        figure.colorbar(mesh, ax=list(panels), label="load / mean load", aspect=30, pad=0.02)
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


def _result_rows(final: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    loss, unigram = final["held_out_loss"], final["unigram_entropy"]
    without = final["loss_without_routed_experts"]
    return [
        ("held-out loss", f"{loss:.3f}", "nats per byte, on files that were never trained on"),
        ("unigram entropy", f"{unigram:.3f}", f"of the same bytes: {unigram - loss:.3f} above"),
        ("without routed experts", f"{without:.3f}", f"{without - loss:+.3f} when they answer 0"),
        ("tokens per second", f"{final['tokens_per_second']:,.0f}", "over all ranks, in training"),
        ("MaxVio", f"{final['max_vio']:.2f}", "busiest expert over the mean, minus 1; at the end"),
        ("dead experts", f"{final['dead_experts']}", "in all layers, at the end"),
        ("seconds", f"{final['seconds']:.0f}", "of training and evaluation"),
    ]


def _stage_table(times: Mapping[str, float]) -> list[list[str]]:
    table = []
    for row in stage_rows(times):
        ways = ["", ""] if row.stage == REST else [f"{row.forward:.2f}", f"{row.backward:.2f}"]
        table.append([row.stage, *ways, f"{row.total:.2f}", f"{row.share:.1%}"])
    return table


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = ()) -> str:
    def line(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    lines = [line("th", head)] if head else []
    return "<table>" + "\n".join(lines + [line("td", row) for row in rows]) + "</table>"


def _number(value: Any) -> str:
    return (
        f"{value:,}"
        if isinstance(value, int)
        else f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
    )


def _figure(figure: Figure, caption: str) -> str:
    """Inline SVG: sharp at any size, and part of the page."""
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": caption}):  # no two figures of the page share an id
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML declaration
    return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python launch/report.py runs/NAME")
    print(write_report(Path(sys.argv[1])))
