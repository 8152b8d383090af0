import pytest
import torch
import torch.distributed as dist
from progress import Progress, StepResult, load_ranks

from ep_moe.parallel import Process
from ep_moe.testing import run_ranks

ALONE = Process(0, 0, 1, torch.device("cpu"), None)


def result(*counts, loss=1.0, dropped=0.0):
    """A step of one layer for each list of counts."""
    shares = torch.full((len(counts),), dropped)
    return StepResult(torch.tensor(loss), torch.tensor(2.0), torch.tensor(counts), shares)


def test_figures_of_several_steps():
    progress = Progress(ALONE, tokens_per_step=4)
    progress.add(result([4, 0, 0, 0], [1, 1, 1, 1], loss=1.0, dropped=0.2))
    progress.add(result([0, 4, 0, 0], [1, 1, 2, 0], loss=3.0, dropped=0.4))
    line = progress.line()
    assert line["loss"] == 2.0
    assert line["grad_norm"] == 2.0
    assert line["dropped_share"] == pytest.approx(0.3)
    assert line["tokens_per_expert"] == [[4, 4, 0, 0], [2, 2, 3, 1]]
    assert line["dead_experts"] == 2
    assert line["max_vio"] == pytest.approx((1.0 + 0.5) / 2)  # of the sums
    assert line["busiest_rank"] == pytest.approx((4 + 4 + 1 + 2) / 4)  # of single batches
    assert line["load_change"] == pytest.approx((1.0 + 0.25) / 2)
    assert line["tokens_per_second"] == progress.speeds[-1] > 0


def test_the_load_changes_from_line_to_line_too():
    progress = Progress(ALONE, tokens_per_step=4)
    changes = []
    for counts in ([4, 0], [4, 0], [0, 4]):
        progress.add(result(counts))
        changes.append(progress.line()["load_change"])
        progress.start_line()
    assert changes == [None, 0.0, 1.0]


@pytest.mark.parametrize(
    "ranks, num_experts, expected", [(2, 8, 2), (1, 8, 8), (1, 64, 8), (1, 12, 4), (1, 3, 1)]
)
def test_ranks_whose_load_is_compared(ranks, num_experts, expected):
    process = Process(0, 0, ranks, torch.device("cpu"), None)
    assert load_ranks(num_experts, process) == expected


def test_every_rank_has_the_figures_of_all():
    first, second = run_ranks(_line, 2)
    assert first == second
    assert first["loss"] == 1.5
    assert first["tokens_per_expert"] == [[3, 1]]
    assert first["busiest_rank"] == 1.5
    assert first["dropped_share"] == 0.25


def _line(rank):
    process = Process(rank, rank, 2, torch.device("cpu"), dist.group.WORLD)
    progress = Progress(process, tokens_per_step=4)
    progress.add(result([[2, 0], [1, 1]][rank], loss=1.0 + rank, dropped=rank / 2))
    return {k: v for k, v in progress.line().items() if k != "tokens_per_second"}
