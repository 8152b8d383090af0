import re

import pytest
import yaml
from comparison import Difference, differences, figures_at, last_common_step, read_run
from run_folder import RunFolder
from run_summary import verdict

from ep_moe import ConfigError, MoEConfig

from .test_lm import make_config
from .test_stages import TIMES

pytest.importorskip("matplotlib")
from report import write_report

FINAL = {
    "held_out_loss": 1.5,
    "unigram_entropy": 3.25,
    "target_gain": 1.0,
    "loss_without_routed_experts": 2.75,
    "tokens_per_second": 1234.5,
    "max_vio": 0.5,
    "busiest_rank": 1.25,
    "load_change": 0.125,
    "dropped_share": 0.0,
    "dead_experts": 1,
    "seconds": 6.0,
    "stages": {},
}


@pytest.fixture
def finish(small_run):
    """Leaves the folder of a run that ended after `steps`."""

    def make(name, steps=(2, 4, 5), *, max_vio=0.5, final=(), **changes):
        folder = RunFolder(small_run(name=name, **changes), writes=True)
        start = {"ranks": 2, "device": "<cpu>", "corpus_bytes": 1234567}
        folder.record("start", 0, start | {"ranks_of_load_figures": 2})
        for step in steps:
            load = {"max_vio": max_vio, "busiest_rank": 1.1, "dead_experts": 0}
            load["load_change"] = None if step == steps[0] else 0.03
            load["tokens_per_expert"] = [[step, 0, 1, 2], [3, 3, 3, 3]]
            folder.record("train", step, {"loss": 5.0 / step, **load})
            if step % 2 == 0:
                folder.record("held_out", step, {"loss": 6.0 / step})
        folder.record("final", steps[-1], FINAL | dict(final))
        folder.close()
        return folder.path

    return make


def test_report_has_the_figures_and_four_plots(finish):
    page = write_report(finish("a&b", final={"stages": TIMES})).read_text()
    assert page.count("<svg") == 4
    for expected in ("1.500", "3.250", "1.750 above", "+1.250", "1,234", "1,234,567", "20.0%"):
        assert expected in page, expected
    assert "of the busiest of 2 ranks" in page
    assert "12.5%" in page
    assert "a&amp;b" in page
    assert "&lt;cpu&gt;" in page
    assert "num_experts: 4" in page
    assert "Beside" not in page
    assert "by experts that were full" not in page


def test_report_needs_no_other_file(finish):
    page = write_report(finish("a&b", final={"stages": TIMES})).read_text()
    linked = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert linked
    assert all(link.startswith(("#", "data:")) for link in linked)


def test_report_without_profiled_steps(finish):
    page = write_report(finish("a")).read_text()
    assert page.count("<svg") == 3
    assert "Time per stage" not in page


def test_a_dropped_share_is_shown_where_there_is_one(finish):
    page = write_report(finish("a", final={"dropped_share": 0.021})).read_text()
    assert "2.1%" in page
    assert "by experts that were full" in page


def test_two_runs_beside_each_other(finish):
    moe = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2, aux_loss_coef=0.5)
    finish("other", steps=(2, 4), max_vio=1.75, stop_after=4)
    path = finish("one", compare_with="other", model=make_config(moe=moe))
    page = write_report(path).read_text()
    assert page.count("<svg") == 4
    assert "<h2>Beside other</h2>" in page
    assert "<td>model.moe.aux_loss_coef</td><td>0.5</td><td>0</td>" in page
    assert "stop_after</td>" not in page
    assert "<th>at step 4</th><th>one</th><th>other</th>" in page
    assert "<td>MaxVio</td><td>0.50</td><td>1.75</td>" in page
    assert "<td>held-out loss</td><td>1.500</td><td>1.500</td>" in page
    assert "<td>load change</td><td>3.0%</td><td>3.0%</td>" in page

    text = verdict(path)
    assert "beside other (model.moe.aux_loss_coef 0.0, here 0.5" in text
    assert "at step 4: MaxVio 0.50 instead of 1.75, held-out loss 1.500 instead of 1.500" in text
    assert "beside" not in verdict(path.parent / "other")


def test_runs_without_a_common_step(finish):
    finish("other", steps=(6,))
    path = finish("one", compare_with="other")
    assert "No step at which both looked" in write_report(path).read_text()
    assert "no step at which both looked" in verdict(path)


def test_runs_of_other_sizes_are_compared_all_the_same(finish):
    path = finish("one", compare_with="other")
    other = finish("other")
    lines = (other / "metrics.jsonl").read_text().replace(", [3, 3, 3, 3]]", "]")
    (other / "metrics.jsonl").write_text(lines)
    assert write_report(path).read_text().count("<svg") == 4
    path = finish("two", compare_with="one")
    assert write_report(path).read_text().count("<svg") == 4


def test_common_steps_and_their_figures():
    def metrics(*steps):
        train = [{"step": s, "loss": 1.0, "max_vio": s / 10} for s in (1, *steps)]
        return {"train": train, "held_out": [{"step": s, "loss": 10.0 * s} for s in steps]}

    assert last_common_step(metrics(2, 4, 6), metrics(4, 5)) == 4
    assert last_common_step(metrics(2), metrics(4)) is None
    expected = {"step": 4, "loss": 1.0, "max_vio": 0.4, "held_out_loss": 40.0}
    assert figures_at(4, metrics(2, 4)) == expected


def test_differences_are_named_by_their_dotted_fields():
    here = {"name": "a", "steps": 3, "model": {"moe": {"top_k": 2}, "depth": 1}}
    there = {"name": "b", "steps": 3, "model": {"moe": {"top_k": 4}}}
    found = [Difference("model.moe.top_k", 2, 4), Difference("model.depth", 1, None)]
    assert differences(here, there) == found


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl", "the end"])
def test_an_unfinished_run_is_named(finish, missing):
    path = finish("one")
    assert read_run(path).config == yaml.safe_load((path / "config.yaml").read_text())
    if missing == "the end":
        lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (path / "metrics.jsonl").write_text("".join(lines[:-1]))
    else:
        (path / missing).unlink()
    message = "compare_with = 'one', but it must be the name of a finished run in"
    with pytest.raises(ConfigError, match=message):
        read_run(path, field="compare_with")
