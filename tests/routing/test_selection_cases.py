"""Choices that other software got wrong, in small numbers: our answer passes, theirs does not."""

import math
from typing import Any, NamedTuple

import pytest
import torch

from ep_moe import SelectionConfig, select_experts
from ep_moe.testing import assert_close

INF, NAN = math.inf, math.nan


def from_config(**changes):
    return SelectionConfig(**({"top_k": 2} | changes))


class Case(NamedTuple):
    """ids None in a row: any distinct valid ones. wrong: an answer that someone's software gave."""

    logits: list[list[float]]
    config: SelectionConfig
    ids: list[Any]
    weights: list[Any]
    bias: list[float] | None = None
    wrong: dict[str, list[Any]] = {}  # noqa: RUF012  # nobody writes to it


SIGMOID = {"scoring_func": "sigmoid"}
BY_PAIRS = {"num_expert_group": 2, "group_score": "top2_sum", **SIGMOID}
CASES = {
    "BB-01 dropped groups masked with 0": Case(
        [[math.log(0.6 / 0.4), 0.0, math.log(0.4 / 0.6), math.log(0.3 / 0.7)]],
        from_config(**BY_PAIRS),
        bias=[-1.0, -1.0, -2.0, -2.0],
        ids=[[0, 1]],
        weights=[[6 / 11, 5 / 11]],
        wrong={"ids": [[2, 3]]},
    ),
    "BB-03 the bias in the weight": Case(
        [[math.log(4.0), 0.0, math.log(0.4 / 0.6), math.log(0.1 / 0.9)]],
        from_config(**SIGMOID),
        bias=[0.0, 0.0, 0.0, 1.0],
        ids=[[3, 0]],
        weights=[[1 / 9, 8 / 9]],
        wrong={"weights": [[1.1 / 1.9, 0.8 / 1.9]]},
    ),
    "BB-07 a NaN row": Case(
        [[3.0, 1.0, 2.0, 0.0], [NAN] * 4, [0.0, 1.0, 2.0, 3.0]],
        from_config(),
        ids=[[0, 2], None, [3, 2]],
        weights=[[0.7310585786, 0.2689414214], None, [0.7310585786, 0.2689414214]],
        wrong={"ids": [[0, 2], [0, 0], [3, 2]]},
    ),
    "BB-09 -inf in groups of three": Case(
        [[-1.0, -1.0, -1.0, 3.0, -INF, -INF], [-INF, -INF, -INF, 0.0, 1.0, 2.0]],
        from_config(**BY_PAIRS),
        ids=[[3, 4], [5, 4]],
        weights=[[1.0, 0.0], [0.5464491032, 0.4535508968]],
        wrong={"ids": [[3, 0], [5, 4]]},
    ),
    "BB-11 ties": Case(
        [[3.0, 2.0, 3.0, 2.0, 1.0, 1.0]],
        from_config(top_k=3),
        ids=[[0, 2, 1]],
        weights=[[0.4223187983, 0.4223187983, 0.1553624035]],
    ),
    "BB-11/b all equal": Case(
        [[7.0] * 4],
        from_config(top_k=3),
        ids=[[0, 1, 2]],
        weights=[[1 / 3] * 3],
        wrong={"ids": [[2, 3, 0]]},  # torch.topk on a CPU
    ),
    "BB-11/c two maxima, one place": Case(
        [[1.0, 2.0, 5.0, 4.0, 5.0]],
        from_config(top_k=1, renormalize=False),
        ids=[[2]],
        weights=[[0.4105120395]],
    ),
    "BB-13 sigmoids that underflow": Case(
        [[-120.0] * 4],
        from_config(**SIGMOID),
        bias=[1.0, 1.0, 0.0, 0.0],
        ids=[[0, 1]],
        weights=[[0.5, 0.5]],
        wrong={"weights": [[NAN, NAN]]},
    ),
    "BB-15 softmax after the choice of one": Case(
        [[math.log(2.0), 0.0, 0.0]],
        from_config(top_k=1, renormalize=False),
        ids=[[0]],
        weights=[[0.5]],
        wrong={"weights": [[1.0]]},
    ),
}


def judge(case, ids, weights):
    for t, (expected, weight) in enumerate(zip(case.ids, case.weights, strict=True)):
        assert len(set(ids[t])) == case.config.top_k, f"repeated ids in row {t}"
        assert all(0 <= i < len(case.logits[t]) for i in ids[t]), f"ids out of range in row {t}"
        if expected is not None:
            assert ids[t] == expected, f"ids of row {t}"
            assert_close(torch.tensor(weights[t]), torch.tensor(weight), name=f"weights of row {t}")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_cases(case, device):
    bias = None if case.bias is None else torch.tensor(case.bias, device=device)
    got = select_experts(torch.tensor(case.logits, device=device), case.config, expert_bias=bias)
    answer = {"ids": got.ids.tolist(), "weights": got.gate_weights.tolist()}
    judge(case, **answer)
    for name, value in case.wrong.items():
        with pytest.raises(AssertionError):
            judge(case, **(answer | {name: value}))
