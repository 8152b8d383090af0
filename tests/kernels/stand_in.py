"""A Triton driver for a GPU that is not there: launchers run, kernels compile, nothing starts."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

# Bytes that a program may have: the launch of one that asks for more fails, as it would there.
SHARED_MEMORY = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}


class StandIn:
    """Active from the moment it is made."""

    def __init__(self, target: str) -> None:
        self.target, self.utils = target, self
        self.built: list[dict[str, Any]] = []
        self.launched: tuple[Any, ...] = ()  # what the last launch was given
        triton.runtime.driver.set_active(self)
        torch.version.hip = "a stand-in" if TARGETS[target].backend == "hip" else None

    def take(self) -> list[dict[str, Any]]:
        """What was built since the last call: each kernel's name and what it needs of the GPU."""
        taken, self.built = self.built, []
        return taken

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.target]

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self.target], "multiprocessor_count": 132}

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launched = args

        return launch

    def unload_module(self, module: Any) -> None:
        pass

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple:
        row: dict[str, Any] = {"kernel": name, "shared": shared}
        if TARGETS[self.target].backend == "cuda":
            row |= resources(kernel)
        self.built.append(row)
        return object(), object(), 0, 0, 1024


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, bytes that it spills, and how often the instructions stand in it that
    multiply (HGMMA, HMMA), move tiles (UTMALDG, UTMASTG), load and store 16 bits (LDG.E.U16,
    STG.E.U16), and wait until all stored tiles have left (DEPBAR.LE SB0, 0x0)."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def output(tool: str, *options: str) -> str:
            command = [tools / tool, *options, file.name]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage = output("cuobjdump", "--dump-resource-usage")
        sass = output("cuobjdump", "--dump-sass")
    registers, stack, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage).groups()
    )
    names = ("HGMMA", "HMMA", "UTMALDG", "UTMASTG", "LDG.E.U16", "STG.E.U16")
    names += ("DEPBAR.LE SB0, 0x0",)
    counts = {name: sass.count(f" {name}") for name in names}
    return {"registers": registers, "spilled": stack + local, **counts}
