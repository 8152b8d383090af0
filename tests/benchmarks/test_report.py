import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.records import Record
from benchmarks.report import main, rewrite, table, wide_table
from benchmarks.rows import latest_rows

HERE = Path()
TIMED = {"method": "events", "window_ms": 300.0}


def record(impl, metric, value, unit, *, run="r1", **case):
    return Record(
        "layer",
        impl,
        {**case, **TIMED},
        metric,
        value,
        unit,
        device="GPU X",
        versions={"torch": "2.11"},
        commit="c0ffee",
        date=f"2026-01-0{run[1:]}",
        run=run,
    )


def timed(impl, ms, *, tflops=1.0, **case):
    spread = {"time": ms, "time_min": ms - 0.5, "time_max": ms + 1}
    times = [record(impl, metric, value, "ms", **case) for metric, value in spread.items()]
    return [*times, record(impl, "TFLOP/s", tflops, "TFLOP/s", **case)]


CEILINGS = [
    record("ceiling", "matmul", 800.0, "TFLOP/s", dtype="bf16"),
    replace(record("ceiling", "matmul", 400.0, "TFLOP/s"), case={**TIMED, "window_ms": 40.0}),
]


def cells(markdown):
    """The table's lines below its rule, split."""
    lines = [line for line in markdown.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_implementations_stand_beside_each_other_with_what_ours_loses():
    records = [
        *CEILINGS,
        *timed("ep_moe", 2.0, tflops=400, tokens=8, dtype="bf16"),
        *timed("peer", 1.0, tflops=600, tokens=8, dtype="bf16"),
        *timed("ceiling: dense", 0.9, tokens=8, dtype="bf16"),
        *timed("ep_moe", 4.0, tokens=16, dtype="bf16"),
        *timed("peer", 6.0, tokens=16, dtype="bf16"),
    ]
    markdown = table(latest_rows(records))
    assert cells(markdown)[:2] == [
        ["8", "ep_moe", "2 (1.5 to 3)", "1.00", "400", "50%"],
        ["8", "peer", "1 (0.5 to 2)", "0.50", "600", "75%"],
    ]
    assert markdown.endswith("Where ep_moe loses:\n- peer is 2.00 times as fast: tokens 8")
    assert "In every row: dtype bf16, method events, window_ms 300." in markdown
    assert "matmul 800 TFLOP/s" in markdown
    assert "400 TFLOP/s" not in markdown.split("|")[0]  # of another window


def test_only_the_latest_run_of_a_case_counts_and_whole():
    records = [
        *timed("ep_moe", 2.0, tokens=8, run="r1"),
        *timed("peer", 1.0, tokens=8, run="r1"),
        *timed("ep_moe", 3.0, tokens=8, run="r2"),
        *timed("peer", 5.0, tokens=16, run="r1"),
    ]
    rows = latest_rows(records)
    shown = [(row.case["tokens"], row.impl, row.time_ms) for row in rows]
    assert shown == [(8, "ep_moe", 3.0), (16, "peer", 5.0)]


def test_devices_do_not_replace_each_other():
    ours = timed("ep_moe", 2.0, tokens=8)
    records = [*ours, *(replace(r, device="GPU Y", run="r9", date="2027") for r in ours)]
    assert [row.source.device for row in latest_rows(records)] == ["GPU X", "GPU Y"]


def test_a_ceiling_of_another_run_bounds_nothing():
    rows = latest_rows([*CEILINGS, *timed("ep_moe", 2.0, tokens=8, run="r2")])
    assert rows[0].ceilings == {}


def test_a_breakdown_shows_shares_of_its_total():
    stages = {"experts": 3.0, "other": 1.0, "total": 4.0}
    records = [record("ep_moe", name, ms, "ms", tokens=8) for name, ms in stages.items()]
    assert cells(table(latest_rows(records))) == [["ep_moe", "3 (75%)", "1 (25%)", "4"]]


README = """before
<!-- table:layer tokens=8 device=X -->
old
<!-- /table:layer -->
after
"""


def test_a_marked_section_is_rewritten_and_again_to_the_same():
    rows = {"layer": latest_rows([*timed("ep_moe", 2, tokens=8), *timed("ep_moe", 3, tokens=16)])}
    text = rewrite(README, rows, HERE)
    assert cells(text) == [["ep_moe", "2 (1.5 to 3)", "1", ""]]
    assert "old" not in text
    assert text.startswith("before\n<!-- table:layer tokens=8 device=X -->\n")
    assert text.endswith("<!-- /table:layer -->\nafter\n")
    assert rewrite(text, rows, HERE) == text


@pytest.mark.parametrize("old, new", [("tokens=8", "tokens=9"), ("device=X", "device=Z")])
def test_a_marker_that_matches_nothing_is_named(old, new):
    rows = {"layer": latest_rows(timed("ep_moe", 2, tokens=8))}
    with pytest.raises(ValueError, match=rf"{new}.*matches no record; .*\['layer'\]"):
        rewrite(README.replace(old, new), rows, HERE)


PLOT = "<!-- plot:layer file=a.svg tokens=8 -->\n<!-- /plot:layer -->\n"


def test_a_marked_plot_is_drawn_beside_the_text_and_again_to_the_same(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    records = [*timed("ep_moe", 2, tokens=8), *timed("peer", 3, tokens=8)]
    rows = {"layer": latest_rows([*records, *timed("another", 3, tokens=16)])}
    text = rewrite(PLOT, rows, tmp_path)
    assert "\n![layer against tokens per rank: tokens 8](a.svg)\n" in text
    drawn = (tmp_path / "a.svg").read_text()
    assert ">peer<" in drawn
    assert ">another<" not in drawn
    assert rewrite(text, rows, tmp_path) == text
    assert (tmp_path / "a.svg").read_text() == drawn


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("tokens=8", "tokens=9", "tokens=9.*matches no record"),
        ("tokens=8", "metric=ratio", "metric=ratio.*matches no record"),
        ("tokens=8", "metric=GBs", "metric=GBs.*matches no record"),
        ("tokens=8", "dtype=None", "plot:layer.* must say device=, .*GPU X.*GPU Y"),
        ("file=a.svg ", "", "plot:layer tokens=8 .*must name a picture"),
    ],
)
def test_a_plot_that_cannot_be_drawn_is_named(old, new, message, tmp_path):
    records = timed("ep_moe", 2, tokens=8)
    if "GPU Y" in message:
        records += [replace(r, device="GPU Y") for r in records]
    rows = {"layer": latest_rows(records)}
    with pytest.raises(ValueError, match=message):
        rewrite(PLOT.replace(old, new), rows, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_rewrites_a_readme(tmp_path):
    lines = [json.dumps(asdict(r)) for r in timed("ep_moe", 2.0, tokens=8)]
    (tmp_path / "layer.jsonl").write_text("\n".join(lines))
    readme = tmp_path / "README.md"
    readme.write_text(README)
    main([f"--results={tmp_path}", f"--readme={readme}"])
    assert cells(readme.read_text()) == [["ep_moe", "2 (1.5 to 3)", "1", ""]]


def test_the_command_prints_and_plots(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    records = [r for tokens in (8, 16) for r in timed("ep_moe", 2.0, tokens=tokens)]
    stages = [record("ep_moe", name, 1.0, "ms", tokens=8) for name in ("experts", "total")]
    for name, found in {"layer": [*CEILINGS, *records], "layer_stages": stages}.items():
        lines = [json.dumps(asdict(replace(r, bench=name))) for r in found]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    main([f"--results={tmp_path}", f"--plots={tmp_path / 'plots'}"])
    assert "## layer\n" in capsys.readouterr().out
    drawn = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert drawn == ["layer.GPU_X.png", "layer_stages.GPU_X.png"]


def test_the_ratio_is_drawn_in_a_panel_for_each_load(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    from matplotlib import pyplot

    panels = []
    monkeypatch.setattr(pyplot, "close", lambda figure: panels.append(figure.axes))
    records = [r for t in (8, 16) for r in beside_parts(tokens=t, skew=2.0, busiest_rank=1 + t)]
    lines = [json.dumps(asdict(r)) for r in records]
    (tmp_path / "layer.jsonl").write_text("\n".join(lines))
    main([f"--results={tmp_path}", f"--plots={tmp_path}"])
    assert (tmp_path / "layer_ratio.GPU_X.png").exists()
    of_times, of_ratios = panels
    assert len(of_times) == len(of_ratios) == 2  # directions
    for axes in of_ratios:
        drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
        assert drawn == {"ep_moe": [2, 2], "ep_moe, chunks 2": [1.5, 1.5]}


def beside_parts(**case):
    """Ours, a variant and a part, forward and forward+backward."""
    records = []
    for direction, times in (("forward", 1), ("forward+backward", 3)):
        where = {"direction": direction, **case}
        for impl, ms in {"ep_moe": 2, "ep_moe, chunks 2": 1.5, "ceiling: compute alone": 1}.items():
            records += timed(impl, times * ms, **where)
            if impl.startswith("ep_moe"):
                records.append(record(impl, "ratio", ms, "ratio", **where))
    return records


LOADS = ({"skew": 2.0, "busiest_rank": 1.2}, {"trace": "some"}, {})


def test_a_wide_table_has_a_line_for_a_number_of_tokens_and_a_load():
    found = [r for load in LOADS for r in beside_parts(tokens=8192, **load)]
    rows = latest_rows([*found, *timed("ep_moe", 9.0, direction="forward", tokens=1)])
    assert "Each cell: forward / forward+backward; times in ms." in wide_table(rows)
    lines = [
        ["8,192", load, busiest, "2 / 6", "1.5 / 4.5", "1 / 3", "2 / 2", "1.5 / 1.5"]
        for load, busiest in (("skew 2", "1.2"), ("trace some", ""), ("by the logits", ""))
    ]
    assert cells(wide_table(rows)) == lines
    assert "loses" not in table(rows)  # a variant is ours
    readme = README.replace("tokens=8 device=X", "device=X layout=wide")
    assert cells(rewrite(readme, {"layer": rows}, HERE)) == lines
    assert wide_table(latest_rows(timed("ep_moe", 9.0, direction="forward", tokens=1))) == ""


def test_a_wide_table_keeps_a_model_together():
    found = []
    for model, width, tokens in (("small", 8, 16), ("large", 64, 8), ("small", 8, 4)):
        found += beside_parts(tokens=tokens, model=model, width=width)
    lines = cells(wide_table(latest_rows(found)))
    assert [line[:3] for line in lines] == [
        ["large", "8", "by the logits"],
        ["small", "4", "by the logits"],
        ["small", "16", "by the logits"],
    ]


def test_a_wide_section_without_parts_is_named():
    rows = {"layer": latest_rows(timed("ep_moe", 2, tokens=8))}
    with pytest.raises(ValueError, match=r"layout=wide.*matches no record"):
        rewrite(README.replace("tokens=8 device=X", "layout=wide"), rows, HERE)


def test_what_follows_from_the_model_stands_above_the_table():
    records = []
    for model, width in (("small", 8), ("large", 64)):
        for direction in ("forward", "backward"):
            case = {"model": model, "width": width, "direction": direction}
            records += [*timed("ep_moe", 2.0, **case), *timed("peer", 1.0, **case)]
    markdown = table(latest_rows(records))
    assert "small: width 8." in markdown
    assert "large: width 64." in markdown
    assert cells(markdown)[0][:3] == ["small", "forward", "ep_moe"]
    assert "- peer is 2.00 times as fast: model large, direction backward" in markdown
    records += timed("ep_moe", 2.0, model="large", width=65, direction="forward")
    markdown = table(latest_rows(records))  # no longer does it follow
    assert "small: width" not in markdown
    assert "| model | width |" in markdown
