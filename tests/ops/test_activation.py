"""Activations and their hand-written backward, against the formulas and torch autograd."""

import math

import pytest
import torch

from ep_moe import ops
from ep_moe.testing import assert_close
from tests.helpers import DTYPES, LAYOUTS, in_layout, leaf

NAMES = pytest.mark.parametrize("name", ops.ACTIVATIONS)
SHAPES = [(0, 5), (1, 1), (3, 17), (33, 5)]


def formula(name, gate, up):
    """One element, in plain floats."""
    if name == "swiglu":
        return gate / (1 + math.exp(-gate)) * up
    if name == "geglu":
        return gate * math.erfc(-gate / math.sqrt(2)) / 2 * up
    if name == "relu2":
        return max(gate, 0.0) ** 2
    gate, up = min(gate, 7.0), min(max(up, -7.0), 7.0)
    return gate / (1 + math.exp(-1.702 * gate)) * (up + 1)


def in_torch(name, pre):
    """The same, differentiable."""
    if name == "relu2":
        return pre.clamp(min=0) ** 2
    gate, up = pre.chunk(2, dim=1)
    if name == "swiglu":
        return gate * gate.sigmoid() * up
    if name == "geglu":
        return gate * (-gate / math.sqrt(2)).erfc() / 2 * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * (1.702 * gate).sigmoid() * (up + 1)


def tolerance(dtype):
    """In the tails fp16 is subnormal, so a lone value has fewer bits than eps says."""
    narrow = {torch.bfloat16: 2**-7, torch.float16: 2**-8}
    return {torch.float64: 1e-12, torch.float32: 1e-6, **narrow}[dtype]


def halves(name):
    return 1 if name == "relu2" else 2


def random_pre(name, rows, width, dtype, device):
    """Wide enough that the clamps bite."""
    return (torch.randn(rows, halves(name) * width, device=device) * 5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,width", SHAPES)
@NAMES
def test_forward(name, rows, width, dtype, device):
    pre = random_pre(name, rows, width, dtype, device)
    got = ops.ACTIVATIONS[name].forward(pre)
    assert got.dtype == dtype
    values = [[formula(name, r[i], r[i - width]) for i in range(width)] for r in pre.tolist()]
    expected = torch.tensor(values, dtype=torch.float64, device=device).view(rows, width)
    assert_close(got, expected, name="h", tolerance=tolerance(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,width", SHAPES)
@NAMES
def test_backward(name, rows, width, dtype, layout, device):
    pre = random_pre(name, rows, width, dtype, device)
    d_h = torch.randn(rows, width, device=device).to(dtype)
    expected = leaf(pre)
    in_torch(name, expected).backward(d_h.double())
    got = ops.ACTIVATIONS[name].backward(in_layout(d_h, layout), in_layout(pre, layout))
    assert got.dtype == dtype
    assert_close(got, expected.grad, name="d_pre", tolerance=tolerance(dtype))


@NAMES
def test_forward_is_differentiable_by_torch_too(name, device):
    """Shared experts use it that way."""
    pre = random_pre(name, 9, 5, torch.float64, device).requires_grad_()
    d_h = torch.randn(9, 5, dtype=torch.float64, device=device)
    ops.ACTIVATIONS[name].forward(pre).backward(d_h)
    got = ops.ACTIVATIONS[name].backward(d_h, pre.detach())
    assert_close(got, pre.grad, name="d_pre")


@NAMES
def test_huge_inputs_stay_finite(name, device):
    pre = torch.tensor([[-1e4, 1e4, 0.0, 1.0, -1.0, 1.0]], device=device)
    activation = ops.ACTIVATIONS[name]
    assert activation.forward(pre).isfinite().all()
    assert (
        activation.backward(torch.ones(1, 6 // halves(name), device=device), pre).isfinite().all()
    )


def test_clamps_let_no_gradient_through(device):
    """Gate above 7 only, up beyond 7 on both sides."""
    pre = torch.tensor([[8.0, -8.0, 1.0, 1.0, 1.0, 1.0, 9.0, -9.0]], device=device)
    d_pre = ops.ACTIVATIONS["swiglu_clamped"].backward(torch.ones(1, 4, device=device), pre)
    assert (d_pre != 0).tolist() == [[False, True, True, True, True, True, False, False]]
