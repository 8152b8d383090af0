"""What the transports of several ranks have in common."""

from collections.abc import Mapping
from functools import cache

import torch

from ep_moe import check
from ep_moe.errors import ConfigError
from ep_moe.peers import Peers
from ep_moe.replay import in_backward


def stage(layer: int, call: int, what: str) -> str:
    """What errors, and ranks that compare where they are, call a move."""
    direction = "backward" if in_backward() else "forward"
    return f"layer {layer}, call {call}, {direction}, {what}"


def capturing() -> bool:
    """A CUDA graph: no waiting for the device, no new buffers."""
    return _gpus() and torch.cuda.is_current_stream_capturing()


@cache  # asked for anew in each move it would cost the host more than what follows
def _gpus() -> bool:
    return torch.cuda.is_available()


def agree(peers: Peers, layer: int, told: Mapping[str, object]) -> None:
    """In a layer's first call: raise ConfigError unless every rank was told the same. Ranks that
    count on different sizes would write over each other's rows."""
    now = f"the first call of layer {layer}"
    if check.wanted():  # else these words would be compared with those of another exchange
        check.same_exchange(peers, now)
    of_ranks = peers.gather(list(told.values()), now)
    for name, values in zip(told, zip(*of_ranks, strict=True), strict=True):
        if len(set(values)) > 1:
            raise ConfigError(name, list(values), "the same on every rank")
