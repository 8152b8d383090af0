"""Compile every kernel for GPUs that are not here: `python -m tests.kernels.compile_all TARGET...`.

Prints one JSON object a kernel: target, name, variant, and on NVIDIA registers and spilled bytes.
A kernel that does not compile ends the program.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from ep_moe.kernels import pack, select, select_backward

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def variants() -> Iterator[tuple[str, JITFunction, dict[str, str], dict[str, Any], int]]:
    """(variant, kernel, types of its run-time arguments, constants, warps); a pointer that is not
    named is None."""
    forward = {
        "logits": "*fp32",
        "ids_out": "*i32",
        "weights_out": "*fp32",
        "stride": "i32",
        "tokens": "i32",
        "scale": "fp32",
    }
    backward = {
        "d_weights": "*fp32",
        "logits": "*fp32",
        "ids_in": "*i32",
        "weights_in": "*fp32",
        "d_logits": "*fp32",
        "stride": "i32",
        "tokens": "i32",
        "inverse_scale": "fp32",
    }
    sums = {"p_out": "*fp32", "z_out": "*fp32", "chosen_out": "*fp32"}
    d_sums = {"d_p_sum": "*fp32", "d_z_sum": "*fp32", "chosen_in": "*fp32"}
    mask, bias = {"padding_mask": "*u8"}, {"expert_bias": "*fp32"}
    softmax = {"SCORING": "softmax", "RENORMALIZE": True, "UNIFORM": False}
    grouped = softmax | {"E": 256, "K": 8, "GROUPS": 8, "KEPT": 4, "TOP2": False, "LANES": 32}
    v3 = grouped | {"SCORING": "sigmoid", "TOP2": True}
    plain = grouped | {"GROUPS": 1, "KEPT": 1}
    yield "grouped", select._select_forward, forward, grouped, 1
    yield "DeepSeek-V3, sums", select._select_forward, forward | bias | sums, v3, 1
    yield "plain bf16", select._select_forward, forward | mask | {"logits": "*bf16"}, plain, 1
    given = forward | mask | {"given": "*i32"}
    yield "given", select._select_forward, given, plain | {"UNIFORM": True}, 1
    odd = plain | {"E": 160, "K": 10, "SCORING": "sqrtsoftplus", "RENORMALIZE": False}
    yield "E = 160, K = 10, sums", select._select_forward, forward | mask | sums, odd, 1
    sizes = {"E": 256, "K": 8, "EXPERTS": 256, "CHOICES": 8}
    yield "renormalised", select_backward._select_backward, backward, softmax | sizes, 1
    full = softmax | sizes | {"RENORMALIZE": False}
    yield "softmax", select_backward._select_backward, backward | {"chosen_in": "*fp32"}, full, 1
    sigmoid = softmax | sizes | {"SCORING": "sigmoid", "UNIFORM": True}
    yield "sigmoid, sums", select_backward._select_backward, backward | d_sums | mask, sigmoid, 1
    types = {"ids": "*i32", "counts": "*i32", "slots": "i32"}
    yield "", pack._count, types, {"E": 256, "BINS": 256, "BLOCK": pack.BLOCK}, 4
    columns = {"E": 256, "SCANNED": pack.SCANNED, "COLUMNS": pack.COLUMNS}
    types = {"counts": "*i32", "totals": "*i32", "blocks": "i32"}
    yield "", pack._sum_blocks, types, columns, 4
    place = {"E": 256, "K": 8, "EXPERTS": 256, "BLOCK": pack.BLOCK}
    pointers = "ids before totals arrived_of_packed choice_of_packed packed_of_arrived offsets"
    types = dict.fromkeys(pointers.split(), "*i32") | {"slots": "i32"}
    yield "", pack._place, types, place, 4


def main(target: str) -> None:
    for variant, kernel, types, constants, warps in variants():
        unknown = (types.keys() | constants.keys()) - set(kernel.arg_names)
        assert not unknown, f"{kernel.__name__} has no arguments {sorted(unknown)}"
        signature = {arg: types.get(arg, "constexpr") for arg in kernel.arg_names}
        fixed = {(i,): constants.get(a) for i, a in enumerate(kernel.arg_names) if a not in types}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, arg in enumerate(kernel.arg_names)
            if types.get(arg, "").startswith("*")
        }
        options = {"num_warps": warps, "enable_fp_fusion": kernel is not select._select_forward}
        source = ASTSource(kernel, signature=signature, constexprs=fixed, attrs=aligned)
        built = triton.compile(source, target=TARGETS[target], options=options)
        found = resources(built.asm["cubin"]) if "cubin" in built.asm else {}
        row = {"target": target, "kernel": kernel.__name__, "variant": variant, **found}
        print(json.dumps(row), flush=True)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes that it spills."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listed = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack, local = map(
        int, re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", listed).groups()
    )
    return {"registers": registers, "spilled": stack + local}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        main(name)
