import json

import pytest
import torch

from benchmarks.records import Recorder, read_records
from ep_moe.parallel import Process

KEYS = ["bench", "impl", "case", "metric", "value", "unit"]
KEYS += ["device", "versions", "commit", "date", "run"]


def recorder(folder, rank=0):
    return Recorder.start(folder, Process(rank, rank, 2, torch.device("cpu"), None))


def test_a_record_has_exactly_these_keys_and_comes_back(tmp_path):
    mine = recorder(tmp_path)
    mine.add("layer", "ep_moe", {"tokens": 4}, {"time": (1.5, "ms"), "rate": (2.0, "tokens/s")})
    lines = (tmp_path / "layer.jsonl").read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [KEYS, KEYS]
    first, second = read_records(tmp_path / "layer.jsonl")
    assert (first.metric, first.value, first.unit, first.case) == ("time", 1.5, "ms", {"tokens": 4})
    assert first.versions["torch"] == torch.__version__
    assert first.run == second.run == mine.run


def test_runs_append_and_know_their_own(tmp_path):
    runs = [recorder(tmp_path) for _ in range(2)]
    for value, run in enumerate(runs):
        run.add("layer", "ep_moe", {}, {"time": (value, "ms")})
    assert [r.value for r in read_records(tmp_path / "layer.jsonl")] == [0, 1]
    assert [r.value for r in runs[1].written("layer")] == [1]
    assert runs[1].written("another") == []


def test_only_rank_0_writes(tmp_path):
    recorder(tmp_path, rank=1).add("layer", "ep_moe", {}, {"time": (1.0, "ms")})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_refused_whole(tmp_path, value):
    with pytest.raises(ValueError, match="JSON"):
        recorder(tmp_path).add("layer", "ep_moe", {}, {"a": (1.0, "ms"), "b": (value, "ms")})
    assert not list(tmp_path.iterdir())


def test_a_line_that_is_no_record_is_named(tmp_path):
    path = tmp_path / "layer.jsonl"
    recorder(tmp_path).add("layer", "ep_moe", {}, {"time": (1.0, "ms")})
    path.write_text(path.read_text() + '{"bench": "layer"}\n')
    with pytest.raises(ValueError, match=r"layer.jsonl:2 has the keys \['bench'\]"):
        read_records(path)


def test_the_commit_can_be_given_for_a_copy_of_the_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("EP_MOE_COMMIT", "abc")
    assert recorder(tmp_path).commit == "abc"
    monkeypatch.delenv("EP_MOE_COMMIT")
    assert recorder(tmp_path).commit != "abc"
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert recorder(tmp_path).commit == "unknown"
