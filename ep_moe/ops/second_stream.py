"""Work that need not wait for other work, on a second stream: products whose last tiles leave
multiprocessors idle, rows that travel."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch

Event = torch.cuda.Event | None  # None: on a CPU


class SecondStream:
    """Marks a place in the present stream of a GPU. What is launched inside `launch()` comes after
    all that was launched before that place, and may run beside what is launched after it, until
    `join`. That has to be called, whatever happens, before a result is read, or anything freed that
    was read inside. On a CPU nothing is beside anything.

    Results may be freed when they have been read here: their memory is written again after the next
    place. That is enough for torch's default allocator, not for `expandable_segments`, which may
    unmap it before.

    which: streams of other names are other streams. Work on them may be beside both.
    """

    def __init__(self, device: torch.device, which: str = "work") -> None:
        self.here = self.second = None
        if device.type == "cuda":
            self.here = torch.cuda.current_stream(device)
            self.second = _second_of(self.here, which)
            self.second.wait_stream(self.here)

    def launch(self) -> AbstractContextManager[object]:
        return nullcontext() if self.second is None else torch.cuda.stream(self.second)

    def place(self) -> Event:
        """What has been launched on the second stream so far, for `wait`."""
        return None if self.second is None else cast(torch.cuda.Event, self.second.record_event())

    def wait(self, place: Event) -> None:
        """What is launched here from now on comes after that."""
        if self.here is not None and place is not None:
            self.here.wait_event(place)

    def follow(self) -> None:
        """What is launched there from now on comes after all that was launched here."""
        if self.here is not None and self.second is not None:
            self.second.wait_stream(self.here)

    def read_here(self, *results: torch.Tensor) -> None:
        """Results of the second stream that somebody else frees, who knows when: their memory then
        waits for what has been launched here."""
        if self.here is not None:
            for result in results:
                result.record_stream(self.here)

    def join(self) -> None:
        if self.here is not None and self.second is not None:
            self.here.wait_stream(self.second)


@functools.cache  # always the same: memory that one stream gave back serves no other
def _second_of(here: torch.cuda.Stream, which: str) -> torch.cuda.Stream:
    """Its own for each: a result that is read here and freed is written again after what `here`
    launched, not after what other streams did."""
    return torch.cuda.Stream(here.device)
