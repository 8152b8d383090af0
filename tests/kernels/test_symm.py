"""The moves of one rank whose peers are late, or have never come; all in one process."""

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from ep_moe.kernels import symm, symm_back, window
from ep_moe.kernels.flags import GROUPS

W, MOST, H, K = 3, 8, 5, 2
ALL = (0, 1, 2)
LATE = 1
PROGRAMS = 6
IDS = [[0, 1], [2, 1], [2, 4], [5, 4], [3, 0], [-1, -1]]  # experts of ranks [0, 0], [1, 0], ...
SENT = [3, 3, 2]  # rows to each rank
PATTERN = 7
SLOTS, GROUPS = window.SLOTS.value, GROUPS.value


def wrapped(number):
    return (number + 2**31) % 2**32 - 2**31


@dataclass
class Rank0:
    """Windows of all ranks, full of a pattern; the flags of those that have come are set, as if
    they had begun and sent everything up to their group `sent`."""

    device: torch.device
    come: tuple[int, ...] = (0, 2)
    move: int = 1
    failed: bool = False
    arrived: int = 2  # rows from each peer
    sent: int = GROUPS - 1

    def __post_init__(self):
        self.layout = window.layout(W, MOST, 4 * H, K, 4)
        self.windows = [
            torch.zeros(self.layout.total, dtype=torch.uint8, device=self.device) for _ in ALL
        ]
        for memory in self.windows:
            memory[self.layout.rows :].view(torch.int32)[:] = PATTERN
        words = self.windows[0].view(torch.int32)
        self.flags, self.ready = words[: 2 * W * SLOTS].view(2, W, SLOTS)
        records = words[2 * W * SLOTS : 6 * W * SLOTS].view(W, SLOTS, 4)
        for peer in self.come:
            self.flags[peer] = wrapped(self.move * GROUPS + self.sent)
            self.ready[peer] = self.move
        for lane in range(PROGRAMS // W):  # the first lane has all of them
            first = min(lane * self.arrived, self.arrived)
            records[:, lane * W : (lane + 1) * W, :3] = torch.tensor(
                [first, self.arrived, self.arrived], dtype=torch.int32
            )
        ints = torch.zeros(SLOTS + 7, dtype=torch.int32, device=self.device)
        self.epochs, self.failure, self.seen = ints[:SLOTS], ints[SLOTS:-3], ints[-3:]
        self.epochs[:] = wrapped(self.move - 1)
        self.failure[0] = int(self.failed)
        pointers = [memory.data_ptr() for memory in self.windows] + [self.seen.data_ptr()]
        peers = torch.tensor(pointers, device=self.device)
        self.link = window.Link(
            peers, self.epochs, self.failure, 0, MOST, PROGRAMS, timeout_ns=200_000
        )
        self.elsewhere = [memory.clone() for memory in self.windows[1:]]

    def dispatch(self, ids=IDS, *, own=None):
        x = torch.arange(len(ids) * H, dtype=torch.float32, device=self.device).view(-1, H)
        ids = torch.tensor(ids, dtype=torch.int32, device=self.device)
        gates, rows = ids.float() / 10, self.rows(0).flatten(0, 1)
        order, local_ids, gates = symm.dispatch(
            x, ids, gates, rows if own is None else own, self.link, num_experts=2 * W
        )
        return x, order, local_ids, gates

    def rows(self, rank):
        rows = self.windows[rank][self.layout.rows : self.layout.ids]
        return rows.view(torch.float32)[: W * MOST * H].view(W, MOST, H)

    def order(self, tokens=2, *, arrived=None):
        """Of tokens that go everywhere, and as many rows from each rank, or `arrived`."""
        places = [r * MOST + t for t in range(tokens) for r in ALL]
        arrived = tokens if arrived is None else arrived
        words = [tokens] * W + [arrived] * W + places + [*range(tokens)] * W
        words = torch.tensor(words, dtype=torch.int32, device=self.device)
        return window.Order(words, tokens)

    def wrote_rows_elsewhere(self):
        pairs = zip(self.windows[1:], self.elsewhere, strict=True)
        start = self.layout.rows
        return [not torch.equal(now[start:], before[start:]) for now, before in pairs]

    def wrote_elsewhere(self):
        pairs = zip(self.windows[1:], self.elsewhere, strict=True)
        return [not torch.equal(now, before) for now, before in pairs]


def test_the_parts_of_a_window():
    for ranks in (1, 2, 3, 7, 8):
        parts = window.layout(ranks, MOST, 12, 3, 4)
        assert parts.rows >= 4 * SLOTS * ranks * (2 + 4)  # two flags and a record for each program
        assert parts.ids >= parts.rows + ranks * MOST * 12
        assert parts.gates >= parts.ids + ranks * MOST * 3 * 4
        assert parts.total >= parts.gates + ranks * MOST * 3 * 4
        assert not any(start % 128 for start in parts)


@triton.jit(do_not_specialize=["blocks"])
def _distance(out, blocks):
    start = out.to(tl.int64)
    tl.store(out, window.typed(start, blocks, out).to(tl.int64) - start)


def test_parts_of_a_large_window(device):
    """8 ranks of 65536 rows of 8192 numbers have their ids 8 GiB from its start."""
    out = torch.zeros(1, dtype=torch.int64, device=device)
    _distance[(1,)](out, 2**27 + 3)
    assert out.item() == (2**27 + 3) * 128


def test_what_a_dispatch_sends_and_remembers(device):
    rank = Rank0(device, come=ALL)
    x, order, local_ids, gates = rank.dispatch()
    words, tokens = order.words.cpu(), len(IDS)
    assert words[:W].tolist() == SENT
    assert words[W : 2 * W].tolist() == [3, 2, 2]
    sent_of_token = words[2 * W : 2 * W + tokens * W].view(tokens, W).tolist()
    token_of_sent = words[2 * W + tokens * W :].view(W, tokens)
    by_rank = [[0, 1, 4], [1, 2, 4], [2, 3]]
    for r, expected in enumerate(by_rank):
        assert token_of_sent[r, : SENT[r]].tolist() == expected
        assert [t for t in range(tokens) if sent_of_token[t][r] >= 0] == expected
        assert [sent_of_token[t][r] - r * MOST for t in expected] == list(range(SENT[r]))
        assert torch.equal(rank.rows(r)[0, : SENT[r]], x[torch.tensor(expected, device=device)])
    local_ids = local_ids.view(W, MOST, K)
    assert local_ids[0, :3].tolist() == [[0, 1], [-1, 1], [-1, 0]]
    assert (local_ids[1:, :2] == PATTERN).all()  # what stood there
    assert (local_ids[0, 3:] == -1).all()
    assert (local_ids[1:, 2:] == -1).all()
    assert torch.equal(gates.view(W, MOST, K)[0, 0], torch.tensor([0.0, 0.1], device=device))
    start = rank.layout.ids // 4
    to_2 = rank.windows[2].view(torch.int32)[start:][: 2 * K].tolist()
    assert to_2 == [-1, 0, 1, 0]  # [2, 4] and [5, 4] of experts from 4 on
    assert not rank.failure.any()
    assert not rank.seen.any()
    assert rank.epochs.tolist() == [1] * SLOTS


@pytest.mark.parametrize("sent", [GROUPS - 1, GROUPS - 2])
def test_nothing_is_taken_from_a_late_rank(device, sent):
    """One that has not begun is not written, one that has not sent all has not come."""
    rank = Rank0(device, sent=sent)
    _, order, local_ids, _ = rank.dispatch()
    local_ids = local_ids.view(W, MOST, K)
    assert (local_ids[LATE] == -1).all()
    assert (local_ids[2] == -1).all() == (sent < GROUPS - 1)
    assert order.words[W : 2 * W].tolist() == [3, 0, 2 if sent == GROUPS - 1 else 0]
    what, who, move = rank.seen.tolist()
    assert rank.failure.tolist() == [what, who, move, 1]
    assert (what, move) in {(window.BEGINNING.value, 1), (window.ARRIVAL.value, 1)}
    assert who in ((LATE,) if sent == GROUPS - 1 else (1, 2))
    if device.type == "cpu":  # one program after another: the first one waits no second time
        assert (what, who) == (window.BEGINNING.value, LATE)
    assert not rank.wrote_rows_elsewhere()[0]
    rank = Rank0(device, sent=sent)
    symm_back.combine(torch.ones(W * MOST, H, device=device), rank.order(), rank.link)
    assert rank.failure[0] > 0
    assert not rank.wrote_rows_elsewhere()[0]


def test_after_a_failure_no_peer_is_written(device):
    """One that is late may still read what arrived before; and all shall notice."""
    for come in (ALL, (0, 2)):
        ranks = [Rank0(device, come=come, failed=True) for _ in "123"]
        x, order, local_ids, _ = ranks[0].dispatch()
        symm.replay(x, ranks[1].rows(0).flatten(0, 1), order, ranks[1].link)
        rows = torch.ones(W * MOST, H, device=device)
        symm_back.combine(rows, ranks[2].order(), ranks[2].link)
        assert local_ids.view(W, MOST, K)[0, :3].tolist() == [[0, 1], [-1, 1], [-1, 0]]
        for rank in ranks:
            assert rank.wrote_elsewhere() == [False, False]
            assert rank.failure.tolist() == [1, 0, 0, 0]  # the first one
            assert rank.epochs.tolist() == [1] * SLOTS


def test_replayed_and_taken(device):
    rank = Rank0(device, come=ALL)
    x, order, *_ = rank.dispatch()
    again = Rank0(device, come=ALL)
    symm.replay(-x, again.rows(0).flatten(0, 1), order, again.link)
    for r in ALL:
        assert torch.equal(again.rows(r)[0, : SENT[r]], -rank.rows(r)[0, : SENT[r]])
    taken = torch.zeros(W, MOST, H, device=device)
    symm.take(again.rows(0).flatten(0, 1).fill_(3.0), taken.flatten(0, 1), order, again.link)
    for source, n in enumerate((0, 2, 2)):
        assert (taken[source, :n] == 3).all()
    assert not taken[0].any()  # its own stand where it wanted them


def test_own_rows_go_where_they_are_wanted(device):
    """Out of the area that others write, which they then need not be copied out of."""
    rank, own = Rank0(device, come=ALL), torch.zeros(W * MOST, H, device=device)
    x, order, *_ = rank.dispatch(own=own)
    assert torch.equal(own[: SENT[0]], x[[0, 1, 4]])
    assert not own[SENT[0] :].any()
    assert (rank.rows(0).view(torch.int32)[0] == PATTERN).all()
    again = Rank0(device, come=ALL)
    symm.replay(-x, own, order, again.link)
    assert torch.equal(own[: SENT[0]], -x[[0, 1, 4]])


def test_combined(device):
    rank = Rank0(device, come=ALL)
    rank.rows(0)[:] = torch.arange(W * MOST, device=device).view(W, MOST, 1)
    rows = torch.full((W * MOST, H), 100.0, device=device)
    rows[1] = 200.0
    out = symm_back.combine(rows, rank.order(), rank.link)
    assert out[:, 0].tolist() == [100 + MOST + 2 * MOST, 200 + MOST + 1 + 2 * MOST + 1]
    for home in (1, 2):
        assert (rank.rows(home)[0, :2] == 100).all()
        assert (rank.rows(home)[0, 2:].view(torch.int32) == PATTERN).all()
    assert not rank.failure.any()


def eight_rows_at_a_time(monkeypatch, request):
    monkeypatch.setattr(window, "BYTES", 8 * 8 * 4)
    for sizes in (window.tile_sizes, symm_back._constants):
        sizes.cache_clear()
        request.addfinalizer(sizes.cache_clear)


def test_a_sum_waits_for_its_last_row_alone(device, monkeypatch, request):
    """Two programs push a row each in a group, two sum up two tokens at a time."""
    if device.type == "cuda":
        pytest.skip("a compiled kernel waits unseen")
    awaited = []

    def spy(flags, value, wanted, *args):
        if wanted.shape[1] == 2:  # of a summer
            awaited.append((value + 0 * wanted.to(tl.int32)).handle.data[wanted.handle.data])
        return wait(flags, value, wanted, *args)

    wait = symm_back.wait
    monkeypatch.setattr(symm_back, "wait", spy)
    monkeypatch.setattr(symm_back, "AT_LEAST", tl.constexpr(1))
    eight_rows_at_a_time(monkeypatch, request)
    rank, rows = Rank0(device, come=ALL), torch.ones(W * MOST, H)
    order = rank.order(7, arrived=0)  # it sends none back, and gets seven
    symm_back.combine(rows, order, rank.link._replace(programs=4))
    assert [set(numbers - GROUPS) for numbers in awaited] == [{0}, {2}, {3}, {1}, {3}, {3}]
    assert {len(numbers) for numbers in awaited} == {4}  # two programs of two peers


def test_a_late_rank_is_waited_for_once(device, monkeypatch, request):
    """However many blocks of tokens a program sums up. The next one knows already."""
    if device.type == "cuda":
        pytest.skip("a compiled kernel waits unseen")
    patiences = []

    def spy(flags, value, wanted, peer, now, patience, *args):
        patiences.append(int(patience.handle.data.item()))
        return wait(flags, value, wanted, peer, now, patience, *args)

    wait = symm_back.wait
    monkeypatch.setattr(symm_back, "wait", spy)
    eight_rows_at_a_time(monkeypatch, request)
    rank = Rank0(device, come=ALL, sent=-1)  # all have begun
    symm_back.combine(torch.ones(W * MOST, H), rank.order(7), rank.link._replace(programs=3))
    assert patiences == [200_000, 200_000, 0, 0, 0, 0, 0]


def test_a_group_is_told_of_when_it_is_there(device, monkeypatch):
    """The same seven rows: what stands at a peer whenever it is told."""
    if device.type == "cuda":
        pytest.skip("a compiled kernel tells unseen")
    told, release = [], symm_back.release
    rank, rows = Rank0(device, come=ALL), torch.ones(W * MOST, H)

    def spy(address, number):
        there = [int((rank.rows(r)[0, :7] == 1).all(1).sum()) for r in (1, 2)]
        told.append((int(number.handle.data.item()) - GROUPS, *there))
        release(address, number)

    monkeypatch.setattr(symm_back, "release", spy)
    monkeypatch.setattr(symm_back, "AT_LEAST", tl.constexpr(1))
    order = rank.order(7)
    order.words[:W] = 1  # it gets them back, and sends seven
    symm_back.combine(rows, order, rank.link._replace(programs=4))
    steps = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 5), (1, 6), (2, 7), (3, 7)]
    before = [0, *(n for _, n in steps)]
    expected = [
        pair
        for (group, n), had in zip(steps, before, strict=False)
        for pair in ((group, n, had), (group, n, n))
    ]
    assert told == expected


@pytest.mark.parametrize("move", [2**31 - 1, -(2**31), -(2**31) + 1, 2**28 - 1, 2**28])
@pytest.mark.parametrize("stale", [None, -1, 2 * GROUPS, 2**31])
def test_moves_wrap_around(move, stale, device):
    """A server makes 2^31 moves in a day or two. Flags count GROUPS times as fast, and one that was
    last set days ago may be anywhere."""
    rank = Rank0(device, ALL if stale is None else (0, 2), move)
    if stale is not None:
        rank.ready[LATE] = wrapped(move + stale)
        rank.flags[LATE] = wrapped(move * GROUPS + GROUPS - 1 + stale)
    _, _, local_ids, _ = rank.dispatch()
    assert rank.epochs.tolist() == [move] * SLOTS
    what, who, *_ = rank.failure.tolist()
    assert (what > 0, who) == ((False, 0) if stale is None else (True, LATE))
    assert (local_ids.view(W, MOST, K)[LATE, :2] == PATTERN).all() == (stale is None)
