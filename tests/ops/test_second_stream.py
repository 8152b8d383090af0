"""The second stream; its kernels are in the tests of experts on a GPU."""

from contextlib import contextmanager

import pytest
import torch

from ep_moe.ops import SecondStream


@pytest.fixture
def streams(monkeypatch):
    """Streams that launch nothing: what is asked of them, and the one that is current."""
    events, current = [], []

    class Stream:
        def __init__(self, device):
            self.device = device

        def wait_stream(self, other):
            events.append((self, "waits for", other))

        def record_event(self):
            events.append((self, "has come to", len(events)))
            return len(events) - 1

        def wait_event(self, event):
            events.append((self, "waits for", event))

    @contextmanager
    def entered(stream):
        events.append((stream, "runs"))
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return Stream, events, current


def test_each_stream_has_a_second_of_its_own(streams):
    """Of two streams that share one, what the first still reads would be written for the other:
    memory that is freed goes back to the stream that it came from."""
    Stream, events, current = streams
    gpu, seconds = torch.device("cuda", 0), []
    one, other = Stream(gpu), Stream(gpu)
    for here in (one, other, one):
        events.clear()
        current.append(here)
        place = SecondStream(gpu)
        with place.launch():
            pass
        place.join()
        second = events[1][0]
        seconds.append(second)
        assert events == [
            (second, "waits for", here),
            (second, "runs"),
            (here, "waits for", second),
        ]
    assert seconds[0] is seconds[2]
    assert len({one, other, *seconds}) == 4


def test_a_stream_may_wait_for_a_place_in_the_other(streams):
    """Streams of other names are other streams."""
    Stream, events, current = streams
    gpu = torch.device("cuda", 0)
    here = Stream(gpu)
    current.append(here)
    work, moves = SecondStream(gpu), SecondStream(gpu, "moves")
    second = moves.second
    assert len({here, work.second, second}) == 3
    assert SecondStream(gpu, "moves").second is second
    events.clear()
    place = moves.place()
    moves.wait(place)
    moves.follow()
    lent = []

    class Lent:
        def record_stream(self, stream):
            lent.append((self, stream))

    results = [Lent(), Lent()]
    moves.read_here(*results)
    assert events == [
        (second, "has come to", place),
        (here, "waits for", place),
        (second, "waits for", here),
    ]
    assert lent == [(result, here) for result in results]


def test_on_a_cpu_nothing_is_beside_anything():
    moves = SecondStream(torch.device("cpu"), "moves")
    with moves.launch():
        place = moves.place()
    moves.wait(place)
    moves.follow()
    moves.read_here(torch.zeros(1))
    moves.join()
