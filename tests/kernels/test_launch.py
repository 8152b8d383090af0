"""Kernels that are launched as they were compiled for equal arguments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from ep_moe.kernels.launch import bound

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


@pytest.mark.parametrize(
    ("target", "case", "compiled"),
    [
        ("sm_90", "scaled", [1, 0, 0, 1, 0, 1, 1, 1, 1, 0, 1, 0]),
        ("gfx942", "large", [1, 1, 0, 0]),
        ("sm_90", "few", [3, 0, 0, 0]),
    ],
)
def test_it_is_compiled_once_for_equal_arguments(target, case, compiled):
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.bound_once", target, case],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
    )
    assert [int(number) for number in run.stdout.split()] == compiled
