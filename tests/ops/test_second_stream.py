"""The second stream; its kernels are in the tests of experts on a GPU."""

from contextlib import contextmanager

import torch

from ep_moe.ops import SecondStream


def test_each_stream_has_a_second_of_its_own(monkeypatch):
    """Of two streams that share one, what the first still reads would be written for the other:
    memory that is freed goes back to the stream that it came from."""
    events, current = [], []

    class Stream:
        def __init__(self, device):
            self.device = device

        def wait_stream(self, other):
            events.append((self, "waits for", other))

    @contextmanager
    def entered(stream):
        events.append((stream, "runs"))
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
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
