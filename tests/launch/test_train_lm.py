import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
import yaml
from run_folder import read_metrics
from train_lm import RunConfig, learning_rate, train

from ep_moe import ConfigError
from ep_moe.config import parse_args
from ep_moe.parallel import Process

from .conftest import LAUNCH

ALONE = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), group=None)


def test_one_process(small_run, tmp_path):
    final = train(small_run(report=True, tensorboard=True), ALONE)
    folder = tmp_path / "small"
    metrics = read_metrics(folder)
    assert [line["step"] for line in metrics["train"]] == [2, 3]
    assert [line["step"] for line in metrics["held_out"]] == [2, 3]
    assert [line["step"] for line in metrics["stages"]] == [2]
    assert metrics["held_out"][-1]["loss"] == final["held_out_loss"]
    assert final["loss_without_routed_experts"] != final["held_out_loss"]
    assert {path.name for path in folder.iterdir()} >= {"checkpoint", "config.yaml", "report.html"}


def test_the_loss_falls(small_run, tmp_path):
    config = small_run(steps=40, batch_size=8, log_every=10, eval_every=40, profile_every=0)
    train(config, ALONE)
    losses = [line["loss"] for line in read_metrics(tmp_path / "small")["train"]]
    assert losses[-1] < losses[0] - 0.5


def test_a_resumed_run_ends_where_one_in_one_piece_does(small_run, tmp_path):
    whole = train(small_run(name="whole", steps=4), ALONE)
    train(small_run(name="first", steps=2), ALONE)
    resume = str(tmp_path / "first" / "checkpoint")
    rest = train(small_run(name="rest", steps=4, resume=resume), ALONE)
    assert rest["held_out_loss"] == whole["held_out_loss"]
    with pytest.raises(ConfigError, match="steps = 2, but it must be more than the 2 of `resume`"):
        train(small_run(name="none", steps=2, resume=resume), ALONE)
    assert not (tmp_path / "none").exists()


def test_two_ranks_train_and_one_goes_on(small_run, tmp_path):
    config = small_run(name="two")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = [str(LAUNCH / "train_lm.py"), "--config", str(tmp_path / "config.yaml")]
    environ = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(LAUNCH.parent)}
    done = subprocess.run(
        [*launcher, *program],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(tmp_path / "two")
    assert metrics["start"][0]["ranks"] == 2
    a_step = 2 * 2 * 16 * 2  # ranks, sequences, bytes, choices of each
    loads = [line["tokens_per_expert"] for line in metrics["train"]]
    assert [[sum(layer) for layer in load] for load in loads] == [[2 * a_step] * 2, [a_step] * 2]
    assert "below the unigram entropy" in done.stdout

    resume = str(tmp_path / "two" / "checkpoint")
    final = train(small_run(name="one", steps=4, resume=resume), ALONE)
    assert abs(final["held_out_loss"] - metrics["final"][0]["held_out_loss"]) < 0.5


def test_the_quickstart_config_is_valid():
    path = LAUNCH.parent / "configs" / "quickstart.yaml"
    config = parse_args(RunConfig, ["--config", str(path), "--model.moe.topk=1"])
    assert config.model.moe.top_k == 1


def test_learning_rate(small_run):
    config = small_run(steps=30)
    rates = [learning_rate(step, config) for step in range(1, 31)]
    assert rates[9] == max(rates) == config.optim.lr
    assert rates[-1] == pytest.approx(config.optim.final_lr)
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 0}, "steps = 0, but it must be at least 1"),
        ({"eval_every": 3}, "eval_every = 3, but it must be a multiple of log_every = 2"),
    ],
)
def test_bad_values_are_refused(small_run, changes, message):
    with pytest.raises(ConfigError, match=message):
        small_run(**changes)
