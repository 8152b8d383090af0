import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial

import pytest
import torch
import torch.distributed as dist
import train_lm
import yaml
from lm import LanguageModel
from routing_trace import RecordingConfig, RoutingRecorder
from run_folder import read_metrics
from train_lm import OptimConfig, RunConfig, learning_rate, train

from ep_moe import ConfigError
from ep_moe.config import parse_args
from ep_moe.parallel import Process
from ep_moe.routing import count_tokens
from ep_moe.testing import run_ranks
from ep_moe.traces import RoutingTrace

from .conftest import LAUNCH

ALONE = Process(rank=0, local_rank=0, world_size=1, device=torch.device("cpu"), group=None)

RUNS = sorted((LAUNCH.parent / "configs" / "runs").glob("*.yaml"))


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


def test_a_run_stopped_early_and_resumed_equals_one_in_one_piece(small_run, tmp_path):
    run = partial(small_run, steps=6, optim=OptimConfig(warmup_steps=1), log_every=1)
    whole = train(run(name="whole"), ALONE)
    train(run(name="first", stop_after=4), ALONE)
    resume = str(tmp_path / "first" / "checkpoint")
    rest = train(run(name="rest", resume=resume), ALONE)
    losses = {
        name: [line["loss"] for line in read_metrics(tmp_path / name)["train"]]
        for name in ("whole", "first", "rest")
    }
    assert losses["first"] + losses["rest"] == losses["whole"]
    assert rest["held_out_loss"] == whole["held_out_loss"]


def test_what_cannot_start_is_refused_and_leaves_nothing(small_run, tmp_path):
    train(small_run(name="first", steps=4), ALONE)
    run = partial(small_run, name="none", resume=str(tmp_path / "first" / "checkpoint"))
    recording = RecordingConfig(steps=(4,))
    for changes, message in (
        ({"steps": 3}, "steps = 3, .* more than the 4 of `resume`"),
        ({"steps": 9, "stop_after": 4}, "stop_after = 4, .* more than the 4 of `resume`"),
        ({"steps": 6, "record_routing": recording}, r"record_routing.steps = \(4,\), .* 5 to 6"),
        ({"steps": 6, "compare_with": "some"}, "compare_with = 'some', .* a finished run"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(run(**changes), ALONE)
    assert not (tmp_path / "none").exists()


def rank_builds_its_model(rank, config):
    """What group the experts of a run are given."""
    given = []

    def look(_config, *, ep):
        given.append(ep)
        raise ZeroDivisionError

    train_lm.LanguageModel = look
    process = Process(rank, rank, 2, torch.device("cpu"), dist.group.WORLD)
    with pytest.raises(ZeroDivisionError):
        train(config, process)
    return given[0] is process.group, dist.get_process_group_ranks(given[0])


def test_experts_share_no_group_with_ddp(small_run):
    """Or its all-reduce could meet their all-to-all."""
    assert run_ranks(rank_builds_its_model, 2, small_run()) == [(False, [0, 1])] * 2


def test_two_ranks_train_and_one_goes_on(small_run, tmp_path):
    config = small_run(name="two", record_routing=RecordingConfig(steps=(1, 3), layers=(1,)))
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
    trace = RoutingTrace.load(tmp_path / "two" / "routing.npz")
    assert (trace.steps, trace.layers, trace.top_k) == ((1, 3), (1,), 2)
    assert trace.tokens_per_step == 2 * 2 * 16
    start = metrics["start"][0]
    assert trace.origin.items() >= {k: v for k, v in start.items() if k != "step"}.items()
    counts = count_tokens(trace.routing(3, 1).ids, 4)
    assert counts.tolist() == loads[1][1]  # step 3 has a line of its own

    resume = str(tmp_path / "two" / "checkpoint")
    final = train(small_run(name="one", steps=4, resume=resume), ALONE)
    assert abs(final["held_out_loss"] - metrics["final"][0]["held_out_loss"]) < 0.5


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_shipped_runs_are_valid(path):
    config = parse_args(RunConfig, ["--config", str(path), "--model.moe.topk=1"])
    assert config.model.moe.top_k == 1
    with torch.device("meta"):
        layers = LanguageModel(config.model).moe_layers()
    RoutingRecorder(config.record_routing, layers, ALONE, range(1, config.steps + 1))


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
        ({"stop_after": 0}, "stop_after = 0, but it must be at least 1, or unset"),
        ({"eval_every": 3}, "eval_every = 3, but it must be a multiple of log_every = 2"),
    ],
)
def test_bad_values_are_refused(small_run, changes, message):
    with pytest.raises(ConfigError, match=message):
        small_run(**changes)
