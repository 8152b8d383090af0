"""Products that need not wait for each other, on a second stream: while the last tiles of one are
computed, the multiprocessors that have none of them begin with the next."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def beside(device: torch.device) -> Iterator[Callable[[], None]]:
    """What is launched inside comes after all that was launched before it, and may run beside what
    is launched after it, until the function that this gives is called. It has to be: before
    anything reads a result, or frees an input."""
    if device.type != "cuda":
        yield lambda: None
        return
    here = torch.cuda.current_stream(device)
    second = _second_stream(here)
    second.wait_stream(here)
    with torch.cuda.stream(second):
        yield lambda: here.wait_stream(second)


@functools.cache  # always the same: memory that one stream gave back serves no other
def _second_stream(here: torch.cuda.Stream) -> torch.cuda.Stream:
    """Its own for each: a result that is read here and freed is written again after what `here`
    launched, not after what other streams did."""
    return torch.cuda.Stream(here.device)
