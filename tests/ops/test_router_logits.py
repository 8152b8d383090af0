"""fp32 logits from tokens of any dtype."""

import pytest
import torch

from ep_moe import ops
from ep_moe.testing import assert_close
from tests.helpers import DTYPES, LAYOUTS, in_layout, leaf

SHAPES = [(0, 5, 3), (1, 1, 1), (17, 33, 5), (3, 5, 257)]  # T, H, E


def make(T, H, E, dtype, device):
    """x, weight, d_logits"""
    x, weight = (torch.randn(n, H, device=device).to(dtype) for n in (T, E))
    accumulated = torch.promote_types(dtype, torch.float32)
    return x, weight, torch.randn(T, E, device=device, dtype=accumulated)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T,H,E", SHAPES)
def test_forward_is_fp32_or_better(T, H, E, dtype, layout, device):
    x, weight, _ = make(T, H, E, dtype, device)
    got = ops.router_logits(in_layout(x, layout), weight)
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    rows = [[(t.double() * w.double()).sum().item() for w in weight] for t in x]
    expected = torch.tensor(rows, dtype=torch.float64, device=device).view(T, E)
    assert_close(got, expected, name="logits")


@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T,H,E", SHAPES)
def test_backward(T, H, E, dtype, layout, device):
    x, weight, d_logits = make(T, H, E, dtype, device)
    if layout == "expanded":
        d_logits = torch.ones((), dtype=d_logits.dtype, device=device).expand(T, E)
    leaves = [leaf(t) for t in (x, weight)]
    (leaves[0] @ leaves[1].t()).backward(d_logits.double())
    got = ops.router_logits_backward(
        in_layout(d_logits, layout), x, weight, needs_x=True, needs_weight=True
    )
    for name, value, expected in zip(("x", "weight"), got, leaves, strict=True):
        assert value.dtype == dtype
        limit = {torch.float64: 1e-12, torch.float32: 3e-6}.get(dtype, torch.finfo(dtype).eps)
        assert_close(value, expected.grad, name=name, tolerance=limit)


@pytest.mark.parametrize("needs_x,needs_weight", [(True, False), (False, True), (False, False)])
def test_only_what_is_needed_is_computed(needs_x, needs_weight, device):
    x, weight, d_logits = make(4, 3, 5, torch.float32, device)
    grads = ops.router_logits_backward(
        d_logits, x, weight, needs_x=needs_x, needs_weight=needs_weight
    )
    assert (grads.x is not None, grads.weight is not None) == (needs_x, needs_weight)


def test_near_equal_tokens_do_not_tie(device):
    """Logits 257 and 258 are one bf16 number: there a token would go elsewhere."""
    x = torch.ones(1, 258, device=device).bfloat16()
    weight = torch.ones(2, 258, device=device).bfloat16()
    weight[0, -1] = 0.0
    assert ops.router_logits(x, weight).tolist() == [[257.0, 258.0]]
