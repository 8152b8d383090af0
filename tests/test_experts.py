"""The expert MLP, one autograd function, against a loop over rows and choices that torch
differentiates."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from ep_moe import ConfigError, ExpertParallel, Experts, ops, oracle
from ep_moe.ops import ACTIVATIONS
from ep_moe.testing import TOLERANCE, assert_close
from ep_moe.types import Arrived
from tests.helpers import DTYPES, leaf, random_local_ids, small_config

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PARAMETERS = ("w_gate_up", "w_down", "b_gate_up", "b_down")
GATE_ON = pytest.mark.parametrize("gate_on", ["output", "input"])


def make_experts(config, dtype=torch.float64, device="cpu", ep=None):
    experts = Experts(config, ep or ExpertParallel())
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.4)
    return experts.to(device, dtype)


def make_arrived(rows, config, dtype=torch.float64, device="cpu", absent=0.3, clean=False):
    """Rows and gates that collect gradients. Absent gates are NaN, unless they must be clean."""
    E, K = config.num_experts, config.top_k
    ids = random_local_ids(rows, K, E, absent=absent, device=device)
    x = torch.randn(rows, config.hidden_size, device=device).to(dtype)
    gates = torch.rand(rows, K, device=device, dtype=torch.promote_types(dtype, torch.float32))
    gates = gates.masked_fill(ids < 0, 0.0 if clean else math.nan)
    return Arrived(x.requires_grad_(), gates.requires_grad_(), ids, plan=None)


def loop(arrived, weights, config):
    out = []
    for row, gates, ids in zip(
        arrived.rows, arrived.gate_weights, arrived.local_ids.tolist(), strict=True
    ):
        y = torch.zeros_like(row)
        for k, e in enumerate(ids):
            if e < 0:
                continue
            if config.gate_on == "input":
                y = y + oracle.mlp(gates[k] * row, weights, "experts", config.activation, e)
            else:
                y = y + gates[k] * oracle.mlp(row, weights, "experts", config.activation, e)
        out.append(y)
    return torch.stack(out) if out else torch.zeros_like(arrived.rows)


def gradients(out: Tensor, d_out: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(out, leaves.values(), d_out, allow_unused=True)
    return {
        name: torch.zeros_like(value) if grad is None else grad
        for (name, value), grad in zip(leaves.items(), found, strict=True)
    }


def compare(experts, arrived, d_out, scale=1.0):
    """Output and every gradient against the loop in float64."""
    ours = {"rows": arrived.rows, "gates": arrived.gate_weights, **dict(experts.named_parameters())}
    theirs = {name: leaf(value) for name, value in ours.items()}
    twin = replace(arrived, rows=theirs["rows"], gate_weights=theirs["gates"])
    weights = {f"experts.{name}": theirs[name] for name in PARAMETERS if name in theirs}
    expected = loop(twin, weights, experts.config)
    out = experts(arrived)
    assert out.dtype == arrived.rows.dtype
    assert_close(out, expected, name="out")
    if not expected.requires_grad:  # no row here has an expert here
        expected = expected + 0 * sum(value.nan_to_num().sum() for value in theirs.values())
    got = gradients(out, d_out, ours)
    for name, value in gradients(expected, d_out.double(), theirs).items():
        value = value * (scale if name in PARAMETERS else 1.0)
        assert got[name].dtype == ours[name].dtype
        limit = max(TOLERANCE[out.dtype], TOLERANCE[got[name].dtype])
        assert_close(got[name], value, name=name, tolerance=limit)


@GATE_ON
@pytest.mark.parametrize("mlp_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_loop(dtype, activation, mlp_bias, gate_on, device):
    config = small_config(
        activation=activation, mlp_bias=mlp_bias, gate_on=gate_on, num_experts=5, top_k=3
    )
    experts = make_experts(config, dtype, device)
    arrived = make_arrived(21, config, dtype, device)
    compare(experts, arrived, torch.randn(21, 16, device=device).to(dtype))


@pytest.mark.parametrize(
    "rows,absent",
    [(0, 0.0), (6, 1.0), (1, 0.0), (33, 0.9)],
    ids=["no rows", "no row has an expert here", "one row", "most absent"],
)
@GATE_ON
def test_few_rows(gate_on, rows, absent, device):
    config = small_config(mlp_bias=True, gate_on=gate_on)
    arrived = make_arrived(rows, config, device=device, absent=absent)
    d_out = torch.randn(rows, 16, dtype=torch.float64, device=device)
    compare(make_experts(config, device=device), arrived, d_out)


@pytest.mark.parametrize("hidden,width", [(1, 1), (3, 17), (33, 5), (17, 3), (6, 3), (5, 5)])
def test_odd_and_ambiguous_widths(hidden, width, device):
    """Equal, or one twice the other, is where a layout guessed from a shape goes wrong."""
    config = small_config(hidden_size=hidden, intermediate_size=width, num_experts=3)
    arrived = make_arrived(9, config, device=device)
    d_out = torch.randn(9, hidden, dtype=torch.float64, device=device)
    compare(make_experts(config, device=device), arrived, d_out)


@pytest.mark.parametrize("view", ["sum", "transposed", "strided"])
def test_gradients_that_are_not_contiguous(view, device):
    config = small_config(mlp_bias=True)
    d_out = {
        "sum": lambda: torch.ones((), dtype=torch.float64).expand(7, 16),
        "transposed": lambda: torch.randn(16, 7, dtype=torch.float64).t(),
        "strided": lambda: torch.randn(7, 32, dtype=torch.float64)[:, ::2],
    }[view]()
    compare(
        make_experts(config, device=device),
        make_arrived(7, config, device=device),
        d_out.to(device),
    )


@GATE_ON
@pytest.mark.parametrize("mlp_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_equal_finite_differences(activation, mlp_bias, gate_on):
    sizes = {"hidden_size": 3, "intermediate_size": 2, "num_experts": 3}
    config = small_config(activation=activation, mlp_bias=mlp_bias, gate_on=gate_on, **sizes)
    experts = make_experts(config)
    names, parameters = zip(*experts.named_parameters(), strict=True)
    # gradcheck perturbs every gate, and NaN plus a step is still NaN
    arrived = make_arrived(4, config, clean=True)

    def function(rows, gates, *values):
        inputs = replace(arrived, rows=rows, gate_weights=gates)
        return functional_call(experts, dict(zip(names, values, strict=True)), (inputs,))

    assert torch.autograd.gradcheck(function, (arrived.rows, arrived.gate_weights, *parameters))


@GATE_ON
def test_gates_may_be_narrower_than_rows(gate_on, device):
    """A caller's own router: float64 rows with the fp32 gates that `Routing` asks for. Only the
    gates' own gradient is in fp32."""
    config = small_config(mlp_bias=True, gate_on=gate_on)
    arrived = make_arrived(9, config, device=device)
    gates = arrived.gate_weights.detach().float().requires_grad_()
    d_out = torch.randn(9, 16, dtype=torch.float64, device=device)
    experts = make_experts(config, device=device)
    compare(experts, replace(arrived, gate_weights=gates), d_out)


def test_a_bias_counts_as_much_as_its_gate(device):
    """Case BB-43: experts that are nothing but a down bias, 4 and 8; unweighted they add up to
    12."""
    config = small_config(hidden_size=1, intermediate_size=1, num_experts=2, mlp_bias=True)
    experts = make_experts(config, device=device)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            parameter.zero_()
            if name == "b_down":
                parameter.copy_(torch.tensor([[4.0], [8.0]]))
    arrived = Arrived(
        rows=torch.ones(1, 1, dtype=torch.float64, device=device),
        gate_weights=torch.tensor([[0.75, 0.25]], dtype=torch.float64, device=device),
        local_ids=torch.tensor([[0, 1]], dtype=torch.int32, device=device),
        plan=None,
    )
    out = experts(arrived)
    assert out.item() == 5.0
    out.backward(torch.full_like(out, 2.0))
    assert experts.b_down.grad.tolist() == [[1.5], [0.5]]


@GATE_ON
def test_frozen_tensors_get_nothing_and_change_nothing(gate_on, device):
    """All 2^6 combinations of what is trained, against everything trained."""
    config = small_config(mlp_bias=True, gate_on=gate_on)
    experts, arrived = make_experts(config, device=device), make_arrived(9, config, device=device)
    leaves = {
        "rows": arrived.rows,
        "gates": arrived.gate_weights,
        **dict(experts.named_parameters()),
    }
    d_out = torch.randn(9, 16, dtype=torch.float64, device=device)
    expected = gradients(experts(arrived), d_out, leaves)
    for trained in itertools.product([False, True], repeat=len(leaves)):
        for value, needs in zip(leaves.values(), trained, strict=True):
            value.grad = None
            value.requires_grad_(needs)
        out = experts(arrived)
        assert out.requires_grad == any(trained)
        if out.requires_grad:
            out.backward(d_out)
        for (name, value), needs in zip(leaves.items(), trained, strict=True):
            assert (value.grad is not None) == needs, name
            assert not needs or torch.equal(value.grad, expected[name]), name


@pytest.mark.parametrize("loss_reduction,scale", [("mean", 0.25), ("sum", 1.0)])
def test_parameter_gradients_carry_the_scale_of_the_ranks(loss_reduction, scale, device):
    """On one of 4 ranks; gradients of rows and gates go home unscaled."""
    config = small_config(mlp_bias=True, loss_reduction=loss_reduction)
    experts = make_experts(config, device=device, ep=ExpertParallel(rank=3, size=4))
    here = replace(config, num_experts=2)
    d_out = torch.randn(9, 16, dtype=torch.float64, device=device)
    compare(experts, make_arrived(9, here, device=device), d_out, scale=scale)


def saved_by(experts, rows, absent, device):
    """What a forward pass keeps for the backward, and how many packed rows it had."""
    arrived = make_arrived(rows, experts.config, device=device, absent=absent)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        experts(arrived)
    return saved, int((arrived.local_ids >= 0).sum())


@pytest.mark.parametrize("rows,absent", [(0, 0.0), (5, 1.0)])
@GATE_ON
def test_it_saves_as_many_tensors_whatever_arrives(gate_on, rows, absent, device):
    """A non-reentrant checkpoint stops recomputing at the last saved tensor: ranks must agree."""
    experts = make_experts(small_config(mlp_bias=True, gate_on=gate_on), device=device)
    full, _ = saved_by(experts, 40, 0.3, device)
    few, _ = saved_by(experts, rows, absent, device)
    assert len(few) == len(full)


@GATE_ON
def test_it_keeps_neither_packed_rows_nor_the_output_of_the_down_projection(gate_on, device):
    saved, S = saved_by(make_experts(small_config(gate_on=gate_on), device=device), 40, 0.3, device)
    assert S > 40
    assert not any(value.shape == (S, 16) for value in saved)


@pytest.mark.parametrize("keep", ["pre_activation", "rows"])
def test_it_makes_a_pre_activation_only_to_keep_it(keep, monkeypatch):
    """Twice as large as anything else in an inference."""
    hidden, made = ops.hidden, []
    monkeypatch.setattr(ops, "hidden", lambda *a, **o: made.append(o["keep"]) or hidden(*a, **o))
    config = small_config(experts_keep=keep)
    experts, arrived = make_experts(config), make_arrived(9, config)
    with torch.no_grad():
        experts(arrived)
    out = experts(arrived)
    assert made == [False, keep == "pre_activation"]
    out.sum().backward()
    assert made[2:] == ([] if keep == "pre_activation" else [True])


def test_an_expert_starts_alike_on_any_number_of_ranks():
    config = small_config()

    def build(rank, size):
        torch.manual_seed(3)
        return Experts(config, ExpertParallel(rank=rank, size=size))

    whole = build(0, 1)
    parts = [build(rank, 4) for rank in range(4)]
    assert [list(p.global_ids) for p in parts] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for name, value in whole.named_parameters():
        assert torch.equal(value, torch.cat([p.get_parameter(name) for p in parts])), name
    assert not torch.equal(whole.w_down[0], whole.w_down[1])


@pytest.mark.parametrize("num_experts,size", [(30, 8), (5, 2), (3, 4), (126, 4), (128, 6)])
def test_experts_that_do_not_divide_are_refused(num_experts, size):
    """Case BB-73: refused by name rather than the whole rest on the last rank."""
    named = f"num_experts = {num_experts}, .* multiple of the {size} ranks of `ep`"
    with pytest.raises(ConfigError, match=named):
        ExpertParallel(group=None, rank=0, size=size).local_experts(num_experts)
