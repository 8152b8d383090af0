"""Faults that users of other software reported, where a whole kind is swept that has no home beside
one function. `case BB-nn` stands with the function that answers it; here are the sweeps over layers
and ranks."""

import itertools

import pytest
import torch
import torch.distributed as dist

from ep_moe import (
    BackendUnavailable,
    MoELayer,
    Routing,
    SelectionConfig,
    init_process,
    moe,
    ops,
    oracle,
    select_experts,
    total_aux,
)
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


@pytest.mark.parametrize("size", [3, 5, 6, 7])
@pytest.mark.parametrize("rule", [{}, {"group_score": "top2_sum"}, {"scoring_func": "sigmoid"}])
def test_masked_experts_come_from_the_kept_group(size, rule):
    """BB-09: j experts of the second group are left, which it wins with, and K of it are chosen;
    with none left all are equal, and the first group wins."""
    for top_k in range(1, size + 1):
        config = SelectionConfig(top_k=top_k, num_expert_group=2, topk_group=1, **rule)
        for left in range(top_k + 1):
            logits = torch.full((1, 2 * size), -torch.inf)
            places = torch.randperm(size)[:left].sort().values + size
            logits[0, places] = 1.0
            masked = [e for e in range(size, 2 * size) if e not in places.tolist()]
            expected = [*places.tolist(), *masked] if left else list(range(size))
            assert select_experts(logits, config).ids.tolist() == [expected[:top_k]]


@pytest.mark.parametrize("groups", [1, 4])
def test_compiled_choices_are_the_same(groups):
    """BB-11: many ties; a compiler has its own sorts."""
    config = SelectionConfig(top_k=3, num_expert_group=groups, topk_group=min(groups, 2))
    compiled = torch.compile(lambda logits: select_experts(logits, config).ids, backend="aot_eager")
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randint(3, (60, 12)).to(dtype)
        ids = compiled(logits)
        assert ids.tolist() == [oracle.choose(row, config) for row in logits.tolist()]


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


@pytest.mark.parametrize("numerics", ["fast", "exact"])
def test_experts_that_are_idle_in_turn(numerics):
    """BB-31: accumulated over micro-batches in memory that held NaN before, an expert has the
    gradients of the tokens that it had, and exactly zero without any."""
    layer = random_layer(small_config(num_experts=4, numerics=numerics))
    batches = [([[0, 3], [3, 0]], 2), ([[3, 2], [2, 3]], 2), ([[0, 2]], 1)]
    exact = {name: leaf(value) for name, value in layer.named_parameters()}
    for ids, tokens in batches:
        for value in exact.values():
            torch.full_like(value, torch.nan)  # freed at once, for the layer to find
        x = torch.randn(tokens, 16, dtype=torch.float64)
        routing = Routing(torch.tensor(ids, dtype=torch.int32), torch.rand(tokens, 2).double())
        d_y = torch.randn_like(x)
        moe(x, routing, layer.experts, layer.transport).backward(d_y)
        oracle.moe_layer(x, exact, layer.config, routing=routing).backward(d_y)
        for name, parameter in layer.experts.named_parameters():
            assert (parameter.grad[1] == 0).all()
            assert_close(parameter.grad, exact[f"experts.{name}"].grad, name=name)


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

    # BB-43: nothing but biases, 4 and 8 on different ranks; each rank's token weighs them.
    for numerics in ("fast", "exact"):
        layer = MoELayer(
            small_config(num_experts=2, mlp_bias=True, numerics=numerics), ep=dist.group.WORLD
        ).double()
        with torch.no_grad():
            for parameter in layer.experts.parameters():
                parameter.zero_()
            layer.experts.b_down.fill_([4.0, 8.0][rank])
        routing = Routing(torch.tensor([[0, 1]]), torch.tensor([[0.75, 0.25]]))
        y = moe(x[:1], routing, layer.experts, layer.transport)
        assert y.tolist() == [[5.0] * 16]
        y.backward(torch.full_like(y, 2.0))  # two tokens, and the mean over two ranks
        assert layer.experts.b_down.grad.tolist() == [[[1.5] * 16], [[0.5] * 16]][rank]

    # BB-11: ties, the same on every rank and in each of 100 repeats.
    ties = torch.randint(3, (40, 8), generator=torch.Generator().manual_seed(1)).float()
    ids = [select_experts(ties, layer.config).ids for _ in range(100)]
    assert all(torch.equal(again, ids[0]) for again in ids)
    return ids[0], expert_parallel_each(rank, list(RANK_CASES.values()), "cpu")


THREE_RANKS = {  # BB-99
    "one channel": Case((2, 0, 3), config(num_experts=9, top_k=9, hidden_size=1)),
    "2048 channels": Case((3, 1, 2), config(num_experts=9, top_k=8, hidden_size=2048)),
    "2049 channels": Case((2, 0, 3), config(num_experts=9, top_k=9, hidden_size=2049)),
}


def test_sizes_that_no_backend_likes_on_three_ranks():
    """BB-99: others have an H, a K and a number of ranks that they cannot serve, and say so in the
    middle of a run."""
    ranks = run_ranks(expert_parallel_each, 3, list(THREE_RANKS.values()), "cpu")
    for i, case in enumerate(THREE_RANKS.values()):
        compare(case, [got[i] for got in ranks], one_process(case))


@pytest.fixture
def two_gpus(monkeypatch):
    """A host that shows two GPUs, as far as starting goes: what was called, in order."""
    calls = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("bind", device)))

    def join(backend, *, device_id, **_):
        calls.append((backend, device_id))

    monkeypatch.setattr(dist, "init_process_group", join)
    for name, value in {"RANK": 5, "WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    return calls


def test_a_rank_binds_its_own_gpu_before_it_meets_the_others(two_gpus, monkeypatch):
    """BB-95: where nobody does, all ranks use GPU 0 and deadlock at the first barrier."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    process = init_process()
    own = torch.device("cuda", 1)
    assert two_gpus == [("bind", own), ("nccl", own)]
    assert (process.rank, process.local_rank, process.device) == (5, 1, own)


def test_more_ranks_than_visible_gpus_are_refused_before_anything_starts(two_gpus, monkeypatch):
    """BB-95"""
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(BackendUnavailable) as refused:
        init_process()
    for said in ("rank 5", "LOCAL_RANK 2", "2 GPUs", "--nproc-per-node", "CUDA_VISIBLE_DEVICES"):
        assert said in str(refused.value)
    assert two_gpus == []


def test_on_two_ranks():
    (ids, *_), (others, *_) = ranks = run_ranks(rank_faults, 2)
    assert torch.equal(ids, others)
    for i, case in enumerate(RANK_CASES.values()):
        compare(case, [got[i] for _, got in ranks], one_process(case))
