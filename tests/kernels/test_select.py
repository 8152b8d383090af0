"""The selection kernel against the two-level stable sort in plain Python, and its gradients against
float64."""

import math
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ep_moe import SelectionConfig, ops, oracle, select_experts, total_aux
from ep_moe.kernels import scores
from ep_moe.measure import kernels_of
from ep_moe.routing import Router
from ep_moe.testing import assert_close
from tests.helpers import in_layout, small_config

INF, NAN = math.inf, math.nan
SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 5e-45, -5e-45, 1e-40, 3.0, 3.015625, 3e38, -3e38]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# experts, groups, kept groups, K
SHAPES = [
    (1, 1, 1, 1),
    (5, 1, 1, 5),
    (8, 4, 2, 4),
    (8, 8, 3, 3),
    (60, 1, 1, 4),
    (64, 8, 4, 8),
    (68, 34, 20, 6),
    (96, 3, 2, 6),
    (160, 8, 3, 6),
    (257, 1, 1, 8),
    (256, 8, 4, 8),
    (384, 1, 1, 33),
    (384, 4, 1, 1),
]
SCORINGS = [(s, r) for s in ("softmax", "sigmoid", "sqrtsoftplus") for r in (True, False)]


def config_of(shape, **changes):
    _, groups, kept, top_k = shape
    return SelectionConfig(top_k=top_k, num_expert_group=groups, topk_group=kept, **changes)


def chosen(keys, config):
    return [oracle.choose(row, config) for row in keys.tolist()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ids(shape, device):
    """Random, equal, many ties, special values, huge ones."""
    config, experts = config_of(shape), shape[0]
    rows = [
        torch.randn(2, experts),
        torch.full((1, experts), 0.25),
        torch.randint(-2, 3, (2, experts)).float(),
        torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (3, experts))],
        torch.randn(1, experts) * 1e38,
    ]
    logits = torch.cat(rows)
    assert select_experts(logits.to(device), config).ids.tolist() == chosen(logits, config)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(
    max_examples=25,
    phases=[Phase.generate],  # shrinking takes minutes in the interpreter
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_ids_of_any_logits(dtype, device, data):
    groups, size = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 2, 3, 7, 33]))
    kept = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, min(kept * size, 32)))
    config = config_of((0, groups, kept, top_k))
    values = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32), st.integers(-3, 3).map(float))
    row = st.lists(values, min_size=groups * size, max_size=groups * size)
    logits = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=2))).to(dtype)
    if (
        dtype == torch.bfloat16 and device.type == "cpu"
    ):  # the interpreter reads its denormals wrong
        logits[logits.abs() < torch.finfo(dtype).tiny] = 0.0
    assert select_experts(logits.to(device), config).ids.tolist() == chosen(logits, config)


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ids_where_the_key_is_a_score(shape, group_score, device):
    """Scores of exactly 1/2 and biases in eighths: every fp32 sum is exact, and many tie."""
    config = config_of(shape, group_score=group_score, scoring_func="sigmoid")
    bias = torch.randint(-9, 10, (shape[0],)) / 8
    bias[torch.rand(shape[0]) < 0.1] = INF
    bias[torch.rand(shape[0]) < 0.1] = -INF
    logits = torch.zeros(2, shape[0], device=device)
    got = select_experts(logits, config, expert_bias=bias.to(device)).ids
    assert got.tolist() == chosen((0.5 + bias).expand(2, -1), config)


@triton.jit
def _scores(logits, bias, out, SCORING: tl.constexpr, E: tl.constexpr, LANES: tl.constexpr):
    e = tl.arange(0, LANES)
    x = tl.load(logits + tl.program_id(0) * E + e, mask=e < E, other=-float("inf"))
    top, total = scores.softmax_parts((x,))
    b = tl.load(bias + e, mask=e < E, other=0.0)
    tl.store(out + tl.program_id(0) * E + e, scores.score(x, top, total, SCORING) + b, mask=e < E)


@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
@pytest.mark.parametrize("scoring_func", ["sigmoid", "sqrtsoftplus"])
def test_ids_of_the_same_scores(scoring_func, group_score, device):
    """The oracle gets the scores that the kernel's own function computes."""
    shape = (160, 8, 3, 6)
    config = config_of(shape, group_score=group_score, scoring_func=scoring_func)
    logits, bias = torch.randn(5, 160, device=device), torch.randn(160, device=device) / 50
    scores = torch.empty_like(logits)
    _scores[(5,)](logits, bias, scores, scoring_func, 160, 256, num_warps=1)
    if group_score == "max":
        expected = chosen(scores.cpu(), config)
    else:  # the oracle adds in fp64, where sums do not tie that tie in fp32
        keys = ops.rank(scores.cpu(), replace(config, group_score="max"))
        sums = scores.cpu().view(5, 8, 20).topk(2).values.sum(-1)
        groups = sums.topk(3).indices
        kept = (
            torch.zeros(5, 8, dtype=torch.bool).scatter_(1, groups, True).repeat_interleave(20, 1)
        )
        expected = scores.cpu().masked_fill(~kept, -INF).topk(6).indices.tolist()
        assert keys.shape == (5, 60)
    assert select_experts(logits, config, expert_bias=bias).ids.tolist() == expected


def reference(logits, config, ids, mask, segments, grads):
    """float64: gate weights, sums, and the gradient of the logits."""
    logits = logits.double()
    found = ops.select(logits, config, given=ids, padding_mask=mask, segments=segments)
    d_logits = ops.select_backward(
        *grads,
        selected=found,
        logits=logits,
        num_experts=logits.shape[1],
        dtype=logits.dtype,
        config=config,
        padding_mask=mask,
    )
    return found.gate_weights, found.p_sum, found.z_sum, d_logits


@pytest.mark.parametrize("segments", [None, 1, 3])
@pytest.mark.parametrize("scoring_func, renormalize", SCORINGS)
@pytest.mark.parametrize(
    "shape, masked", [((24, 4, 2, 3), False), ((70, 1, 1, 5), True)], ids=["groups", "padding"]
)
def test_weights_sums_and_gradients(shape, scoring_func, renormalize, segments, masked, device):
    config = config_of(
        shape, scoring_func=scoring_func, renormalize=renormalize, routed_scaling_factor=2.5
    )
    experts, top_k, tokens = shape[0], shape[3], 6
    logits = (torch.randn(tokens, experts) * 3).to(device)
    if segments is None:
        logits[0] -= 100.0  # where exp(x) is below what fp32 holds
    mask = torch.arange(tokens, device=device) % 3 == 1 if masked else None
    grads = [torch.randn(tokens, top_k), None, None]
    if segments:
        grads[1:] = torch.randn(segments, experts), torch.randn(segments)
    grads = [None if g is None else g.to(device) for g in grads]
    options = {"config": config, "padding_mask": mask}
    got = ops.select(logits, segments=segments, **options)
    d_logits = ops.select_backward(
        *grads,
        selected=got,
        logits=logits if ops.needs_logits(logits, config, segments) else None,
        num_experts=experts,
        dtype=torch.float32,
        **options,
    )
    wide = [None if g is None else g.double() for g in grads]
    expected = reference(logits, config, got.ids, mask, segments, wide)
    values = (got.gate_weights / 2.5, got.p_sum, got.z_sum, d_logits)
    expected = (expected[0] / 2.5, *expected[1:])
    for name, a, b in zip(("weights", "p_sum", "z_sum", "d_logits"), values, expected, strict=True):
        if b is not None:
            scale = max(b.abs().max().item(), 1.0)
            assert (a.double() - b).abs().max().item() <= 1e-6 * scale, name
    if masked:
        assert (got.ids[mask] == -1).all()
        assert (got.gate_weights[mask] == 0).all()
        assert (d_logits[mask] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scoring_func, renormalize", SCORINGS)
def test_a_given_choice_is_weighed(scoring_func, renormalize, dtype, device):
    """Low logits too, where 1 + exp(x) has lost what log_score is made of."""
    config = config_of((20, 1, 1, 3), scoring_func=scoring_func, renormalize=renormalize)
    logits = torch.randn(4, 20) * 4 - torch.tensor([[8.0], [100.0], [8.0], [8.0]])
    logits = logits.to(device, dtype)
    ids = torch.rand(4, 20).argsort(1)[:, :3].int().to(device)
    ids[2] = -1
    mask = (ids[:, 0] < 0).to(device)
    got = ops.select(logits, config, given=ids, padding_mask=mask)
    expected = ops.select(logits.double(), config, given=ids, padding_mask=mask)
    assert torch.equal(got.ids, ids)
    assert_close(got.gate_weights, expected.gate_weights, name="weights", tolerance=1e-6)


@pytest.mark.parametrize("key", ["logit", "score + bias", "top-2 sum", "given"])
@pytest.mark.parametrize("scoring_func, renormalize", SCORINGS)
def test_rows_without_a_softmax(scoring_func, renormalize, key, device):
    """NaN weights where the reference has them; under `uniform` as if all logits were equal, and no
    gradient."""
    logits = torch.randn(4, 12)
    logits[0, 3], logits[1, 5], logits[2] = NAN, INF, -INF
    config = config_of((12, 3, 2, 4), scoring_func=scoring_func, renormalize=renormalize)
    if key == "top-2 sum":
        config = replace(config, group_score="top2_sum")
    bias = torch.zeros(12) if key == "score + bias" else None
    ids = torch.tensor([[4, 5, 6, 7]] * 4, dtype=torch.int32) if key == "given" else None

    def found(logits, config, device="cpu"):
        options = {"expert_bias": bias, "given": ids}
        on_device = {k: None if v is None else v.to(device) for k, v in options.items()}
        return ops.select(logits, config, **on_device)

    got, wide = found(logits.to(device), config, device), found(logits.double(), config)
    assert got.ids.tolist() == wide.ids.tolist()
    assert torch.equal(got.gate_weights.isnan().cpu(), wide.gate_weights.isnan())
    a, b = (w.gate_weights.cpu().nan_to_num(posinf=9.0) for w in (got, wide))
    assert (a - b).abs().max() <= 1e-6

    uniform = replace(config, nan_policy="uniform")
    got, wide = found(logits.to(device), uniform, device), found(logits.double(), uniform)
    assert got.ids.tolist() == wide.ids.tolist()
    assert (got.gate_weights.cpu() - wide.gate_weights).abs().max() <= 1e-6
    d_logits = ops.select_backward(
        torch.ones_like(got.gate_weights),
        None,
        None,
        selected=got,
        logits=logits.to(device),
        num_experts=12,
        dtype=torch.float32,
        config=uniform,
    )
    assert (d_logits[:3] == 0).all()
    assert d_logits.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_that_is_not_contiguous(dtype, device):
    """Logits, selection bias, mask, given ids and gradients, each a view with NaNs between."""

    def spread(value):
        wide = torch.full((*value.shape, 2), math.nan).to(value.dtype)
        wide[..., 0] = value
        return wide.to(device)[..., 0]

    def rows_apart(value):
        return spread(value) if value.ndim == 1 else in_layout(value, "margin").to(device)

    config = config_of((20, 4, 2, 3), scoring_func="sigmoid")
    tensors = {
        "logits": torch.randn(6, 20).to(dtype),
        "expert_bias": torch.randn(20),
        "padding_mask": torch.arange(6) == 4,
        "given": None,
    }
    grads = torch.randn(6, 3), torch.randn(2, 20), torch.randn(2)

    def results(place):
        on_device = {k: None if v is None else place(v) for k, v in tensors.items()}
        logits, mask = on_device.pop("logits"), on_device["padding_mask"]
        got = ops.select(logits, config, segments=2, **on_device)
        d_logits = ops.select_backward(
            *map(place, grads),
            selected=got,
            logits=logits,
            num_experts=20,
            dtype=dtype,
            config=config,
            padding_mask=mask,
        )
        return *got, d_logits

    ids = torch.rand(6, 20).argsort(1)[:, :3].int()
    for place, tensors["given"] in ((spread, None), (rows_apart, None), (spread, ids)):
        together = results(lambda value: value.to(device))
        for got, expected in zip(results(place), together, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("scope", ["micro_batch", "sequence", "global"])
def test_losses_of_a_router(scope, device):
    """Their gradients come as autograd makes them: that of a sum is one number, expanded."""
    changes = {"aux_loss_coef": 0.1, "z_loss_coef": 0.1, "aux_loss_scope": scope}
    router = Router(small_config(**changes)).to(device)
    logits = torch.randn(12, 8).to(device)
    found = []
    for value in (logits, logits.double()):
        leaf = value.clone().requires_grad_()
        _, stats = router.route(leaf, None, sequence_length=4)
        total_aux([stats]).backward()
        found.append(leaf.grad)
    assert_close(found[0], found[1], name="d_logits")


def test_weights_of_many_choices(device):
    config = config_of((128, 1, 1, 128))
    logits, ids = torch.randn(2, 128) * 3, torch.arange(128, dtype=torch.int32).expand(2, -1)
    got = ops.select(logits.to(device), config, given=ids.to(device))
    expected = logits.double().softmax(1)
    assert_close(got.gate_weights.cpu(), expected, name="weights", tolerance=1e-6)


def test_given_ids_of_nowhere(device):
    """A record may say -1 where no mask is: such a token weighs nothing and has no gradient."""
    config = config_of((8, 1, 1, 2), renormalize=False)
    logits = torch.randn(2, 8).to(device)
    ids = torch.tensor([[3, 5], [-1, -1]], dtype=torch.int32, device=device)
    got = ops.select(logits, config, given=ids)
    assert torch.equal(got.ids, ids)
    assert_close(got.gate_weights[0], logits.softmax(1)[0, [3, 5]], name="weights")
    assert got.gate_weights[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("tokens, segments", [(0, None), (0, 1), (0, 0)])
def test_no_tokens(tokens, segments, device):
    config = config_of((8, 1, 1, 2))
    logits = torch.empty(tokens, 8, device=device)
    got = ops.select(logits, config, segments=segments)
    assert got.ids.shape == got.gate_weights.shape == (0, 2)
    if segments is not None:
        assert got.p_sum.tolist() == [[0.0] * 8] * segments
        assert got.z_sum.tolist() == [0.0] * segments


@pytest.mark.parametrize("kind", ["forward", "with sums", "backward"])
def test_one_launch(kind, require_gpu):
    config = config_of((64, 8, 4, 8), renormalize=False)
    logits = torch.randn(512, 64, device="cuda")
    segments = 1 if kind == "with sums" else None

    def run():
        found = ops.select(logits, config, segments=segments)
        if kind == "backward":
            ops.select_backward(
                found.gate_weights,
                None,
                None,
                selected=found,
                logits=logits,
                num_experts=64,
                dtype=logits.dtype,
                config=config,
            )

    run()
    kernels = kernels_of(run)
    # The programs' partial sums are added up by one small reduction.
    assert len(kernels) == {"forward": 1, "with sums": 2, "backward": 2}[kind], kernels
