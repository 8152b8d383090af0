"""Elementwise functions: their values, and that these do not depend on where an element stands.

On a CPU torch's own sigmoid, silu and softplus do: the last few elements of a run are computed by
other instructions than the rest.
"""

import math

import pytest
import torch

from ep_moe import ops
from ep_moe.ops import numerics

INF, NAN = math.inf, math.nan
WIDE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def sigma(x):
    """In fp64; neither it nor its slope cancels or overflows."""
    return torch.where(x < 0, x.exp(), 1.0) / (1 + (-x.abs()).exp())


def sigma_slope(x):
    return (-x.abs()).exp() / (1 + (-x.abs()).exp()).square()


FORMULAS = {
    "sigmoid": sigma,
    "silu": lambda x: x * sigma(x),
    "softplus": lambda x: x.clamp_min(0.0) + (-x.abs()).exp().log1p(),
}
SLOPES = {
    "sigmoid": sigma_slope,
    "silu": lambda x: sigma(x) + x * sigma_slope(x),
    "softplus": sigma,
}
NAMES = pytest.mark.parametrize("name", FORMULAS)


def values(dtype, device):
    near, far = torch.randn(2000, device=device) * 4, torch.linspace(-85.0, 85.0, 2000)
    return torch.cat([near, far.to(device)]).to(dtype)


def with_slope(function):
    """x (n,) -> values and derivatives (2,n)"""

    def both(x):
        x = x.detach().requires_grad_()
        y = function(x)
        y.backward(torch.full_like(y, 0.7))
        return torch.stack([y.detach(), x.grad])

    return both


def of_activation(name):
    """gates (n,) -> h and d_pre (3,n) of one row whose up half is 1.3"""
    activation = ops.ACTIVATIONS[name]

    def both(gate):
        row = gate if name == "relu2" else torch.cat([gate, torch.full_like(gate, 1.3)])
        d_h = torch.full_like(gate, 0.7)[None]
        forward, backward = activation.forward(row[None]), activation.backward(d_h, row[None])
        return torch.cat([forward.view(1, -1), backward.view(-1, len(gate))])

    return both


def moving(function, dtype, device):
    """How many of 600 values change with their place in runs of 1 to 40."""
    x = (torch.randn(600, device=device) * 4).to(dtype)
    expected = function(x.repeat_interleave(64))[:, ::64]
    changed = torch.zeros(len(x), dtype=torch.bool, device=device)
    for length in range(1, 41):
        for first in range(0, len(x), length):
            run = slice(first, first + length)
            changed[run] |= (function(x[run].clone()) != expected[:, run]).any(dim=0)
    return int(changed.sum())


PLACED = {name: with_slope(getattr(numerics, name)) for name in FORMULAS} | {
    name: of_activation(name) for name in ops.ACTIVATIONS
}


@WIDE
@pytest.mark.parametrize("name", PLACED)
def test_an_element_is_the_same_wherever_it_stands(name, dtype, device):
    assert moving(PLACED[name], dtype, device) == 0


def test_one_that_moves_is_found(device):
    """Or the test above could not fail, where torch's own functions stay in their place."""

    def last_elements_differ(x):
        whole = len(x) // 8 * 8
        return torch.cat([x[:whole], x[whole:] * (1 + 2**-22)])[None]

    assert moving(last_elements_differ, torch.float32, device) > 500


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@NAMES
def test_values_to_the_last_bits(name, dtype, device):
    """Relative to each value; one more for the low bits of a subnormal."""
    x = values(dtype, device)
    if name != "sigmoid":  # the others are asked for fp32 and fp64 only
        x = x.float()
    got, expected = getattr(numerics, name)(x), FORMULAS[name](x.double())
    assert got.dtype == x.dtype
    limit = torch.finfo(x.dtype)
    allowed = 2.5 * limit.eps * expected.abs() + limit.smallest_normal * limit.eps
    assert ((got.double() - expected).abs() <= allowed).all()


@WIDE
@NAMES
def test_derivatives(name, dtype):
    """On a CPU: on a GPU they are torch's own, which far out have another relative error."""
    x = values(dtype, torch.device("cpu"))
    x[:3] = torch.tensor([0.0, -0.0, 1e-30])
    expected = 0.7 * SLOPES[name](x.double())
    got = with_slope(getattr(numerics, name))(x)[1].double()
    # silu's derivative has a zero, where only the absolute error means anything.
    floor = 1.0 if name == "silu" else 0.0
    allowed = 8 * torch.finfo(dtype).eps * expected.abs().clamp_min(floor)
    assert ((got - expected).abs() <= allowed).all()


@WIDE
@pytest.mark.parametrize(
    "name,expected",
    [
        ("sigmoid", [1.0, 0.0, NAN, 1.0, 0.0]),
        ("silu", [INF, NAN, NAN, 1e4, 0.0]),  # -inf * 0, as torch has it
        ("softplus", [INF, 0.0, NAN, 1e4, 0.0]),
    ],
)
def test_both_ends_of_the_number_line(name, expected, dtype, device):
    x = torch.tensor([INF, -INF, NAN, 1e4, -1e4], dtype=dtype, device=device)
    got = with_slope(getattr(numerics, name))(x)
    expected = torch.tensor(expected, dtype=dtype, device=device)
    assert torch.equal(got[0].nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    assert got[1, 3:].isfinite().all()
    if name == "sigmoid":
        assert got[1, :2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("asked", ["ieee", "tf32"])
def test_kernels_multiply_in_tf32_only_where_torch_would_and_never_in_exact(asked):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    torch.backends.cuda.matmul.fp32_precision = asked
    try:
        assert numerics.fp32_precision(gpu, "fast") == asked
        assert numerics.fp32_precision(gpu, "exact") == "ieee"
        assert numerics.fp32_precision(cpu, "fast") == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"
