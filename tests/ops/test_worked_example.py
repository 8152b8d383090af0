"""Four tokens A-D, four experts, top-2, worked by hand from routing to the sum; and two mistakes
that must show in the same comparison.

Expert 0 gets A, C, D; expert 1 gets A, B, C, D; expert 2 gets B; expert 3 gets nothing.
"""

import pytest
import torch
from torch.nn.functional import silu

from ep_moe import ops
from ep_moe.testing import assert_close

A, B, C, D = range(4)
IDS = torch.tensor([[0, 1], [1, 2], [0, 1], [0, 1]], dtype=torch.int32)
GATES = torch.tensor([[0.7, 0.3], [0.6, 0.4], [0.5, 0.5], [0.2, 0.8]], dtype=torch.float64)


@pytest.fixture
def weights():
    """Tokens of width 2; experts with 3 hidden units and biases."""
    shapes = {"x": (4, 2), "w_in": (4, 3, 2), "b_in": (4, 3), "w_out": (4, 2, 3), "b_out": (4, 2)}
    return {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}


def one_expert(weights, e, x, activation=torch.relu):
    hidden = activation(weights["w_in"][e] @ x + weights["b_in"][e])
    return weights["w_out"][e] @ hidden + weights["b_out"][e]


def per_token(weights, activation=torch.relu):
    """The definition: sum_k gate * expert(token)."""
    rows = []
    for t, experts in enumerate(IDS.tolist()):
        terms = [one_expert(weights, e, weights["x"][t], activation) for e in experts]
        rows.append(GATES[t, 0] * terms[0] + GATES[t, 1] * terms[1])
    return torch.stack(rows)


def gather(weights, packed):
    return ops.gather(weights["x"], packed.arrived_of_packed, packed.offsets)


def grouped(weights, packed, rows, activation=torch.relu):
    """All experts over packed rows, by offsets; no gate yet."""
    first = ops.grouped_gemm(rows, weights["w_in"], packed.offsets, weights["b_in"])
    return ops.grouped_gemm(activation(first), weights["w_out"], packed.offsets, weights["b_out"])


def test_packing():
    packed = ops.pack(IDS, 4)
    tokens, choices = packed.arrived_of_packed, packed.choice_of_packed
    assert tokens.tolist() == [A, C, D, A, B, C, D, B]
    assert IDS[tokens, choices].tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert GATES[tokens, choices].tolist() == [0.7, 0.5, 0.2, 0.3, 0.6, 0.5, 0.8, 0.4]
    assert packed.offsets.diff().tolist() == [3, 4, 1, 0]
    # The repeated 8 is an empty expert, not missing data.
    assert packed.offsets.tolist() == [0, 3, 7, 8, 8]


def test_eight_expert_calls_give_four_rows(weights):
    packed = ops.pack(IDS, 4)
    y = grouped(weights, packed, gather(weights, packed))
    assert y.shape == (8, 2)
    out = ops.weighted_sum(y, GATES, packed.packed_of_arrived)
    assert_close(out, per_token(weights), name="out")
    x = weights["x"][A]
    a = 0.7 * one_expert(weights, 0, x) + 0.3 * one_expert(weights, 1, x)
    assert_close(out[A], a, name="token A")


def test_a_wrong_restore_index_shows(weights):
    """Rows of tokens A and C of expert 0 swapped on the way back."""
    packed = ops.pack(IDS, 4)
    y = grouped(weights, packed, gather(weights, packed))
    wrong = packed.packed_of_arrived.clone()
    wrong[[A, C], 0] = wrong[[C, A], 0]
    out = ops.weighted_sum(y, GATES, wrong)
    with pytest.raises(AssertionError, match="out"):
        assert_close(out, per_token(weights), name="out")


@pytest.mark.parametrize(
    "activation,biased,equal",
    [
        pytest.param(torch.clone, False, True, id="linear"),
        pytest.param(torch.clone, True, False, id="bias"),
        pytest.param(silu, False, False, id="non-linearity"),
    ],
)
def test_a_gate_on_the_input_shows(weights, activation, biased, equal):
    """Through a linear expert the gate may move there; a bias or a non-linearity forbids it."""
    if not biased:
        weights |= {name: torch.zeros_like(weights[name]) for name in ("b_in", "b_out")}
    packed = ops.pack(IDS, 4)
    gate = GATES[packed.arrived_of_packed, packed.choice_of_packed][:, None]
    rows = gate * gather(weights, packed)
    y = grouped(weights, packed, rows, activation)
    out, expected = (
        ops.weighted_sum(y, None, packed.packed_of_arrived),
        per_token(weights, activation),
    )
    if equal:
        assert_close(out, expected, name="out")
    else:
        with pytest.raises(AssertionError, match="out"):
            assert_close(out, expected, name="out")
