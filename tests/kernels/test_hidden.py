"""Gather, gate+up product and activation in one kernel, and the way back, against torch in
float64."""

import pytest
import torch

from ep_moe import ops
from ep_moe.kernels import activation_backward
from ep_moe.kernels.grouped_gemm import hidden, hidden_backward
from ep_moe.kernels.weighted_sum import sum_parts
from ep_moe.testing import assert_close
from ep_moe.types import Packed
from tests.helpers import LAYOUTS, in_layout, random_local_ids
from tests.kernels.cases import TILES, dtypes_on, one_of, tolerance

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# rows A, top_k, experts, hidden size, width, absent
SHAPES = {
    "even": (40, 3, 4, 32, 48, 0.3),
    "odd": (19, 2, 5, 17, 9, 0.3),
    "none arrives": (0, 2, 3, 16, 16, 0.0),
    "none lives here": (6, 2, 3, 16, 16, 1.0),
    "one choice": (33, 1, 2, 24, 40, 0.0),
}


@pytest.fixture(autouse=True)
def _several_passes(monkeypatch):
    """Over a row of these widths, as over real ones."""
    monkeypatch.setattr(activation_backward, "COLUMNS", 16)


def make(A, K, E, H, width, absent, activation, dtype, device):
    """Everything that flows; unused gates are NaN, indices and rows past the last are garbage."""
    ids = random_local_ids(A, K, E, absent=absent, device=device)
    packed, tail = ops.pack(ids, E), 5
    garbage = torch.full((tail,), -(2**30), dtype=torch.int32, device=device)
    long = Packed(
        arrived_of_packed=torch.cat([packed.arrived_of_packed, garbage]),
        choice_of_packed=torch.cat([packed.choice_of_packed, garbage]),
        packed_of_arrived=packed.packed_of_arrived,
        offsets=packed.offsets,
    )
    halves = 1 if activation == "relu2" else 2
    shapes = {
        "rows": (A, H),
        "d_out": (A, H),
        "w_up": (E, halves * width, H),
        "b_up": (E, halves * width),
        "w_down": (E, H, width),
    }
    values = {name: torch.randn(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    values["rows"] *= H**0.5
    values["d_out"] *= H**0.5
    if activation == "swiglu_clamped":  # beyond its limits too
        values["w_up"] *= 6
    gates = torch.rand(A, K).masked_fill(ids.cpu() < 0, torch.nan).to(device)
    gates = gates.t().contiguous().t()  # as it may come from a caller's own router
    return packed, long, gates, {k: v.to(device, dtype) for k, v in values.items()}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("gate_on", ["output", "input"])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
@pytest.mark.parametrize(
    "name", ["pointers", "descriptors", "copied", "wide", "activation afterwards"]
)
def test_both_ways(name, activation, gate_on, shape, device):
    tile = TILES[name]
    for dtype in one_of(dtypes_on(device), name, activation, gate_on, shape):
        made = make(*shape, activation, dtype, device)
        packed, long, gates, v = made
        S = len(packed.arrived_of_packed)
        wide = {key: value.double() for key, value in v.items()}
        on_input, on_output = (gates if gate_on == place else None for place in ("input", "output"))
        limit = 2 * tolerance(dtype)

        options = {"activation": activation, "tile": tile}
        h, pre = hidden(v["rows"], v["w_up"], long, v["b_up"], gates=on_input, keep=True, **options)
        right = ops.hidden(
            wide["rows"],
            wide["w_up"],
            packed,
            wide["b_up"],
            gates=on_input,
            activation=activation,
            keep=True,
        )
        for what, got, expected in [("h", h, right.h), ("pre", pre, right.pre)]:
            assert got.dtype == dtype
            assert_close(got[:S], expected, name=what, tolerance=limit)
            assert got[S:].isnan().all(), f"{what}: a row that no expert owns was written"
        h_alone, none = hidden(
            v["rows"], v["w_up"], long, v["b_up"], gates=on_input, keep=False, **options
        )
        assert none is None
        assert torch.equal(h_alone[:S], h[:S])

        got = hidden_backward(v["d_out"], v["w_down"], long, pre, gates=on_output, **options)
        right = ops.hidden_backward(
            wide["d_out"],
            wide["w_down"],
            packed,
            pre[:S].double(),
            None,
            gates=on_output,
            activation=activation,
        )
        assert_close(got.pre[:S], right.pre, name="d_pre", tolerance=2 * limit)
        assert_close(got.weighted_h[:S], right.weighted_h, name="gate h", tolerance=limit)
        for value in (got.pre, got.weighted_h):
            assert value[S:].isnan().all(), "a row that no expert owns was written"
        if on_output is None:
            assert got.gate is None
        else:
            d_gate = sum_parts(got.gate, packed.packed_of_arrived)
            # in fp32 of the rounded pre-activation; afterwards also of a rounded d_h
            assert_close(d_gate, right.gate, name="d_gate", tolerance=1e-5 if tile.step else limit)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["pointers", "activation afterwards"])
def test_layouts_of_gates(name, layout, device):
    """A caller's own router may hand over any."""
    made = make(*SHAPES["even"], "swiglu", torch.float32, device)
    packed, long, gates, v = made
    S, options = len(packed.arrived_of_packed), {"activation": "swiglu", "tile": TILES[name]}
    strided = in_layout(gates, layout)
    h, pre = hidden(v["rows"], v["w_up"], long, gates=gates, keep=True, **options)
    again, _ = hidden(v["rows"], v["w_up"], long, gates=strided, keep=True, **options)
    assert torch.equal(again[:S], h[:S])
    expected, got = (
        hidden_backward(v["d_out"], v["w_down"], long, pre, gates=g, **options)
        for g in (gates, strided)
    )
    assert torch.equal(got.pre[:S], expected.pre[:S])
    assert torch.equal(got.weighted_h[:S], expected.weighted_h[:S])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_nan_and_inf_go_where_torch_sends_them(activation, bad, device):
    packed, long, _, v = make(8, 2, 3, 16, 16, 0.0, activation, torch.float32, device)
    v["rows"][3, 0] = bad
    options = {"gates": None, "activation": activation}
    h, pre = hidden(v["rows"], v["w_up"], long, keep=True, tile=TILES["pointers"], **options)
    right = ops.hidden(v["rows"], v["w_up"], packed, None, keep=True, **options)
    S = len(right.h)
    assert torch.equal(pre[:S].isfinite(), right.pre.isfinite())
    assert torch.equal(h[:S].isnan(), right.h.isnan())
