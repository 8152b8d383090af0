"""One product per expert over the rows it owns: forward, input, weight and bias gradients."""

import itertools

import pytest
import torch

from ep_moe import InputError, ops
from ep_moe.testing import assert_close
from tests.helpers import (
    DTYPES,
    GROUPS,
    LAYOUTS,
    NOT_POWERS_OF_TWO,
    in_layout,
    leaf,
    offsets_of,
    owners_of,
)

SIZES = pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())
ODD = (1, 3, 5, 17, 33)


def loop(x, weight, sizes, bias=None):
    """One row at a time; differentiable. Run it in float64."""
    out = [weight[e] @ row for row, e in zip(x, owners_of(sizes), strict=True)]
    if bias is not None:
        out = [y + bias[e] for y, e in zip(out, owners_of(sizes), strict=True)]
    return torch.stack(out) if out else x.new_zeros(0, weight.shape[1])


def make(sizes, n_in, n_out, dtype, device):
    """x, weight, bias, d_y"""
    shapes = [(sum(sizes), n_in), (len(sizes), n_out, n_in), (len(sizes), n_out)]
    return [torch.randn(s, device=device).to(dtype) for s in [*shapes, (sum(sizes), n_out)]]


def tolerance(dtype):
    """Half an ulp of the largest from the one rounding at the end, and the order of the sum."""
    return {torch.float64: 1e-12, torch.float32: 3e-6}.get(dtype, 0.6 * torch.finfo(dtype).eps)


def gradients(x, weight, bias, d_y, sizes):
    """What torch autograd says about the loop."""
    leaves = [leaf(t) for t in (x, weight, bias)]
    y = loop(leaves[0], leaves[1], sizes, leaves[2])
    if len(x):
        y.backward(d_y.double())
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@SIZES
def test_forward(sizes, dtype, biased, layout, device):
    x, weight, bias, _ = make(sizes, 17, 5, dtype, device)
    bias = bias if biased else None
    got = ops.grouped_gemm(in_layout(x, layout), weight, offsets_of(sizes, device), bias)
    assert got.dtype == dtype
    expected = loop(x.double(), weight.double(), sizes, None if bias is None else bias.double())
    assert_close(got, expected, name="y", tolerance=tolerance(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@SIZES
def test_backward(sizes, dtype, layout, device):
    x, weight, bias, d_y = make(sizes, 17, 5, dtype, device)
    offsets, d_y_stored = offsets_of(sizes, device), in_layout(d_y, layout)
    got = {
        "d_x": ops.grouped_gemm_dgrad(d_y_stored, weight, offsets),
        "d_weight": ops.grouped_gemm_wgrad(d_y_stored, in_layout(x, layout), offsets),
        "d_bias": ops.grouped_bias_grad(d_y_stored, offsets),
    }
    for (name, value), expected in zip(
        got.items(), gradients(x, weight, bias, d_y, sizes), strict=True
    ):
        assert value.dtype == dtype
        assert_close(value, expected, name=name, tolerance=tolerance(dtype))


def test_gradient_of_a_sum(device):
    """y.sum() sends back one stored element, expanded."""
    sizes = GROUPS["ragged"]
    x, weight, bias, d_y = make(sizes, 3, 4, torch.float64, device)
    d_y, offsets = torch.ones((), dtype=d_y.dtype, device=device).expand_as(d_y), offsets_of(sizes)
    d_x, d_weight, d_bias = gradients(x, weight, bias, d_y, sizes)
    assert_close(ops.grouped_gemm_dgrad(d_y, weight, offsets), d_x, name="d_x")
    assert_close(ops.grouped_gemm_wgrad(d_y, x, offsets), d_weight, name="d_weight")
    assert_close(ops.grouped_bias_grad(d_y, offsets), d_bias, name="d_bias")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_in,n_out", list(zip(ODD, ODD[::-1], strict=True)))
def test_odd_widths(n_in, n_out, dtype, device):
    sizes = (3, 1, 0, 5)
    x, weight, bias, d_y = make(sizes, n_in, n_out, dtype, device)
    offsets, limit = offsets_of(sizes, device), tolerance(dtype)
    y = loop(x.double(), weight.double(), sizes, bias.double())
    d_x, d_weight, _ = gradients(x, weight, bias, d_y, sizes)
    assert_close(ops.grouped_gemm(x, weight, offsets, bias), y, name="y", tolerance=limit)
    assert_close(ops.grouped_gemm_dgrad(d_y, weight, offsets), d_x, name="d_x", tolerance=limit)
    assert_close(
        ops.grouped_gemm_wgrad(d_y, x, offsets), d_weight, name="d_weight", tolerance=limit
    )


@pytest.mark.parametrize("num_experts", NOT_POWERS_OF_TWO)
def test_any_number_of_experts(num_experts, device):
    sizes = torch.randint(4, (num_experts,)).tolist()
    x, weight, bias, d_y = make(sizes, 3, 2, torch.float64, device)
    offsets = offsets_of(sizes, device)
    expected = loop(x, weight, sizes, bias)
    assert_close(ops.grouped_gemm(x, weight, offsets, bias), expected, name="y")
    _, d_weight, d_bias = gradients(x, weight, bias, d_y, sizes)
    assert_close(ops.grouped_gemm_wgrad(d_y, x, offsets), d_weight, name="d_weight")
    assert_close(ops.grouped_bias_grad(d_y, offsets), d_bias, name="d_bias")


@pytest.mark.parametrize("scale", [0.5, 1 / 3, 1.0])
def test_scale_multiplies_the_parameter_gradients(scale, device):
    sizes = GROUPS["ragged"]
    x, weight, bias, d_y = make(sizes, 3, 4, torch.float64, device)
    offsets = offsets_of(sizes, device)
    _, d_weight, d_bias = gradients(x, weight, bias, d_y, sizes)
    got = ops.grouped_gemm_wgrad(d_y, x, offsets, scale=scale)
    assert_close(got, d_weight * scale, name="d_weight")
    got = ops.grouped_bias_grad(d_y, offsets, scale=scale)
    assert_close(got, d_bias * scale, name="d_bias")


@pytest.mark.parametrize("dtype", DTYPES)
@SIZES
def test_a_weight_gradient_is_added_to_a_wider_one_and_rounded_once(sizes, dtype, device):
    x, weight, bias, d_y = make(sizes, 17, 5, dtype, device)
    wide = torch.promote_types(dtype, torch.float32)
    main = torch.randn(weight.shape, dtype=wide, device=device)
    expected = main.double() + gradients(x, weight, bias, d_y, sizes)[1] / 3
    got = ops.grouped_gemm_wgrad(d_y, x, offsets_of(sizes, device), scale=1 / 3, into=main)
    assert got is main
    assert_close(got, expected, name="sum", tolerance=tolerance(wide))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@SIZES
def test_rows_past_the_last_offset_are_not_read(sizes, dtype, device):
    """Buffers of static size end in rows that no expert owns: NaN there must reach nothing."""
    x, weight, bias, d_y = make(sizes, 5, 3, dtype, device)
    S, offsets = len(x), offsets_of(sizes, device)
    long_x, long_d_y = (torch.cat([t, t.new_full((7, t.shape[1]), torch.nan)]) for t in (x, d_y))
    for name, got, expected in [
        ("y", ops.grouped_gemm(long_x, weight, offsets, bias), loop(x, weight, sizes, bias)),
        ("d_x", ops.grouped_gemm_dgrad(long_d_y, weight, offsets), loop(d_y, weight.mT, sizes)),
    ]:
        assert_close(got[:S], expected, name=name)
    _, d_weight, d_bias = gradients(x, weight, bias, d_y, sizes)
    got = ops.grouped_gemm_wgrad(long_d_y, long_x, offsets)
    assert_close(got, d_weight, name="d_weight")
    assert_close(ops.grouped_bias_grad(long_d_y, offsets), d_bias, name="d_bias")


def test_empty_expert_has_a_zero_weight_gradient(device):
    """Case BB-31"""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=device)
    d_y = torch.tensor([[1.0], [1.0], [2.0]], device=device)
    got = ops.grouped_gemm_wgrad(d_y, x, offsets_of((2, 0, 1), device))
    assert got.tolist() == [[[4.0, 6.0]], [[0.0, 0.0]], [[10.0, 12.0]]]


def test_empty_experts_among_many_rows(device):
    """BB-31: in poisoned memory, one call after another."""
    sizes = (162, 0, 2577, 446, 0, 83)
    x, weight, bias, d_y = make(sizes, 5, 3, torch.float64, device)
    _, d_weight, d_bias = gradients(x, weight, bias, d_y, sizes)
    for _ in range(2):
        for name, got, expected in [
            ("d_weight", ops.grouped_gemm_wgrad(d_y, x, offsets_of(sizes, device)), d_weight),
            ("d_bias", ops.grouped_bias_grad(d_y, offsets_of(sizes, device)), d_bias),
        ]:
            assert_close(got, expected, name=name)
            assert (got[[1, 4]] == 0).all()
            got.fill_(torch.nan)  # what its memory holds when it is given out again
            del got


@pytest.mark.parametrize("numerics", ["fast", "exact"])
@pytest.mark.parametrize("block", [8, ops.ROW_BLOCK])
def test_an_empty_group_anywhere(block, numerics, device):
    """BB-33: nothing, one row, one less than a block, a block and one more, in any order."""
    for sizes in itertools.permutations((0, 1, block - 1, block, block + 1)):
        x, weight, bias, d_y = make(sizes, 3, 2, torch.float64, device)
        offsets, options = offsets_of(sizes, device), {"numerics": numerics}
        owners = torch.tensor(owners_of(sizes), device=device)
        of_row = weight[owners]  # (S,N_out,N_in)
        y = (of_row @ x[:, :, None])[:, :, 0] + bias[owners]
        d_x = (of_row.mT @ d_y[:, :, None])[:, :, 0]
        d_weight = torch.stack([d_y[owners == e].t() @ x[owners == e] for e in range(len(sizes))])
        for name, got, right in [
            ("y", ops.grouped_gemm(x, weight, offsets, bias, **options), y),
            ("d_x", ops.grouped_gemm_dgrad(d_y, weight, offsets, **options), d_x),
            ("d_weight", ops.grouped_gemm_wgrad(d_y, x, offsets, **options), d_weight),
        ]:
            assert_close(got, right, name=f"{name} of {sizes}")


def test_square_weights_are_stored_out_by_in(device):
    """Case BB-39: the other layout has the same shape and gives (0,1)."""
    weight = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]], device=device)
    x = torch.tensor([[1.0, 2.0]], device=device)
    assert ops.grouped_gemm(x, weight, offsets_of((1,), device)).tolist() == [[2.0, 0.0]]


def test_bias_is_added_before_the_rounding(device):
    """256 + 1 + 1 is 258 in bf16; rounded after the product, both ones are lost."""
    x = torch.tensor([[256.0, 1.0]], device=device).bfloat16()
    weight, bias = torch.ones(1, 1, 2, device=device), torch.ones(1, 1, device=device)
    got = ops.grouped_gemm(x, weight.bfloat16(), offsets_of((1,), device), bias.bfloat16())
    assert got.item() == 258.0 != 256.0


# Case BB-37. Rows 5, experts 3 with 2, 0 and 3 of them: offsets are [0,2,2,5] and nothing else.
WRONG_OFFSETS = {
    "lengths": [2, 0, 3],
    "lengths, padded": [0, 2, 0, 3],
    "inclusive ends": [2, 2, 5],
    "ends of 4 experts": [2, 2, 5, 5],
    "starts only": [0, 2, 2],
    "decreasing": [0, 4, 2, 5],
    "negative": [0, -2, 2, 5],
    "does not start at 0": [1, 2, 2, 5],
    "past the rows": [0, 2, 2, 6],
    "too long": [0, 2, 2, 5, 5],
    "empty": [],
}


OPS = {
    "forward": lambda x, weight, bias, d_y, offsets: ops.grouped_gemm(x, weight, offsets, bias),
    "dgrad": lambda x, weight, bias, d_y, offsets: ops.grouped_gemm_dgrad(d_y, weight, offsets),
    "wgrad": lambda x, weight, bias, d_y, offsets: ops.grouped_gemm_wgrad(d_y, x, offsets),
    "bias grad": lambda x, weight, bias, d_y, offsets: ops.grouped_bias_grad(d_y, offsets),
}
# A parameter gradient learns the number of experts from the offsets: it cannot see these.
UNSEEN = {(op, wrong) for op in ("wgrad", "bias grad") for wrong in ("starts only", "too long")}


@pytest.mark.parametrize(
    "op,wrong", [(op, w) for op in OPS for w in WRONG_OFFSETS if (op, w) not in UNSEEN]
)
def test_wrong_offsets_are_refused(op, wrong, device, monkeypatch):
    if device.type == "cuda":  # not looked at unless asked for: it would be a host sync
        monkeypatch.setenv("EP_MOE_CHECK", "1")
    operands = make((2, 0, 3), 4, 2, torch.float32, device)
    offsets = torch.tensor(WRONG_OFFSETS[wrong], dtype=torch.int32, device=device)
    with pytest.raises(InputError, match="offsets"):
        OPS[op](*operands, offsets)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("of_rows", [torch.float32, torch.float64])
def test_offsets_may_be_int64_and_on_the_cpu(of_rows, dtype, device):
    sizes = GROUPS["ragged"]
    x, weight, bias, _ = make(sizes, 3, 2, of_rows, device)
    got = ops.grouped_gemm(x, weight, offsets_of(sizes).to(dtype), bias)
    expected = loop(x.double(), weight.double(), sizes, bias.double())
    assert_close(got, expected, name="y", tolerance=tolerance(of_rows))
