"""Train a byte-level Mixture-of-Experts language model with expert parallelism. Copy this file to
embed the layer.

    launch/torchrun.sh launch/train_lm.py --config configs/runs/quickstart.yaml --name mine

Every rank has its own batches. The dense part is replicated (data parallel, DDP); the experts are
spread over the same ranks. What expert parallelism asks of a training loop is marked EP below;
everything else is an ordinary loop.
"""

import logging
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparison import read_run
from corpus import even_windows, load_corpus, random_windows, unigram_entropy
from lm import LanguageModel, LMConfig
from progress import LOAD_FIGURES, Progress, StepResult
from routing_trace import RecordingConfig, RoutingRecorder
from run_folder import RunFolder
from run_summary import describe, verdict
from stages import median_times
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import ep_moe
from ep_moe.config import parse_args
from ep_moe.measure import profile_stages

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW; the learning rate warms up linearly, then falls along a cosine.

    Args:
        lr: the peak
        final_lr: at the last step
        warmup_steps: steps until the peak
        weight_decay: decoupled from the gradient
        beta2: decay of the second moment
        max_grad_norm: gradients are scaled down to this total norm
    """

    lr: float = 4e-3
    final_lr: float = 2e-4
    warmup_steps: int = 40
    weight_decay: float = 0.1
    beta2: float = 0.98
    max_grad_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run.

    Args:
        name: the run's folder in runs_dir
        model: the language model
        steps: optimizer steps
        stop_after: end after this one, if not before; the learning rate is that of all steps
        batch_size: sequences per rank and step
        sequence_length: bytes per sequence
        eval_sequences: held-out sequences over all ranks, spread evenly over the held-out text
        log_every: steps between two lines of metrics
        eval_every: steps between two looks at the held-out text, a multiple of log_every
        profile_every: steps between two profiled ones, for the time per stage; 0 = never
        target_gain: how far, in nats, the held-out loss should end below the unigram entropy
        dtype: of parameters and activations
        seed: of parameters and batches
        resume: a checkpoint folder to go on from, written on any number of ranks
        record_routing: steps and layers whose routing goes into routing.npz
        compare_with: a finished run in runs_dir to show beside this one
        overwrite: replace the run of the same name
        tensorboard: write TensorBoard events
        report: write report.html
    """

    name: str
    model: LMConfig
    steps: int
    stop_after: int | None = None
    batch_size: int
    sequence_length: int
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval_sequences: int = 256
    log_every: int = 10
    eval_every: int = 50
    profile_every: int = 50
    target_gain: float = 1.0
    dtype: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    runs_dir: str = "runs"
    resume: str | None = None
    record_routing: RecordingConfig = field(default_factory=RecordingConfig)
    compare_with: str | None = None
    overwrite: bool = False
    tensorboard: bool = True
    report: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "sequence_length", "eval_sequences", "log_every"):
            if getattr(self, name) < 1:
                raise ep_moe.ConfigError(name, getattr(self, name), "at least 1")
        if self.eval_every < 1 or self.eval_every % self.log_every:
            rule = f"a multiple of log_every = {self.log_every}"
            raise ep_moe.ConfigError("eval_every", self.eval_every, rule)
        if self.stop_after is not None and self.stop_after < 1:
            raise ep_moe.ConfigError("stop_after", self.stop_after, "at least 1, or unset")


def train(config: RunConfig, process: ep_moe.Process) -> dict[str, Any]:
    """The whole run, on every rank; returns the final figures."""
    torch.manual_seed(config.seed)  # EP: one seed on all ranks gives the same experts on any number
    # EP: a group of their own, so that no exchange of the experts meets one of DDP's.
    model = LanguageModel(config.model, ep=process.new_group())
    model.to(process.device, DTYPES[config.dtype])
    ep_moe.ddp_ignore(model)  # EP: DDP must not average this rank's experts with another's
    replicated = model if process.group is None else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=(0.9, config.optim.beta2),
        weight_decay=config.optim.weight_decay,
        fused=True,
    )
    done = 0
    if config.resume:
        done = ep_moe.load_checkpoint(config.resume, model, optimizer)["step"]
    last = min(config.steps, config.stop_after or config.steps)
    if done >= last:
        name = "stop_after" if config.stop_after else "steps"
        raise ep_moe.ConfigError(name, last, f"more than the {done} of `resume`")
    steps = range(done + 1, last + 1)
    recorder = RoutingRecorder(config.record_routing, model.moe_layers(), process, steps)

    is_first = process.rank == 0
    if is_first and config.compare_with:
        path = Path(config.runs_dir, config.compare_with)
        read_run(path, field="compare_with")  # a wrong name shows now
    folder = RunFolder(config, writes=is_first)
    if is_first and config.report:
        from report import write_report  # before the training: a missing matplotlib shows now
    corpus = load_corpus()
    text = corpus.train.to(process.device)
    # EP: every rank calls the layer equally often, so the windows must divide among the ranks.
    count = math.ceil(config.eval_sequences / process.world_size) * process.world_size
    held_out = even_windows(corpus.held_out, count, config.sequence_length)
    held_out = held_out.to(process.device)
    start = describe(model, process, corpus)
    start["unigram_entropy"] = unigram_entropy(held_out[:, 1:])
    folder.record("start", done, start)
    if is_first:
        print("\n".join(f"{name:<22}{value}" for name, value in start.items()), flush=True)

    began = time.perf_counter()
    tokens_per_step = config.batch_size * config.sequence_length * process.world_size
    progress, profiles, shown = Progress(process, tokens_per_step), [], {}
    bar = tqdm(
        steps,
        disable=not is_first,
        unit="step",
        mininterval=1 if sys.stderr.isatty() else 20,  # seconds; a log file needs fewer lines
    )
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        seed = (config.seed, step, process.rank)  # a resumed run goes on with the next batch
        tokens = random_windows(text, config.batch_size, config.sequence_length, seed=seed)
        profiling = config.profile_every > 0 and step % config.profile_every == 0
        with (
            recorder.recording(step),
            profile_stages(process) if profiling else nullcontext() as stage_times,
        ):
            progress.add(train_step(model, replicated, optimizer, tokens, config))
        if stage_times:
            profiles.append(stage_times)
            folder.record("stages", step, stage_times)
        if step % config.log_every and step < last:
            continue

        values = progress.line() | {"lr": learning_rate(step, config)}
        folder.record("train", step, values)
        shown |= {name: f"{values[name]:.4g}" for name in ("loss", "tokens_per_second", "max_vio")}
        if step % config.eval_every == 0 or step == last:
            loss = held_out_loss(model, held_out, config.batch_size, process)
            folder.record("held_out", step, {"loss": loss})
            shown["held_out"] = f"{loss:.4g}"
        bar.set_postfix(shown, refresh=False)
        progress.start_line()

    with without_routed_experts(model):
        ablated_loss = held_out_loss(model, held_out, config.batch_size, process)
    final = {
        "held_out_loss": loss,
        "unigram_entropy": start["unigram_entropy"],
        "target_gain": config.target_gain,
        "loss_without_routed_experts": ablated_loss,
        "tokens_per_second": statistics.median(progress.speeds),
        **{name: values[name] for name in LOAD_FIGURES},
        "seconds": time.perf_counter() - began,
        "stages": median_times(profiles),
    }
    folder.record("final", last, final)
    folder.close()
    ep_moe.save_checkpoint(folder.path / "checkpoint", model, optimizer, {"step": last})
    recorder.write(folder.path / "routing.npz", {"run": config.name, **start})
    if is_first:
        print("\n" + verdict(folder.path))
        if config.report:
            print(write_report(folder.path))
    return final


def train_step(
    model: LanguageModel,
    replicated: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: Tensor,
    config: RunConfig,
) -> StepResult:
    """One optimizer step on tokens (B, L+1)."""
    logits, stats = replicated(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    # On a GPU the host decides how fast so small a model is; autograd's own thread costs it time.
    with torch.autograd.set_multithreading_enabled(False):
        (loss + ep_moe.total_aux(stats)).backward()
    # EP: torch's own clipping would see this rank's experts only, and scale each rank differently.
    grad_norm = ep_moe.clip_grad_norm_(model, config.optim.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return StepResult(
        loss.detach(),
        grad_norm,
        tokens_per_expert=torch.stack([s.tokens_per_expert for s in stats]),
        dropped_share=torch.stack([ep_moe.dropped_share(s) for s in stats]),
    )


@torch.no_grad()
def held_out_loss(
    model: LanguageModel, windows: Tensor, batch_size: int, process: ep_moe.Process
) -> float:
    """Mean loss in nats per byte over the windows (N, L+1), which the ranks share out."""
    total = torch.zeros((), dtype=torch.float64, device=process.device)
    for batch in windows[process.rank :: process.world_size].split(batch_size):
        logits, _ = model(batch[:, :-1])
        logits, targets = logits.flatten(0, 1).float(), batch[:, 1:].flatten()
        total += F.cross_entropy(logits, targets, reduction="sum")
    if process.group is not None:
        dist.all_reduce(total, group=process.group)
    return total.item() / windows[:, 1:].numel()


@contextmanager
def without_routed_experts(model: LanguageModel) -> Iterator[None]:
    """Inside, the routed experts of every layer answer 0."""

    def zero(_module: torch.nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return torch.zeros_like(output)

    hooks = [layer.experts.register_forward_hook(zero) for layer in model.moe_layers()]
    yield
    for hook in hooks:
        hook.remove()


def learning_rate(step: int, config: RunConfig) -> float:
    """Steps count from 1: a linear warm-up, then a cosine down to final_lr at the last one."""
    optim = config.optim
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    progress = (step - optim.warmup_steps) / (config.steps - optim.warmup_steps)
    return optim.final_lr + (optim.lr - optim.final_lr) * (1 + math.cos(math.pi * progress)) / 2


def main(argv: Sequence[str] | None = None) -> None:
    """The command line; torchrun starts it once per rank."""
    config = parse_args(RunConfig, argv)
    process = ep_moe.init_process()  # EP: binds this rank to its GPU before the first collective
    level = logging.INFO if process.rank == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s")
    try:
        train(config, process)
    except (ep_moe.ConfigError, ep_moe.BackendUnavailable) as error:
        raise SystemExit(f"train_lm.py: {error}") from None
    process.close()


if __name__ == "__main__":
    main()
