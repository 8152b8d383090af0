"""How many tokens an expert takes, who stays and what becomes of the others: against loops in plain
Python."""

import math
import warnings
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ep_moe import ConfigError, select_experts
from ep_moe.routing import admit, expert_capacity
from ep_moe.testing import assert_close
from tests.helpers import small_config
from tests.routing.capacity_cases import (
    EACH_POLICY,
    NO_WARNING,
    POLICIES,
    candidates,
    dropless,
    with_capacity,
)

pytestmark = NO_WARNING

INF, NAN = math.inf, math.nan


def capacity(tokens, num_experts, config):
    return expert_capacity(tokens, num_experts, config).item()


@pytest.mark.parametrize("factor,expected", [(1.0, 64), (1, 64), (1.25, 80), (2.0, 128)])
def test_capacity_in_worked_numbers(factor, expected):
    """256 experts, 8 of them a token, 2048 tokens."""
    assert capacity(2048, 256, with_capacity(factor, top_k=8)) == expected


@pytest.mark.parametrize(
    "tokens,top_k,num_experts,factor,expected",
    [(400, 1, 8, 1.1, 55), (1600, 8, 256, 1.1, 55), (1000, 6, 8, 1.1, 825), (100, 2, 8, 2.2, 55)],
)
def test_capacity_where_floats_give_one_too_many(tokens, top_k, num_experts, factor, expected):
    """So does a Fraction of the float, which is not 1.1 either."""
    assert capacity(tokens, num_experts, with_capacity(factor, top_k=top_k)) == expected
    mean = Fraction(top_k * tokens, num_experts)
    assert math.ceil(float(mean) * factor) == math.ceil(mean * Fraction(factor)) == expected + 1


@given(
    tokens=st.integers(0, 2_000_000),
    top_k=st.integers(1, 16),
    num_experts=st.integers(1, 512),
    thousandths=st.integers(1, 8_000),
    on_device=st.booleans(),
)
def test_capacity_is_exact(tokens, top_k, num_experts, thousandths, on_device):
    factor = thousandths / 1000
    got = expert_capacity(
        torch.tensor(tokens, dtype=torch.int32) if on_device else tokens,
        num_experts,
        with_capacity(factor, top_k=top_k),
    )
    exact = min(Fraction(str(factor)), num_experts)
    assert got.item() == math.ceil(Fraction(top_k * tokens, num_experts) * exact)
    assert got.dtype == torch.int64


@pytest.mark.parametrize(
    "tokens,factor,expected",
    [
        (2048, 4 / 3, 86),  # 64 * 4/3 = 85.3; with 16 digits of it the product passes 64 bits
        (96, 5 / 3, 5),  # 3 * 5/3: its digits, 1.6666666666666667, are a little more
        (10**6, 0.1 + 0.2, 9375),
        (96, 1e30, 96 * 8),  # an expert never sees more than all choices
    ],
)
def test_factors_of_many_digits(tokens, factor, expected):
    assert capacity(tokens, 256, with_capacity(factor, top_k=8)) == expected


@pytest.mark.parametrize("tokens,expected", [(0, 3), (4, 3), (12, 3), (16, 4)])
def test_no_expert_takes_less_than_min_capacity(tokens, expected):
    assert capacity(tokens, 4, with_capacity(1.0, top_k=1, min_capacity=3)) == expected


def who_stays(ranked, scores, is_token, config, limit):
    """ids (T,K), -1 = dropped: the definition of each policy, one token at a time."""
    top_k, tokens = config.top_k, [t for t, real in enumerate(is_token) if real]
    ids = [[-1] * top_k for _ in is_token]
    if config.capacity_policy == "reroute":
        load = Counter()
        for k in range(top_k):
            for t in tokens:
                free = [e for e in ranked[t] if e not in ids[t] and load[e] < limit]
                if free:
                    ids[t][k] = free[0]
                    load[free[0]] += 1
        return ids
    for e in range(len(scores[0]) if scores else 0):
        takers = [t for t in tokens if e in ranked[t][:top_k]]
        if config.capacity_policy == "probability":
            takers.sort(key=lambda t: -scores[t][e])  # stable: of equals the lower token
        for t in takers[:limit]:
            ids[t][ranked[t].index(e)] = e
    return ids


@st.composite
def problems(draw):
    """(logits with many ties, padding mask or None, config)"""
    groups, size, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 9))
    kept = draw(st.integers(1, groups))
    config = with_capacity(
        draw(st.sampled_from([0.25, 0.5, 0.7, 1.0, 1.1, 1.5, 2.0, 4.0])),
        draw(st.sampled_from(POLICIES)),
        top_k=draw(st.integers(1, kept * size)),
        num_expert_group=groups,
        topk_group=kept,
        scoring_func=draw(st.sampled_from(["softmax", "sigmoid"])),
        min_capacity=draw(st.sampled_from([0, 0, 2])),
    )
    quarters = st.lists(st.integers(-8, 8), min_size=groups * size, max_size=groups * size)
    rows = draw(st.lists(quarters, min_size=tokens, max_size=tokens))
    logits = torch.tensor(rows, dtype=torch.float64).view(tokens, groups * size) / 4
    mask = draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    return logits, None if mask is None else torch.tensor(mask, dtype=torch.bool), config


@given(problems())
def test_who_stays(problem):
    """Padding is no token: it neither counts in the capacity nor takes a place."""
    logits, mask, config = problem
    num_experts = logits.shape[1]
    is_token = [True] * len(logits) if mask is None else (~mask).tolist()
    limit = max(
        config.min_capacity,
        math.ceil(
            Fraction(config.top_k * sum(is_token), num_experts)
            * Fraction(str(config.capacity_factor))
        ),
    )
    scores = logits.softmax(1) if config.scoring_func == "softmax" else logits.sigmoid()
    expected = who_stays(candidates(logits, config), scores.tolist(), is_token, config, limit)
    routing = select_experts(logits, config, padding_mask=mask)
    assert routing.ids.tolist() == expected
    assert ((routing.gate_weights == 0) | (routing.ids >= 0)).all()

    # What follows from the definition, whatever the loop above says.
    ids = routing.ids.tolist()
    assert all(n <= limit for e, n in Counter(chain(*ids)).items() if e >= 0)
    wanted = select_experts(logits, dropless(config), padding_mask=mask).ids
    if limit >= sum(is_token):  # room for all
        assert ids == wanted.tolist()
    for t, row in enumerate(ids):
        stayed = [e for e in row if e >= 0]
        assert len(set(stayed)) == len(stayed)
        assert set(stayed) <= set(candidates(logits[t : t + 1], config)[0])


@given(problems())
def test_reroute_drops_nothing_while_all_places_suffice(problem):
    """One choice a token, every expert a candidate: a factor of 1 has a place for each."""
    logits, mask, config = problem
    changes = {"capacity_policy": "reroute", "top_k": 1, "num_expert_group": 1, "topk_group": 1}
    config = replace(config, capacity_factor=max(1.0, config.capacity_factor), **changes)
    routing = select_experts(logits, config, padding_mask=mask)
    assert (routing.ids >= 0).sum() == (len(logits) if mask is None else (~mask).sum())


@EACH_POLICY
def test_who_stays_of_many(policy, device):
    """On every device the same."""
    config = with_capacity(0.8, policy, top_k=4, num_expert_group=5, topk_group=3)
    logits = torch.randn(150, 20, dtype=torch.float64)
    ranked, scores = candidates(logits, config), logits.softmax(1).tolist()
    expected = who_stays(ranked, scores, [True] * 150, config, limit=24)
    got = select_experts(logits.to(device), config)
    assert got.ids.tolist() == expected
    assert (got.ids < 0).any()


def logit(p):
    return math.log(p / (1 - p))


PROBABILITIES = [0.6, 0.9, 0.7, 0.8, 0.55]
CASES = {  # factor, least, policy, probabilities of expert 0, experts; its capacity and who stays
    "BB-47": (1.0, 4, "position", [0.9] * 5, 4, 4, [1, 1, 1, 1, 0]),
    "BB-49": (1.0, 0, "probability", PROBABILITIES, 2, 3, [0, 1, 1, 1, 0]),
    "BB-49/b": (1.0, 0, "position", PROBABILITIES, 2, 3, [1, 1, 1, 0, 0]),
}


@pytest.mark.parametrize(
    "factor,least,policy,probabilities,num_experts,limit,stays", CASES.values(), ids=CASES.keys()
)
def test_cases(factor, least, policy, probabilities, num_experts, limit, stays):
    """All tokens prefer expert 0."""
    config = with_capacity(
        factor, policy, top_k=1, min_capacity=least, scoring_func="sigmoid", renormalize=False
    )
    rows = [[logit(p)] + [-9.0] * (num_experts - 1) for p in probabilities]
    logits = torch.tensor(rows)
    assert capacity(5, num_experts, config) == limit
    routing = select_experts(logits, config)
    assert (routing.ids[:, 0] == 0).int().tolist() == stays
    weights = [p * kept for p, kept in zip(probabilities, stays, strict=True)]
    assert_close(routing.gate_weights[:, 0], torch.tensor(weights), name="weights")


def test_places_are_in_the_table():
    """Case BB-47: the fifth of five tokens got place 4 in a table of 4."""
    config = with_capacity(1.0, top_k=1, min_capacity=4)
    ids = torch.zeros(5, 1, dtype=torch.int64)
    scores, ranked = torch.full((5, 4), 0.9), torch.arange(4).expand(5, 4)
    place = admit(ids, scores, ranked, config, num_tokens=5).place
    assert place.tolist() == [[0], [1], [2], [3], [-1]] != [[0], [1], [2], [3], [4]]


@EACH_POLICY
@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 1.25, 2.0, 4.0])
def test_all_tokens_to_one_expert(factor, policy):
    """The kind of BB-47: an expert's places run from 0 to its load, below its capacity."""
    config = with_capacity(factor, policy, top_k=1)
    tokens, scores = 13, torch.rand(13, 4)
    ids, ranked = torch.zeros(tokens, 1, dtype=torch.int64), torch.arange(4).expand(tokens, 4)
    ids, kept, place, limit = admit(ids, scores, ranked, config, num_tokens=tokens)
    assert limit == math.ceil(Fraction(tokens, 4) * Fraction(factor))
    assert torch.equal(kept, place >= 0)
    for e in range(4):
        taken = place[kept & (ids == e)].sort().values
        assert taken.tolist() == list(range(len(taken)))
        assert len(taken) <= limit
    full = min(tokens, int(limit))
    assert (kept & (ids == 0)).sum() == full
    assert kept.sum() == (min(tokens, 4 * int(limit)) if policy == "reroute" else full)


@EACH_POLICY
def test_broken_rows_spoil_no_other(policy):
    """The kind of BB-07: a NaN row takes places like any other; ids stay valid, weights finite."""
    logits = torch.randn(8, 4)
    logits[[0, 5]] = NAN
    routing = select_experts(logits, with_capacity(0.75, policy))
    for ids in routing.ids.tolist():
        stayed = [e for e in ids if e >= 0]
        assert len(set(stayed)) == len(stayed)
        assert all(e < 4 for e in stayed)
    assert routing.gate_weights[[1, 2, 3, 4, 6, 7]].isfinite().all()


@pytest.mark.parametrize("factor,warns", [(0.5, 1), (1, 1), (1.0, 1), (1.01, 0), (None, 0)])
def test_a_factor_without_room_warns(factor, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        small_config(capacity_factor=factor)
    assert len(caught) == warns
    assert all("capacity_factor" in str(w.message) for w in caught)


@pytest.mark.parametrize(
    "field,changes",
    [
        ("capacity_factor", {"capacity_factor": 0.0}),
        ("capacity_factor", {"capacity_factor": -1.0}),
        ("capacity_factor", {"capacity_factor": INF}),
        ("capacity_factor", {"capacity_factor": NAN}),
        ("capacity_factor", {"capacity_factor": "1.25"}),
        ("capacity_policy", {"capacity_policy": "random"}),
        ("min_capacity", {"min_capacity": -1}),
        (  # it would follow the logits, and what was forced would be forgotten
            "forced_routing",
            {"forced_routing": "balanced", "capacity_factor": 2.0, "capacity_policy": "reroute"},
        ),
    ],
)
def test_refused(field, changes):
    with pytest.raises(ConfigError, match=f"^{field} = "):
        small_config(**changes)
