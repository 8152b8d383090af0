"""fp32 logits from tokens of any dtype."""

from contextlib import contextmanager

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


def settings(device):
    return torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn


@contextmanager
def process_wide(device, set_precision):
    """What the process asks of fp32 products, put back afterwards."""
    before = torch.backends.fp32_precision
    try:
        set_precision(settings(device))
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.fp32_precision = before
        for backend in (torch.backends.cuda, torch.backends.mkldnn):
            backend.matmul.fp32_precision = "none"


def by_op(backend):
    backend.matmul.fp32_precision = "tf32"


def for_all(backend):
    torch.backends.fp32_precision = "tf32"


LOWERED = {
    "high": lambda backend: torch.set_float32_matmul_precision("high"),
    "medium": lambda backend: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda backend: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "by op": by_op,
    "for all": for_all,
}


def forward_and_backward(x, weight, d_logits, numerics):
    grads = ops.router_logits_backward(
        d_logits, x, weight, needs_x=True, needs_weight=True, numerics=numerics
    )
    return [ops.router_logits(x, weight, numerics=numerics), *grads]


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("lowered", LOWERED)
def test_in_full_fp32_whatever_the_process_asks_for(lowered, numerics, device, monkeypatch):
    inputs = make(70, 256, 20, torch.float32, device)
    expected = forward_and_backward(*inputs, numerics)
    during, product = [], torch.mm

    def watched(*args, **kwargs):
        during.append(settings(device).matmul.fp32_precision)
        return product(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", watched)
    with process_wide(device, LOWERED[lowered]):
        asked = settings(device).matmul.fp32_precision
        got = forward_and_backward(*inputs, numerics)
        assert settings(device).matmul.fp32_precision == asked
    # Some CPUs have no products of less than fp32, so equal values alone would prove nothing there.
    assert len(during) >= 3
    assert not {"tf32", "bf16"} & set(during)
    for name, value, as_before in zip(("logits", "x", "weight"), got, expected, strict=True):
        assert torch.equal(value, as_before), name


@pytest.mark.parametrize("lowered", ["medium", "by op", "for all"])
def test_the_setting_is_put_back_after_an_error(lowered, device):
    x, weight, _ = make(3, 5, 2, torch.float32, device)
    with process_wide(device, LOWERED[lowered]):
        asked = settings(device).matmul.fp32_precision
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            ops.router_logits(x, weight[:, :4])
        assert settings(device).matmul.fp32_precision == asked


def test_a_wider_setting_still_reaches_the_product_afterwards(device):
    """The router's product must not turn what it follows into a setting of its own."""
    x, weight, _ = make(3, 5, 2, torch.float32, device)
    with process_wide(device, for_all):
        ops.router_logits(x, weight)
        torch.backends.fp32_precision = "ieee"
        assert settings(device).matmul.fp32_precision == "ieee"


@pytest.mark.gpu
def test_tf32_would_change_the_logits(require_gpu):
    """Or the tests above could not fail on a GPU by their values."""
    x, weight, _ = make(70, 256, 20, torch.float32, torch.device("cuda"))
    expected = x @ weight.t()
    with process_wide(x.device, LOWERED["high"]):
        assert not torch.equal(x @ weight.t(), expected)
