"""report.html of a run: its figures and plots in one file that needs no other.

`python launch/report.py runs/NAME` writes it again from metrics.jsonl.
"""

import html
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison import Run, differences, figures_at, last_common_step, read_runs
from stages import REST, permute_share, stage_rows

from ep_moe.errors import BackendUnavailable

try:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from plots import balance_plot, load_plot, loss_plot, stage_plot
except ImportError as error:
    rule = "install ep-moe[report], or pass --report=false"
    raise BackendUnavailable(f"report = True needs {error.name}: {rule}") from error

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


# Rows of the table of two runs: figures of one step, and how they are written.
_COMPARED = {
    "held_out_loss": ("held-out loss", ".3f"),
    "loss": ("training loss", ".3f"),
    "max_vio": ("MaxVio", ".2f"),
    "busiest_rank": ("busiest rank / mean", ".2f"),
    "load_change": ("load change", ".1%"),
    "dead_experts": ("dead experts", "d"),
}
_HEAT_MAP = (
    "Tokens of each expert over all ranks, relative to perfect balance: white is balanced, red has "
    "more than its part, blue has less."
)


def write_report(path: Path) -> Path:
    """Read the run in the folder `path`, and the one that it is compared with, and write its
    report.html; returns that file."""
    run, *others = read_runs(path)
    metrics = run.metrics
    start, final = metrics["start"][0], metrics["final"][0]
    num_ranks = start["ranks_of_load_figures"]
    by_name = {r.name: r.metrics for r in (run, *others)}
    parts = [
        "<h2>Result</h2>",
        _table(_result_rows(final, num_ranks)),
        "<h2>Loss</h2>",
        _figure(loss_plot(metrics), "On the training text, and on files that were held out."),
        "<h2>Expert load</h2>",
        _figure(
            balance_plot(by_name, num_ranks),
            "Means over layers. MaxVio is of the tokens between two points, the other two are of "
            "single batches. Busy and idle experts of one rank even each other out, so a few ranks "
            "may be even where the experts are not.",
        ),
        _figure(load_plot({run.name: metrics}, metrics["train"][-1]["step"]), _HEAT_MAP),
        *(part for other in others for part in _comparison(run, other)),
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


def _comparison(run: Run, other: Run) -> list[str]:
    """Both runs at the last step that they share, and their loads up to it."""
    changes = differences(run.config, other.config)
    head = ("config", run.name, other.name)
    rows = [(d.field, _number(d.here), _number(d.there)) for d in changes]
    parts = [f"<h2>Beside {html.escape(other.name)}</h2>", _table(rows, head=head)]
    step = last_common_step(run.metrics, other.metrics)
    if step is None:
        return [*parts, "<p>No step at which both looked at the held-out text.</p>"]
    here, there = (figures_at(step, r.metrics) for r in (run, other))
    rows = [
        (label, _text(here[name], digits), _text(there[name], digits))
        for name, (label, digits) in _COMPARED.items()
    ]
    maps = load_plot({r.name: r.metrics for r in (run, other)}, step)
    return [
        *parts,
        _table(rows, head=(f"at step {step}", run.name, other.name)),
        _figure(maps, f"Both up to step {step}. {_HEAT_MAP}"),
    ]


def _result_rows(final: Mapping[str, Any], num_ranks: int) -> list[tuple[str, str, str]]:
    loss, unigram = final["held_out_loss"], final["unigram_entropy"]
    without = final["loss_without_routed_experts"]
    rows = [
        ("held-out loss", f"{loss:.3f}", "nats per byte, on files that were never trained on"),
        ("unigram entropy", f"{unigram:.3f}", f"of the same bytes: {unigram - loss:.3f} above"),
        ("without routed experts", f"{without:.3f}", f"{without - loss:+.3f} when they answer 0"),
        ("tokens per second", f"{final['tokens_per_second']:,.0f}", "over all ranks, in training"),
        ("MaxVio", f"{final['max_vio']:.2f}", "busiest expert over the mean, minus 1; at the end"),
        (
            "busiest rank / mean",
            f"{final['busiest_rank']:.2f}",
            f"load of the busiest of {num_ranks} ranks, which the others wait for",
        ),
        ("load change", _text(final["load_change"], ".1%"), "of the choices, from batch to batch"),
        ("dead experts", f"{final['dead_experts']}", "in all layers, at the end"),
        ("seconds", f"{final['seconds']:.0f}", "of training and evaluation"),
    ]
    if dropped := final["dropped_share"]:
        rows.append(("dropped", _text(dropped, ".1%"), "of the choices, by experts that were full"))
    return rows


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


def _text(value: float | None, digits: str) -> str:
    return "unknown" if value is None else f"{value:{digits}}"


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
