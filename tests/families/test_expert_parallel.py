"""Each family's layer on two ranks equals the one-process layer: uneven tokens, one start of the
ranks for all families."""

import pytest

from ep_moe.testing import run_ranks
from tests.dispatch.ep_cases import Case, expert_parallel_each, one_process
from tests.dispatch.test_expert_parallel import compare
from tests.families.table import FAMILIES

CASES = {name: Case((11, 6), family.moe_config()) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def two_ranks():
    ranks = run_ranks(expert_parallel_each, 2, list(CASES.values()), "cpu")
    return {name: [got[i] for got in ranks] for i, name in enumerate(CASES)}


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_equal_one_process(name, two_ranks):
    compare(CASES[name], two_ranks[name], one_process(CASES[name]))
