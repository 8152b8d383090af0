"""What kernels ask about the GPU that they will run on, and how much of it is for others."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import NamedTuple

import torch

_LEFT: ContextVar[int] = ContextVar("ep_moe_left_multiprocessors", default=0)


@contextmanager
def leaving(multiprocessors: int) -> Iterator[None]:
    """Persistent kernels that are launched inside leave so many to what runs beside them, which
    would otherwise wait for their end: their programs stay where they are until all is done."""
    token = _LEFT.set(multiprocessors)
    try:
        yield
    finally:
        _LEFT.reset(token)


def left() -> int:
    """To others. A thread of its own, such as autograd's, starts at 0."""
    return _LEFT.get()


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # interpreted: a few, so that persistent programs take turns
    return _gpu(device).multiprocessors


def architecture(device: torch.device) -> str:
    """sm_90, gfx942, ...; `interpreter` where there is no GPU."""
    if device.type != "cuda":
        return "interpreter"
    return _gpu(device).architecture


class _GPU(NamedTuple):
    multiprocessors: int
    architecture: str


def _gpu(device: torch.device) -> _GPU:
    return _asked(torch.cuda.current_device() if device.index is None else device.index)


@cache  # a launch asks several times, and torch takes microseconds to answer
def _asked(index: int) -> _GPU:
    properties = torch.cuda.get_device_properties(index)
    name = f"sm_{properties.major}{properties.minor}"
    if torch.version.hip:
        name = properties.gcnArchName.partition(":")[0]
    return _GPU(properties.multi_processor_count, name)


def registers(most: int) -> dict[str, int]:
    """A launch option for NVIDIA, whose compiler would rather spill than keep a second program from
    a multiprocessor."""
    return {} if torch.version.hip else {"maxnreg": most}
