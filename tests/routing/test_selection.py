"""Which experts a token goes to: one answer for every input, equal to a sort written in plain
Python."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ep_moe import InputError, SelectionConfig, oracle, select_experts
from ep_moe.ops.select import order_key
from tests.helpers import NOT_POWERS_OF_TWO

INF, NAN = math.inf, math.nan


def chosen(scores, config):
    return [oracle.choose(row, config) for row in scores.tolist()]


def from_config(**changes):
    return SelectionConfig(**({"top_k": 2} | changes))


SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 5e-45, -5e-45, 1e-40, 3.0, 3.015625]
FLOATS = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32), st.integers(-4, 4).map(float))


@st.composite
def topologies(draw, **fixed):
    """(config, number of experts): groups of any size, K up to all candidates."""
    groups, size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 5, 6, 7]))
    kept = draw(st.integers(1, groups))
    top_k = draw(st.one_of(st.just(kept * size), st.integers(1, kept * size)))
    fixed = {"scoring_func": draw(st.sampled_from(["softmax", "sigmoid"])), **fixed}
    config = SelectionConfig(top_k=top_k, num_expert_group=groups, topk_group=kept, **fixed)
    return config, groups * size


def rows_of(data, num_experts, values=FLOATS):
    row = st.lists(values, min_size=num_experts, max_size=num_experts)
    return data.draw(st.lists(row, min_size=1, max_size=3))


@given(topologies(), st.data())
def test_ids_follow_the_logits_whatever_they_are(topology, data):
    config, num_experts = topology
    logits = torch.tensor(rows_of(data, num_experts))
    assert select_experts(logits, config).ids.tolist() == chosen(logits, config)


@given(topologies(), st.data())
def test_ids_of_bf16_logits(topology, data):
    config, num_experts = topology
    logits = torch.tensor(rows_of(data, num_experts)).bfloat16()
    assert select_experts(logits, config).ids.tolist() == chosen(logits, config)


@given(topologies(), st.sampled_from(["max", "top2_sum"]), st.booleans(), st.data())
def test_ids_follow_the_scores_where_the_key_is_a_score(topology, group_score, biased, data):
    """In float64: the oracle adds a group's two best scores in that precision."""
    config, num_experts = topology
    config = SelectionConfig(**{**vars(config), "group_score": group_score})
    logits = torch.tensor(rows_of(data, num_experts), dtype=torch.float64)
    bias = None
    if biased:
        bias = torch.tensor(rows_of(data, num_experts)[0])
    scores = logits.softmax(1) if config.scoring_func == "softmax" else logits.sigmoid()
    if biased or group_score == "top2_sum":
        key = scores if bias is None else scores + bias
    else:
        key = logits
    assert select_experts(logits, config, expert_bias=bias).ids.tolist() == chosen(key, config)


@given(topologies(group_score="top2_sum", scoring_func="sigmoid"), st.data())
def test_ids_follow_fp32_scores(topology, data):
    """Scores of exactly 1/2 and biases in eighths, so that every fp32 sum is exact and many tie."""
    config, num_experts = topology
    eighths = st.one_of(st.integers(-9, 9).map(lambda i: i / 8), st.sampled_from([INF, -INF]))
    bias = torch.tensor(rows_of(data, num_experts, eighths)[0])
    got = select_experts(torch.zeros(1, num_experts), config, expert_bias=bias)
    assert got.ids.tolist() == chosen((0.5 + bias)[None], config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_experts", NOT_POWERS_OF_TWO)
def test_ids_on_many_tied_rows(num_experts, dtype, device):
    """Rounded to eighths most rows tie somewhere; the answer is the same on every device."""
    config = from_config(top_k=min(8, num_experts))
    logits = ((torch.randn(64, num_experts) * 8).round() / 8).to(dtype)
    got = select_experts(logits.to(device), config).ids
    assert got.tolist() == chosen(logits, config)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_ids_of_logits_that_are_not_contiguous(layout, device):
    config = from_config(top_k=5, num_expert_group=4, topk_group=2)
    logits = {
        "transposed": torch.randn(12, 7).t(),
        "strided": torch.randn(7, 24)[:, ::2],
        "expanded": torch.randn(1, 12).expand(7, 12),
    }[layout]
    assert select_experts(logits.to(device), config).ids.tolist() == chosen(logits, config)


@pytest.mark.parametrize(
    "row,top_k,groups,kept,expected",
    [
        pytest.param([0.0, 0.0, 0.0, 0.0], 2, 1, 1, [0, 1], id="equal: lowest ids"),
        pytest.param([1.0, 2.0, 2.0, 1.0], 2, 2, 1, [1, 0], id="equal groups: the lower one"),
        pytest.param([-0.0, 0.0, -0.0, 0.0], 3, 1, 1, [0, 1, 2], id="-0 equals +0"),
        pytest.param([INF, NAN, 1.0, NAN], 3, 1, 1, [1, 3, 0], id="NaN above +inf"),
        pytest.param([INF, 0.0, NAN, 0.0], 1, 2, 1, [2], id="the group of a NaN"),
        pytest.param([-INF, -INF, 5.0, -INF], 2, 2, 1, [2, 3], id="-inf above a dropped group"),
        pytest.param([-INF] * 6, 2, 2, 1, [0, 1], id="nothing but -inf"),
        pytest.param([1e-45, 0.0, -1e-45, 5e-45], 4, 1, 1, [3, 0, 1, 2], id="denormals"),
        pytest.param([3e38, -3e38, INF, -INF], 4, 1, 1, [2, 0, 1, 3], id="huge"),
        pytest.param([1.0, 5.0, 2.0], 3, 1, 1, [1, 2, 0], id="K = E"),
        pytest.param([1.0, 5.0, 2.0], 1, 3, 1, [1], id="groups of one, K = 1"),
    ],
)
def test_order(row, top_k, groups, kept, expected, device):
    config = from_config(top_k=top_k, num_expert_group=groups, topk_group=kept)
    assert select_experts(torch.tensor([row], device=device), config).ids.tolist() == [expected]


def test_group_scores_differ(device):
    """A group with one strong expert wins by max, one with two good ones by their sum."""
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]], device=device)
    for group_score, expected in [("max", [[0, 1]]), ("top2_sum", [[2, 3]])]:
        config = from_config(num_expert_group=2, group_score=group_score, scoring_func="sigmoid")
        assert select_experts(logits, config).ids.tolist() == expected


def test_a_zero_bias_changes_the_key(device):
    """At 30 and 40 the fp32 sigmoids tie, the logits do not."""
    logits = torch.tensor([[30.0, 40.0]], device=device)
    config = from_config(top_k=1, scoring_func="sigmoid")
    assert select_experts(logits, config).ids.item() == 1
    assert select_experts(logits, config, expert_bias=torch.zeros(2, device=device)).ids.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_order_key(dtype, device):
    tiny = torch.finfo(dtype).smallest_normal / 2
    scores = [-INF, -1.0, -tiny, -0.0, 0.0, tiny, 1.0, INF, NAN]
    key = order_key(torch.tensor(scores, dtype=dtype, device=device))
    assert [step > 0 for step in key.diff().tolist()] == [True] * 3 + [False] + [True] * 4
    assert key[3] == key[4]
    assert key.min() > torch.iinfo(key.dtype).min
    assert order_key(torch.tensor([-NAN], dtype=dtype, device=device)) == key[-1]


ELSEWHERE = torch.ones(2, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    "argument,call",
    [
        ("logits", lambda c: select_experts(torch.zeros(4), c)),
        ("logits", lambda c: select_experts(torch.zeros(2, 3, 4), c)),
        ("expert_bias", lambda c: select_experts(torch.zeros(2, 4), c, expert_bias=torch.ones(5))),
        ("expert_bias", lambda c: select_experts(torch.zeros(2, 4), c, expert_bias=torch.ones(1))),
        (
            "padding_mask",
            lambda c: select_experts(torch.zeros(2, 4), c, padding_mask=torch.tensor([True])),
        ),
        (
            "padding_mask",
            lambda c: select_experts(torch.zeros(2, 4), c, padding_mask=torch.tensor([0, 1])),
        ),
        ("padding_mask", lambda c: select_experts(torch.zeros(2, 4), c, padding_mask=ELSEWHERE)),
        (
            "expert_bias",
            lambda c: select_experts(torch.zeros(4, 2), c, expert_bias=ELSEWHERE + 0.0),
        ),
    ],
)
def test_bad_calls(argument, call):
    """One that torch would broadcast is worse than one that it refuses."""
    with pytest.raises(InputError, match=argument):
        call(from_config())
