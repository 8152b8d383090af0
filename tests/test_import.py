"""`import ep_moe` and the CPU layer need neither triton, deep_ep, transformers nor a GPU."""

import subprocess
import sys

PROGRAM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import torch, ep_moe, ep_moe.testing, ep_moe.cli, ep_moe.oracle
config = ep_moe.MoEConfig(hidden_size=8, intermediate_size=8, num_experts=4, top_k=2)
y, _ = ep_moe.MoELayer(config)(torch.randn(3, 8))
y.sum().backward()
loaded = {blocked!r} & {{name.split(".")[0] for name in sys.modules}}
assert not loaded, loaded
print("imported")
"""


def test_import_without_the_optional_packages():
    blocked = {"triton", "deep_ep", "transformers", "matplotlib", "tensorboard", "tqdm", "rich"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(blocked=blocked)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""},
    )
    assert run.stdout.strip() == "imported", run.stderr
