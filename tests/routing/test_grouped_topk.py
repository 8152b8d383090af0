"""The signature that inference engines share: defaults, shapes, dtypes, and what is never read."""

import inspect
import math

import pytest
import torch

from ep_moe import ConfigError, InputError, SelectionConfig, grouped_topk, oracle, select_experts
from ep_moe.testing import assert_close


def test_signature_of_the_seed_callable():
    parameters = inspect.signature(grouped_topk).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "hidden_states": inspect.Parameter.empty,
        "gating_output": inspect.Parameter.empty,
        "topk": 8,
        "renormalize": True,
        "num_expert_group": 8,
        "topk_group": 4,
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
    }
    kinds = {p.kind for p in parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_seed_shape_and_dtypes(device):
    logits = torch.randn(83, 256, device=device)
    hidden = torch.empty(83, 7168, dtype=torch.float16, device="meta")
    weights, ids = grouped_topk(hidden, logits)
    assert (weights.shape, weights.dtype) == ((83, 8), torch.float32)
    assert (ids.shape, ids.dtype) == ((83, 8), torch.int32)
    config = SelectionConfig(top_k=8, num_expert_group=8, topk_group=4)
    assert ids.tolist() == [oracle.choose(row, config) for row in logits.tolist()]
    assert_close(weights.sum(1), torch.ones(83, device=device), name="sum of the weights")
    assert (weights.diff(dim=1) <= 0).all()


DEEPSEEK_V3 = SelectionConfig(
    top_k=8, num_expert_group=8, topk_group=4, scoring_func="sigmoid", group_score="top2_sum"
)


def as_deepseek_v3(logits):
    routing = select_experts(logits, DEEPSEEK_V3)
    return routing.gate_weights, routing.ids


@pytest.mark.parametrize("select", [lambda logits: grouped_topk(logits, logits), as_deepseek_v3])
def test_it_compiles_whole(select):
    """Without a graph break, the backward too."""
    compiled = torch.compile(select, fullgraph=True, backend="aot_eager")
    found = []
    for function in (select, compiled):
        torch.manual_seed(1)
        logits = torch.randn(5, 64, requires_grad=True)
        weights, ids = function(logits)
        weights.backward(torch.randn_like(weights))
        found.append((weights, ids, logits.grad))
    for got, expected in zip(*reversed(found), strict=True):
        assert torch.equal(got, expected)


def test_hidden_states_are_never_read(device):
    """A meta tensor has nothing to read (above); neither do NaNs change anything."""
    logits = torch.randn(9, 16, device=device)
    expected = grouped_topk(torch.zeros(9, 4, device=device), logits)
    got = grouped_topk(torch.full((9, 4), math.nan, device=device), logits)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("rows", [0, 8, 10])
def test_hidden_states_of_another_length_are_refused(rows):
    with pytest.raises(InputError, match="gating_output"):
        grouped_topk(torch.zeros(rows, 4), torch.zeros(9, 16))


@pytest.mark.parametrize(
    "changes,field",
    [
        ({"topk": 0}, "top_k"),
        ({"topk": 9}, "top_k"),
        ({"num_expert_group": 5}, "num_experts"),
        ({"topk_group": 9}, "topk_group"),
        ({"scoring_func": "relu"}, "scoring_func"),
        ({"routed_scaling_factor": math.nan}, "routed_scaling_factor"),
    ],
)
def test_impossible_topologies_are_refused(changes, field):
    with pytest.raises(ConfigError, match=field):
        grouped_topk(torch.zeros(2, 4), torch.zeros(2, 16), **changes)


def test_seed_worked_example(device):
    """Group scores .8 .4 .9 .6: groups 2 and 0 stay, and the best of them are experts 4 and 1."""
    scores = torch.tensor([[0.1, 0.8, 0.4, 0.3, 0.9, 0.7, 0.2, 0.6]], device=device)
    weights, ids = grouped_topk(scores, scores.log(), topk=2, num_expert_group=4, topk_group=2)
    assert ids.tolist() == [[4, 1]]
    assert_close(weights, torch.tensor([[9 / 17, 8 / 17]], device=device), name="weights")
