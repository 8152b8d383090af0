"""`import ep_moe` and the CPU layer need neither triton, deep_ep, transformers nor a GPU, and the
import is not half of torch._dynamo's."""

import subprocess
import sys

PROGRAM = """
import sys

for name in {blocked!r}:
    sys.modules[name] = None  # what an import then finds is what it finds where it is not installed
import torch, ep_moe, ep_moe.testing, ep_moe.cli, ep_moe.doctor, ep_moe.oracle
assert "torch._dynamo" not in sys.modules
config = ep_moe.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
y, _ = ep_moe.MoELayer(config)(torch.randn(3, 8))
y.sum().backward()
loaded = {blocked!r} & {{name for name, module in sys.modules.items() if module is not None}}
assert not loaded, loaded
print("imported")
"""


def test_import_without_the_optional_packages():
    """BB-97"""
    blocked = {"triton", "deep_ep", "transformers", "matplotlib", "tensorboard", "tqdm", "rich"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocked=blocked)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )
    assert run.stdout.strip() == "imported", run.stderr
