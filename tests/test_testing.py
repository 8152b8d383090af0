"""The test harness itself: ranks that raise, die or hang fail the test, and nothing outlives it."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from ep_moe.testing import assert_close, run_ranks


def add_up(rank, offset):
    total = torch.tensor(float(rank + offset))
    dist.all_reduce(total)
    return total.item()


def raise_on_one(rank):
    if rank == 1:
        raise ZeroDivisionError("planted")
    dist.barrier()


def die_on_one(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang_on_one(rank):
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def test_results_come_back():
    assert run_ranks(add_up, 3, 10) == [33.0, 33.0, 33.0]


@pytest.mark.parametrize(
    "function, message", [(raise_on_one, "planted"), (die_on_one, "rank 0|exit code -9")]
)
def test_a_failing_rank_fails_the_test(function, message):
    with pytest.raises(AssertionError, match=message):
        run_ranks(function, 2)


def test_a_hanging_rank_is_killed():
    start = time.monotonic()
    with pytest.raises(AssertionError):
        run_ranks(hang_on_one, 2, timeout=5.0)
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("bad", [float("nan"), 1.1])
def test_assert_close_fails(bad):
    with pytest.raises(AssertionError, match="the thing: off by"):
        assert_close(torch.tensor([1.0, bad]), torch.ones(2), name="the thing")
