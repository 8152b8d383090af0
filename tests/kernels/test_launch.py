"""Kernels that are launched as they were compiled for equal arguments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ep_moe.kernels.launch import bound
from tests.kernels.stand_in import TARGETS

ROOT = Path(__file__).parents[2]


@bound
@triton.jit(do_not_specialize=["n", "far"])
def _scaled(x, more, out, n, far: tl.int64, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n) * SCALE
    if more is not None:
        value += tl.load(more + at, mask=at < n)
    tl.store(out + at, value + (far >> 40), mask=at < n)


def scaled(x, more, *, scale=2, far=3 << 40, warps=4):
    """2 x + more + 3"""
    out = torch.empty_like(x)
    constants = {"SCALE": scale, "BLOCK": 64, "num_warps": warps}
    _scaled((1, 1, 1), (x, more, out), (len(x), far), constants)
    return out


@bound
@triton.jit(do_not_specialize=["scale"])
def _copied(x, out, scale, BLOCK: tl.constexpr):
    """Descriptors or not: what they are does not follow from the constants."""
    at = tl.arange(0, BLOCK)
    value = (tl.load(x + at) if x.dtype.is_ptr() else x.load([0])) * scale
    if out.dtype.is_ptr():
        tl.store(out + at, value)
    else:
        out.store([0], value.to(out.dtype))


def copied(x, *, described="x out", scale=0.5, block=64):
    """scale * x. described: the arguments that are descriptors."""
    arguments = {"x": x, "out": torch.empty_like(x)}
    out = arguments["out"]
    for name in described.split():
        arguments[name] = TensorDescriptor.from_tensor(arguments[name], [block])
    _copied((1, 1, 1), tuple(arguments.values()), (scale,), {"BLOCK": block})
    return out


def test_each_launch_has_its_own_arguments(device):
    """Whatever stands in the cache from those before."""
    x = torch.arange(65, dtype=torch.float32, device=device)
    for _ in "12":
        assert torch.equal(scaled(x[:64], None), 2 * x[:64] + 3)
        assert torch.equal(scaled(x[:5], None, far=1 << 40), 2 * x[:5] + 1)
        assert torch.equal(scaled(x[1:], None), 2 * x[1:] + 3)
        assert torch.equal(scaled(x[:64].double(), None), 2 * x[:64].double() + 3)
        assert torch.equal(scaled(x[1:], x[:64], scale=4), 4 * x[1:] + x[:64] + 3)
        assert torch.equal(scaled(x[:0], None), x[:0])


def test_a_descriptor_may_stand_where_a_tensor_may(device):
    x = torch.randn(64, device=device)
    for described in ("x out", "x", "out", "", "x out"):
        assert torch.equal(copied(x, described=described), x * 0.5), described
    assert torch.equal(copied(x.half()), x.half() * 0.5)
    assert torch.equal(copied(2 * x, scale=0.25), x * 0.5)


@pytest.mark.parametrize(
    ("target", "case", "compiled"),
    [
        ("sm_90", "scaled", [1, 0, 0, 1, 0, 1, 1, 1, 1, 0, 1, 0]),
        ("gfx942", "large", [1, 1, 0, 0]),
        ("sm_90", "few", [3, 0, 0, 0]),
        ("sm_90", "numbers", [1]),
        ("sm_90", "descriptors", [1, 0, 1, 1, 1, 1, 1, 1, 0]),
        ("sm_90", "products", [1, 0] * 19),
    ],
)
def test_it_is_compiled_once_for_equal_arguments(target, case, compiled):
    printed = output_of("tests.kernels.bound_once", target, case)
    assert [int(number) for number in printed.split()] == compiled


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_the_kernel_that_triton_would_launch(target):
    """And none of them is left out, but on others than Hopper its own three."""
    launches, missing = output_of("tests.kernels.same_kernel", target).splitlines()
    assert int(launches) > 1000
    assert len(missing.split()) == (0 if target == "sm_90" else 3)


def output_of(module: str, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout
