"""The moves of one rank whose peers are late, or have never come; all in one process."""

import pytest
import torch

from ep_moe.kernels import symm

W, MOST, WIDTH = 3, 8, 5
ALL = (0, 1, 2)
LATE = 1


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(symm, "PROGRAMS", 2)


class Rank0:
    """Windows of all ranks, full of a pattern; the flags of those that have come are set."""

    def __init__(self, device, come=(0, 2), epoch=1, failed=False):
        self.layout = symm.layout(W, MOST, 4 * WIDTH)
        self.windows = [
            torch.zeros(self.layout.total, dtype=torch.uint8, device=device) for _ in ALL
        ]
        for window in self.windows:
            window[self.layout.counts :].view(torch.int32)[:] = 7
        mine = self.windows[0].view(torch.int32)
        self.count_flags = mine[self.layout.count_flags // 4 :][:W]
        self.row_flags = mine[self.layout.row_flags // 4 :][: W * symm.PROGRAMS].view(W, -1)
        for peer in come:
            self.count_flags[peer] = self.row_flags[peer] = epoch
        self.epochs = torch.full((symm.PROGRAMS,), epoch, dtype=torch.int32, device=device) - 1
        self.failure = torch.zeros(3, dtype=torch.int32, device=device)
        self.failure[0] = int(failed)
        pointers = torch.tensor([w.data_ptr() for w in self.windows], device=device)
        self.common = {"rank": 0, "window": self.layout, "timeout_ns": 200_000}
        self.where = (pointers, self.failure)
        self.elsewhere = [window.clone() for window in self.windows[1:]]

    def counts(self):
        pointers, failure = self.where
        offsets = torch.tensor([0, 1, 3, 6], dtype=torch.int32, device=pointers.device)
        return symm.exchange_counts(offsets, pointers, self.epochs[:1], failure, **self.common)

    def move(self, counts, values, out):
        pointers, failure = self.where
        counts = torch.tensor(counts, dtype=torch.int32, device=pointers.device)
        where = (pointers, self.epochs, failure)
        symm.move(values, None, counts, out, *where, back=False, **self.common)

    def wrote_elsewhere(self):
        pairs = zip(self.windows[1:], self.elsewhere, strict=True)
        return [not torch.equal(now, before) for now, before in pairs]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8])
def test_the_parts_of_a_window(ranks):
    parts = symm.layout(ranks, MOST, 12)
    assert parts.count_flags == 0
    assert parts.row_flags >= 4 * ranks
    assert parts.counts >= parts.row_flags + 4 * ranks * symm.PROGRAMS
    assert parts.rows >= parts.counts + 2 * 4 * ranks**2
    assert parts.bytes_of_rows >= ranks * MOST * 12
    assert parts.total >= parts.rows + 2 * parts.bytes_of_rows
    assert not any(start % 16 for start in parts)


def test_counts_are_there_twice(device):
    """A peer may still read those of the last exchange."""
    rank = Rank0(device, come=ALL)
    rank.counts()
    after_one = rank.windows[1].clone()
    rank.count_flags[:] = 2
    rank.counts()
    of_one = slice(rank.layout.counts + 4 * W**2, rank.layout.counts + 2 * 4 * W**2)
    assert torch.equal(rank.windows[1][of_one], after_one[of_one])
    assert not torch.equal(rank.windows[1][of_one], rank.elsewhere[0][of_one])


def test_counts_of_a_late_rank_are_none(device):
    """What stands there from before might be more rows than the buffers of this layer hold."""
    rank = Rank0(device)
    assert not rank.counts().any()
    assert rank.failure.tolist() == [symm.COUNTS, LATE, 1]


def test_nothing_is_taken_from_a_late_rank(device):
    rank = Rank0(device)
    values = torch.arange(6 * WIDTH, dtype=torch.int32, device=device).view(6, WIDTH)
    out = torch.full((6, WIDTH), -1, dtype=torch.int32, device=device)
    rank.move([[1, 2, 3], [2, 0, 0], [3, 0, 0]], values, out)
    assert out[:, 0].tolist() == [0, -1, -1, 7, 7, 7]
    assert rank.failure.tolist() == [symm.ROWS, LATE, 1]
    assert rank.wrote_elsewhere() == [True, True]


def test_after_a_failure_no_peer_is_written(device):
    """One that is late may still read the move before the last; and all shall notice."""
    rank = Rank0(device, come=ALL, failed=True)
    values = torch.ones(6, WIDTH, dtype=torch.int32, device=device)
    rank.move([[1, 2, 3], [2, 0, 0], [3, 0, 0]], values, torch.empty_like(values))
    assert rank.wrote_elsewhere() == [False, False]
    rank = Rank0(device, failed=True)
    rank.counts()
    assert rank.wrote_elsewhere() == [False, False]
    assert rank.failure.tolist() == [1, 0, 0]  # the first one


@pytest.mark.parametrize("epoch", [2**31 - 1, -(2**31), -(2**31) + 1])
@pytest.mark.parametrize("come", [ALL, (0, 2)])
def test_epochs_wrap_around(epoch, come, device):
    """A server makes 2^31 moves in a day or two."""
    rank = Rank0(device, come, epoch)
    if LATE not in come:  # where it was before
        rank.row_flags[LATE] = rank.count_flags[LATE] = rank.epochs[0]
    values = torch.arange(6 * WIDTH, dtype=torch.int32, device=device).view(6, WIDTH)
    out = torch.full((6, WIDTH), -1, dtype=torch.int32, device=device)
    rank.move([[1, 2, 3], [2, 0, 0], [3, 0, 0]], values, out)
    assert rank.epochs.tolist() == [epoch, epoch]
    assert rank.failure.tolist() == [0, 0, 0] if LATE in come else [symm.ROWS, LATE, epoch]
    assert out[:, 0].tolist() == [0, *[7 if LATE in come else -1] * 2, 7, 7, 7]
    if LATE in come:
        half = rank.layout.rows + epoch % 2 * rank.layout.bytes_of_rows
        arrived = rank.windows[1][half:].view(torch.int32)[: 2 * WIDTH]
        assert torch.equal(arrived, values[1:3].flatten())
