import pytest
from stages import REST, format_stages, median_times, permute_share, stage_rows

TIMES = {
    "route": 1.0, "route_backward": 2.0,
    "dispatch": 3.0, "dispatch_backward": 4.0,
    "experts": 10.0, "experts_backward": 20.0,
    "experts/permute": 2.0, "experts_backward/permute_backward": 4.0,
    "combine": 5.0, "combine_backward": 5.0,
    "total": 100.0,
}  # fmt: skip


def test_rows_add_up():
    rows = {row.stage: row for row in stage_rows(TIMES)}
    assert rows["experts"].total == 30
    assert rows["experts"].share == pytest.approx(0.3)
    assert rows[REST].total == pytest.approx(100 - 3 - 7 - 30 - 10)
    assert permute_share(TIMES) == pytest.approx(0.2)
    assert "permute takes 20.0% of the experts" in format_stages(TIMES)


def test_median():
    assert median_times([{"a": 1.0}, {"a": 9.0}, {"a": 2.0}]) == {"a": 2.0}
    assert median_times([]) == {}
