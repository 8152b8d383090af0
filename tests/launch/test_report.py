import re

import pytest
from run_folder import RunFolder

from .test_stages import TIMES

pytest.importorskip("matplotlib")
from report import write_report


@pytest.fixture
def run(small_run):
    folder = RunFolder(small_run(name="a&b"), writes=True)
    folder.record("start", 0, {"ranks": 2, "device": "<cpu>", "corpus_bytes": 1234567})
    for step in (2, 4, 5):
        counts = [[step, 0, 1, 2], [3, 3, 3, 3]]
        folder.record("train", step, {"loss": 5.0 / step, "tokens_per_expert": counts})
        folder.record("held_out", step, {"loss": 6.0 / step})
    final = {
        "held_out_loss": 1.5,
        "unigram_entropy": 3.25,
        "target_gain": 1.0,
        "loss_without_routed_experts": 2.75,
        "tokens_per_second": 1234.5,
        "max_vio": 0.5,
        "dead_experts": 1,
        "seconds": 6.0,
    }

    def finish(stages):
        folder.record("final", 5, final | {"stages": stages})
        folder.close()
        return write_report(folder.path).read_text()

    return finish


def test_report_has_the_figures_and_three_plots(run):
    page = run(TIMES)
    assert page.count("<svg") == 3
    for expected in ("1.500", "3.250", "1.750 above", "+1.250", "1,234", "1,234,567", "20.0%"):
        assert expected in page, expected
    assert "a&amp;b" in page
    assert "&lt;cpu&gt;" in page
    assert "num_experts: 4" in page


def test_report_needs_no_other_file(run):
    page = run(TIMES)
    linked = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert linked
    assert all(link.startswith(("#", "data:")) for link in linked)


def test_report_without_profiled_steps(run):
    page = run({})
    assert page.count("<svg") == 2
    assert "Time per stage" not in page
