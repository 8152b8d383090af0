"""Faults that users of other software reported, where a whole kind is swept that has no home beside
one function. `case BB-nn` stands with the function that answers it; here are the sweeps over layers
and ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist

from ep_moe import MoELayer, Routing, moe, ops, oracle, select_experts, total_aux
from ep_moe.routing import count_tokens
from ep_moe.testing import assert_close, run_ranks
from tests.dispatch.ep_cases import Case, compare, config, expert_parallel_each, one_process
from tests.helpers import NOT_POWERS_OF_TWO, leaf, random_layer, small_config
from tests.routing.capacity_cases import NO_WARNING, POLICIES

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), NO_WARNING]

SCORING = pytest.mark.parametrize("scoring_func", ["softmax", "sigmoid", "sqrtsoftplus"])


@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_token_anywhere(value, place):
    """BB-07: all other tokens come out as without it."""
    layer = random_layer(small_config(num_shared_experts=1))
    x = torch.randn(7, 16, dtype=torch.float64)
    others = torch.arange(7) != place
    expected, _ = layer(x[others])
    x[place] = value
    y, _ = layer(x)
    assert_close(y[others], expected, name="y of the others")
    ids = layer.router(x, None)[0].ids.tolist()
    assert all(len(set(row)) == 2 for row in ids)
    assert all(0 <= e < 8 for row in ids for e in row)


@pytest.mark.filterwarnings("ignore:top_k = 1")
@SCORING
def test_one_choice_trains_the_router(scoring_func):
    """BB-15: a score of before the choice moves with the logits, one renormalised to 1 cannot."""
    for renormalize in (False, True):
        layer = random_layer(
            small_config(top_k=1, renormalize=renormalize, scoring_func=scoring_func)
        )
        before = layer.router.weight.detach().clone()
        layer(torch.randn(9, 16, dtype=torch.float64))[0].sum().backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()
        assert torch.equal(layer.router.weight, before) == renormalize


@pytest.mark.parametrize("num_experts", NOT_POWERS_OF_TWO)
def test_every_expert_is_counted_once(num_experts):
    """BB-19, for any number of them; the last, too."""
    ids = torch.arange(num_experts).repeat(2)[: 2 * num_experts - 1, None]
    assert count_tokens(ids, num_experts).tolist() == [2] * (num_experts - 1) + [1]


def test_five_experts_in_worked_numbers():
    """BB-19: blocks of four counted experts 0, 1 and 2 twice."""
    ids = torch.tensor([[0], [1], [2], [3], [4], [4]])
    assert count_tokens(ids, 5).tolist() == [1, 1, 1, 1, 2] != [2, 2, 2, 1, 2]


ABSENT = {
    "worked": [[0, -1], [1, 0], [-1, 1]],
    "one token nowhere": [[0, 1], [-1, -1], [1, -1]],
    "first choice nowhere": [[-1, 0], [-1, 1], [-1, 0]],
    "nothing anywhere": [[-1, -1]] * 3,
}


@pytest.mark.parametrize("ids", ABSENT.values(), ids=ABSENT.keys())
def test_choices_that_go_nowhere(ids):
    """BB-21, out and back: an absent choice shifts no row, adds nothing and gets no gradient,
    whatever garbage stands beside it."""
    layer = random_layer(small_config(num_experts=2))
    ids = torch.tensor(ids, dtype=torch.int32)
    absent = ids < 0
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(3, 2, dtype=torch.float64)
    garbage = gates.masked_fill(absent, torch.nan).requires_grad_()
    y = moe(x, Routing(ids, garbage), layer.experts, layer.transport)
    d_y = torch.randn_like(y)
    y.backward(d_y)

    exact, weights = leaf(x), leaf(gates)
    routing = Routing(ids, weights)
    expected = oracle.moe_layer(exact, layer.state_dict(), layer.config, routing=routing)
    assert_close(y, expected, name="y")
    touched = expected + 0 * (exact.sum() + weights.sum())  # where nothing goes anywhere
    d_x, d_gates = torch.autograd.grad(touched, [exact, weights], d_y)
    assert_close(x.grad, d_x, name="dx")
    assert_close(garbage.grad, d_gates, name="d_gates")
    assert (garbage.grad[absent] == 0).all()


@pytest.mark.parametrize("tokens", range(1, 50))
def test_no_token_of_one_expert_is_lost(tokens):
    """BB-23, from one token to three blocks of 16 and one more: an alignment kept the first of
    each block."""
    ids = torch.full((tokens, 1), 1, dtype=torch.int32)
    packed = ops.pack(ids, 3)
    assert packed.arrived_of_packed.tolist() == list(range(tokens))
    assert packed.offsets.tolist() == [0, 0, tokens, tokens]
    layer = random_layer(small_config(num_experts=3, hidden_size=4, intermediate_size=3))
    x, gates = torch.randn(tokens, 4, dtype=torch.float64), torch.ones(tokens, 1).double()
    y = moe(x, Routing(ids, gates), layer.experts, layer.transport)
    weights = {name: value[1] for name, value in layer.experts.named_parameters()}
    gate, up = (x @ weights["w_gate_up"].t()).chunk(2, dim=1)
    right = (gate * gate.sigmoid() * up) @ weights["w_down"].t()
    assert_close(y, right, name="y")
    if tokens > 1:
        first_only = right.masked_fill(torch.arange(tokens)[:, None] > 0, 0.0)
        with pytest.raises(AssertionError):
            assert_close(first_only, right, name="y")


@pytest.mark.parametrize("capacity_policy", [None, *POLICIES])
@pytest.mark.parametrize("scope", ["micro_batch", "sequence", "global"])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_no_tokens_at_all(top_k, scope, capacity_policy):
    """BB-29: finite losses, counts of zero, gradients of zero."""
    capacity = {"capacity_factor": 1.0, "capacity_policy": capacity_policy or "position"}
    layer = random_layer(
        small_config(
            top_k=top_k,
            renormalize=False,
            aux_loss_coef=0.1,
            z_loss_coef=0.1,
            aux_loss_scope=scope,
            **(capacity if capacity_policy else {}),
        )
    )
    for shape in [(0, 16), (2, 0, 16), (0, 3, 16)]:
        layer.zero_grad()
        y, stats = layer(torch.zeros(shape, dtype=torch.float64))
        assert y.shape == shape
        assert [value.sum().item() for value in stats] == [0] * len(stats)
        (y.sum() + total_aux([stats])).backward()
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


TRAINED = ("experts.w_gate_up", "experts.w_down", "router.weight", "x")


@pytest.mark.parametrize("trained", list(itertools.product([False, True], repeat=4)), ids=str)
def test_frozen_parts(trained, monkeypatch):
    """BB-89: exactly what is trained gets its gradient, that of a loop; no other is computed."""
    products = []
    wgrad = ops.grouped_gemm_wgrad
    monkeypatch.setattr(
        ops, "grouped_gemm_wgrad", lambda *args, **kw: products.append(0) or wgrad(*args, **kw)
    )
    layer = random_layer(small_config())
    x, d_y = torch.randn(2, 9, 16, dtype=torch.float64)
    leaves = {**dict(layer.named_parameters()), "x": x}
    exact = {name: leaf(value) for name, value in leaves.items()}
    expected = oracle.moe_layer(exact["x"], exact, layer.config)
    gradients = torch.autograd.grad(expected, [exact[name] for name in TRAINED], d_y)
    for name, needs in zip(TRAINED, trained, strict=True):
        leaves[name].requires_grad_(needs)
    y, _ = layer(x)
    assert_close(y, expected, name="y")
    assert y.requires_grad == any(trained)
    if any(trained):
        y.backward(d_y)
    for name, needs, gradient in zip(TRAINED, trained, gradients, strict=True):
        assert (leaves[name].grad is not None) == needs, name
        if needs:
            assert_close(leaves[name].grad, gradient, name=name)
    assert len(products) == sum(trained[:2])


def test_nothing_is_noisy():
    """BB-91: experts see x as it came, in training too; runs repeat bit for bit."""
    layer = random_layer(small_config(num_shared_experts=1))
    x = torch.randn(9, 16, dtype=torch.float64)
    before = x.clone()
    runs = [layer.train(mode)(x)[0] for mode in (True, True, False, False)]
    assert all(torch.equal(y, runs[0]) for y in runs)
    assert torch.equal(x, before)
    right = oracle.moe_layer(x, layer.state_dict(), layer.config)
    assert_close(runs[0], right, name="y")
    jittered = x * (1 + 0.01 * torch.rand_like(x))
    with pytest.raises(AssertionError):
        assert_close(oracle.moe_layer(jittered, layer.state_dict(), layer.config), right, name="y")


RANK_CASES = {
    "BB-17 the scale, beside a shared expert": Case(
        (6, 3), config(num_shared_experts=1, routed_scaling_factor=2.5)
    ),
    "BB-15 one choice": Case((5, 8), config(top_k=1, renormalize=False)),
    "BB-29 no tokens, one choice": Case((0, 0), config(top_k=1, renormalize=False)),
    "BB-29 no tokens, bf16": Case((0, 4), config(), dtype=torch.bfloat16),
    "BB-19 six experts": Case((9, 4), config(num_experts=6, top_k=4)),
}
LOSSES = {
    "sum": lambda y: y.sum(),
    "transposed": lambda y: (y.t() * torch.arange(float(len(y)))).sum(),
    "sliced": lambda y: (y[:, ::2] ** 2).sum(),
    "concatenated": lambda y: (torch.cat([y, y * 2])[2:9] ** 2).sum(),
    "expanded": lambda y: (y[:1].expand(4, 16) ** 3).sum(),
}


def rank_faults(rank):
    torch.manual_seed(0)
    layer = MoELayer(small_config(), ep=dist.group.WORLD).double()
    x = torch.randn(6 + rank, 16, dtype=torch.float64)

    # BB-27: gradients of y in any layout.
    for name, loss in LOSSES.items():
        leaves = [x.requires_grad_(), *layer.parameters()]
        y, _ = layer(x)
        (d_y,) = torch.autograd.grad(loss(y), y, retain_graph=True)
        expected = torch.autograd.grad(y, leaves, d_y.contiguous())
        got = torch.autograd.grad(loss(layer(x)[0]), leaves)
        for a, b in zip(got, expected, strict=True):
            assert_close(a, b, name=f"gradient of y {name}")

    # BB-07: a NaN row of one rank spoils no row of any.
    x = x.detach()
    expected, _ = layer(x[:-1])
    x[-1] = torch.nan if rank else 0.0
    assert_close(layer(x)[0][:-1], expected, name="y beside a NaN row")

    # BB-11: ties, the same on every rank and in each of 100 repeats.
    ties = torch.randint(3, (40, 8), generator=torch.Generator().manual_seed(1)).float()
    ids = [select_experts(ties, layer.config).ids for _ in range(100)]
    assert all(torch.equal(again, ids[0]) for again in ids)
    return ids[0], expert_parallel_each(rank, list(RANK_CASES.values()), "cpu")


def test_on_two_ranks():
    (ids, *_), (others, *_) = ranks = run_ranks(rank_faults, 2)
    assert torch.equal(ids, others)
    for i, case in enumerate(RANK_CASES.values()):
        compare(case, [got[i] for _, got in ranks], one_process(case))
