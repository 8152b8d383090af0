"""What the transports of several ranks have in common."""

import torch

from ep_moe.replay import in_backward


def stage(layer: int, call: int, what: str) -> str:
    """What errors, and ranks that compare where they are, call a move."""
    direction = "backward" if in_backward() else "forward"
    return f"layer {layer}, call {call}, {direction}, {what}"


def capturing() -> bool:
    """A CUDA graph: no waiting for the device, no new buffers."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
