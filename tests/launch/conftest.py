"""The programs in launch/ find their neighbours in their own folder, as they do when started."""

import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
sys.path.insert(0, str(LAUNCH))


@pytest.fixture
def small_run(tmp_path):
    """Makes a RunConfig of a tiny model that trains for a few steps."""
    from lm import LMConfig
    from train_lm import OptimConfig, RunConfig

    from ep_moe import MoEConfig

    def make(**changes):
        moe = MoEConfig(hidden_size=16, intermediate_size=16, num_experts=4, top_k=2)
        values = {
            "name": "small",
            "model": LMConfig(moe=moe, num_layers=2, num_heads=2),
            "steps": 3,
            "batch_size": 2,
            "sequence_length": 16,
            "optim": OptimConfig(warmup_steps=10),
            "eval_sequences": 4,
            "log_every": 2,
            "eval_every": 2,
            "profile_every": 2,
            "runs_dir": str(tmp_path),
            "report": False,
            "tensorboard": False,
        }
        return RunConfig(**values | changes)

    return make
