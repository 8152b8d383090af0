"""The gate-weighted sum over a row's experts, and its gradients."""

import pytest
import torch

from ep_moe import ops
from ep_moe.testing import assert_close
from tests.helpers import DTYPES, LAYOUTS, in_layout, leaf, random_local_ids

SHAPES = [  # A, K, H, share of absent slots
    (0, 2, 5, 0.3),
    (3, 2, 4, 1.0),
    (1, 1, 1, 0.0),
    (33, 3, 17, 0.3),
    (5, 5, 3, 0.5),
]


def loop(y, gate, packed_of_arrived):
    """In float64, differentiable, one slot at a time."""
    out = []
    for a, slots in enumerate(packed_of_arrived.tolist()):
        terms = [gate[a, k] * y[s] for k, s in enumerate(slots) if s >= 0]
        out.append(torch.stack(terms).sum(0) if terms else y.new_zeros(y.shape[1]))
    return torch.stack(out) if out else y.new_zeros(0, y.shape[1])


def make(A, K, H, absent, dtype, layout, device):
    """y, gates with NaN at absent slots, packed_of_arrived"""
    packed = ops.pack(random_local_ids(A, K, 5, absent=absent, device=device), 5)
    index = packed.packed_of_arrived
    y = torch.randn(len(packed.arrived_of_packed), H, device=device).to(dtype)
    gate = torch.rand(A, K, device=device, dtype=torch.promote_types(dtype, torch.float32))
    gate[index < 0] = float("nan")
    return in_layout(y, layout), gate, index


def tolerance(dtype):
    """One rounding at the end: half an ulp of the largest, whatever K is."""
    return {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("A,K,H,absent", SHAPES)
def test_forward(A, K, H, absent, dtype, layout, device):
    y, gate, index = make(A, K, H, absent, dtype, layout, device)
    got = ops.weighted_sum(y, gate, index)
    assert got.dtype == dtype
    expected = loop(y.double(), gate.double(), index)
    assert_close(got, expected, name="out", tolerance=tolerance(dtype))


@pytest.mark.parametrize("A,K,H,absent", SHAPES)
def test_without_gates_it_sums(A, K, H, absent, device):
    y, gate, index = make(A, K, H, absent, torch.float64, "contiguous", device)
    expected = loop(y, torch.ones_like(gate), index)
    assert_close(ops.weighted_sum(y, None, index), expected, name="out")


@pytest.mark.parametrize("d_layout", [*LAYOUTS, "expanded"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("A,K,H,absent", SHAPES)
def test_backward(A, K, H, absent, dtype, d_layout, device):
    y, gate, index = make(A, K, H, absent, dtype, "contiguous", device)
    if d_layout == "expanded":  # what y.sum() sends back
        d_out = torch.ones((), dtype=dtype, device=device).expand(A, H)
    else:
        d_out = in_layout(torch.randn(A, H, device=device).to(dtype), d_layout)
    leaves = [leaf(y), leaf(gate)]
    if len(y):
        loop(*leaves, index).backward(d_out.double(), inputs=leaves)
    got = ops.weighted_sum_backward(d_out, y, gate, index)
    for name, summed, value in zip(("d_y", "d_gate"), leaves, got, strict=True):
        expected = torch.zeros_like(summed) if summed.grad is None else summed.grad
        assert value.dtype == (dtype if name == "d_y" else gate.dtype)
        assert_close(value, expected, name=name, tolerance=tolerance(value.dtype))


def test_absent_slots_get_no_gradient(device):
    y, gate, index = make(20, 4, 3, 0.5, torch.float32, "contiguous", device)
    grads = ops.weighted_sum_backward(torch.ones(20, 3, device=device), y, gate, index)
    assert (grads.gate_weights[index < 0] == 0).all()
    assert grads.y.isfinite().all()


def test_rows_that_no_slot_names_are_not_read(device):
    """Neither those past the last packed row nor row 0, which stands in for an absent one."""
    y, gate, index = make(20, 4, 3, 0.5, torch.float32, "contiguous", device)
    expected = ops.weighted_sum(y, gate, index)
    nan = y.new_full((1, 3), torch.nan)
    shifted = torch.where(index < 0, index, index + 1)
    got = ops.weighted_sum(torch.cat([nan, y, nan]), gate, shifted)
    assert torch.equal(got, expected)


def test_worked_example_with_absent_slots(device):
    """Case BB-21/b"""
    y = torch.tensor([[10.0], [20.0], [30.0], [40.0]], device=device)
    index = torch.tensor([[0, -1], [2, 1], [-1, 3]], dtype=torch.int32, device=device)
    gate = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.5, 0.5]], device=device)
    assert ops.weighted_sum(y, gate, index).tolist() == [[5.0], [22.5], [20.0]]


def test_small_terms_survive_in_bf16(device):
    """Case BB-41: 256/8 and seven 1/8 are 32.875, which rounds to 33; a running bf16 sum stays at
    32."""
    y = torch.tensor([[256.0]] + [[1.0]] * 7, device=device).bfloat16()
    index = torch.arange(8, dtype=torch.int32, device=device)[None]
    got = ops.weighted_sum(y, torch.full((1, 8), 0.125, device=device), index)
    assert got.item() == 33.0 != 32.0


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("top_k", [2, 4, 8, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_error_does_not_grow_with_k(dtype, top_k, gated, device):
    """BB-41, its kind: one rounding for any K, with gates (forward) and without (backward)."""
    y = (torch.rand(200 * top_k, 8, device=device) ** 4 + 0.1).to(dtype)
    index = torch.randperm(200 * top_k, device=device).int().view(200, top_k)
    gate = torch.rand(200, top_k, device=device) if gated else None
    weights = torch.ones(200, top_k, device=device) if gate is None else gate
    exact = (weights.double()[..., None] * y.double()[index.long()]).sum(1)
    got = ops.weighted_sum(y, gate, index)
    error = ((got.double() - exact).abs() / exact).max().item()
    assert error <= torch.finfo(dtype).eps / 2 * 1.01
    running = torch.zeros_like(got)
    for k in range(top_k):
        running += (weights[:, k, None] * y[index[:, k].long()]).to(dtype)
    wrong = ((running.double() - exact).abs() / exact).max().item()
    if gated or top_k > 2:  # the sum of two rounds once, however it is done
        assert wrong > torch.finfo(dtype).eps / 2 * 1.01


def test_gate_multiplies_the_bias_too(device):
    """Case BB-43: rows that are nothing but a bias; unweighted they would add up to 12."""
    index = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    gate = torch.tensor([[0.75, 0.25]], device=device)
    assert ops.weighted_sum(torch.tensor([[4.0], [8.0]], device=device), gate, index).item() == 5.0


@pytest.mark.parametrize(
    "d_out,d_gate,d_y",
    [
        pytest.param(
            torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(),
            [[7, 15], [34, 46]],
            [[0.5, 1.5], [0.5, 1.5], [0.5, 1.0], [1.5, 3.0]],
            id="BB-27 transposed",
        ),
        pytest.param(
            torch.ones(()).expand(2, 2),
            [[3, 7], [11, 15]],
            [[0.5, 0.5], [0.5, 0.5], [0.25, 0.25], [0.75, 0.75]],
            id="BB-27/b expanded",
        ),
    ],
)
def test_gradients_that_are_not_contiguous(d_out, d_gate, d_y, device):
    """Read with the input's strides, the transposed one gives d_gate [[5,11],[39,53]]."""
    y = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], device=device)
    gate = torch.tensor([[0.5, 0.5], [0.25, 0.75]], device=device)
    index = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device=device)
    got = ops.weighted_sum_backward(d_out.to(device), y, gate, index)
    assert got.gate_weights.tolist() == d_gate != [[5, 11], [39, 53]]
    assert got.y.tolist() == d_y


def test_addition_is_in_choice_order(device):
    """Bit for bit the same as adding one choice after another in fp32."""
    y, gate, index = make(50, 5, 9, 0.2, torch.float32, "contiguous", device)
    expected = torch.zeros(50, 9, device=device)
    for k in range(5):
        here = (index[:, k] >= 0).nonzero()[:, 0]
        expected[here] += y[index[here, k].long()] * gate[here, k, None]
    assert torch.equal(ops.weighted_sum(y, gate, index), expected)
