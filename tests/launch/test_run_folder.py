import json
import sys

import pytest
from run_folder import RunFolder, read_metrics
from train_lm import RunConfig

from ep_moe import BackendUnavailable, ConfigError
from ep_moe.config import parse_args


def test_an_existing_run_is_kept(small_run):
    RunFolder(small_run(), writes=True).record("train", 1, {"loss": 1.0})
    with pytest.raises(ConfigError, match="name = 'small', but it must be a new name"):
        RunFolder(small_run(), writes=True)
    folder = RunFolder(small_run(overwrite=True), writes=True)
    assert read_metrics(folder.path) == {}


def test_the_config_can_be_read_back(small_run, tmp_path):
    config = small_run(overwrite=True, steps=77)
    folder = RunFolder(config, writes=True)
    again = parse_args(RunConfig, ["--config", str(folder.path / "config.yaml")])
    assert again == small_run(steps=77)  # without overwrite


def test_metrics_by_kind(small_run):
    folder = RunFolder(small_run(), writes=True)
    folder.record("train", 1, {"loss": 2.0, "tokens_per_expert": [[1, 2]]})
    folder.record("train", 2, {"loss": 1.0})
    folder.record("final", 2, {"stages": {}})
    by_kind = read_metrics(folder.path)
    assert by_kind["train"][0] == {"step": 1, "loss": 2.0, "tokens_per_expert": [[1, 2]]}
    assert [line["loss"] for line in by_kind["train"]] == [2.0, 1.0]
    lines = (folder.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["train", "train", "final"]


def test_other_ranks_leave_the_disk_alone(small_run, tmp_path):
    folder = RunFolder(small_run(), writes=False)
    folder.record("train", 1, {"loss": 1.0})
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_events(small_run):
    pytest.importorskip("tensorboard")
    folder = RunFolder(small_run(tensorboard=True), writes=True)
    folder.record("train", 1, {"loss": 1.0})
    folder.close()
    assert list(folder.path.glob("events.out.*"))


def test_missing_tensorboard_is_named_before_anything_is_made(small_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BackendUnavailable, match=r"ep-moe\[train\]"):
        RunFolder(small_run(tensorboard=True), writes=True)
    assert list(tmp_path.iterdir()) == []
