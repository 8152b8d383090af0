"""What a run says of itself: where and on what it ran, and whether it did what it is for."""

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comparison import read_runs, summary
from corpus import Corpus
from lm import LanguageModel
from progress import load_ranks
from stages import format_stages

from ep_moe.parallel import Process


def describe(model: LanguageModel, process: Process, corpus: Corpus) -> dict[str, Any]:
    """What a reader of the figures must know."""
    config = model.config
    dense = sum(p.numel() for name, p in model.named_parameters() if ".moe." not in name)
    per_layer = config.moe.parameters()
    on_gpu = process.device.type == "cuda"
    return {
        "ranks": process.world_size,
        "device": torch.cuda.get_device_name(process.device) if on_gpu else "cpu",
        "backend": "none" if process.group is None else dist.get_backend(process.group),
        "transport": model.moe_layers()[0].transport.name,
        "ranks_of_load_figures": load_ranks(config.moe.num_experts, process),
        "threads_per_rank": torch.get_num_threads(),
        "parameters": dense + config.num_layers * per_layer.total,
        "parameters_activated": dense + config.num_layers * per_layer.activated,
        "corpus_files": corpus.num_files,
        "corpus_bytes": len(corpus.train) + len(corpus.held_out),
        "corpus_digest": corpus.digest,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }


def commit() -> str:
    """The commit of this checkout, `-dirty` when files differ from it; where the code has left its
    repository, that in EP_MOE_COMMIT, or 'unknown'."""
    given = os.environ.get("EP_MOE_COMMIT", "unknown")
    if shutil.which("git") is None:
        return given
    here = str(Path(__file__).parent)
    command = ["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or given


def verdict(path: Path) -> str:
    """The final figures of the run in the folder `path` as text, beside those of the run that it is
    compared with."""
    run, *others = read_runs(path)
    final = run.metrics["final"][0]
    loss, unigram = final["held_out_loss"], final["unigram_entropy"]
    gain, target = unigram - loss, final["target_gain"]
    without = final["loss_without_routed_experts"]
    reached = "reached" if gain >= target else "NOT reached"
    lines = [
        f"held-out loss {loss:.3f} nats per byte, {gain:.3f} below the unigram entropy "
        f"{unigram:.3f}: the target, {target:g} below, is {reached}",
        f"without the routed experts {without:.3f}: {'worse' if without > loss else 'NOT worse'}",
        f"{final['tokens_per_second']:,.0f} tokens per second over all ranks, "
        f"{final['seconds']:.0f} s of training and evaluation",
        f"MaxVio {final['max_vio']:.2f}, busiest rank {final['busiest_rank']:.2f} times the mean, "
        f"{final['dead_experts']} dead experts",
    ]
    lines += [summary(run, other) for other in others]
    if final["stages"]:
        lines += ["", format_stages(final["stages"])]
    return "\n".join(lines)
