"""Bring each row to the ranks that need it, and the results back. Never sees weights.

A new transport is a file here and its line in TRANSPORTS.
"""

import logging
from functools import lru_cache

import torch

from ep_moe.dispatch.auto import AutoTransport
from ep_moe.dispatch.autograd import combine, dispatch, dispatch_beside
from ep_moe.dispatch.collective import CollectiveTransport
from ep_moe.dispatch.deepep import DeepEPTransport
from ep_moe.dispatch.deepep_low_latency import LowLatencyTransport
from ep_moe.dispatch.local import LocalTransport
from ep_moe.dispatch.pipeline import pipelined
from ep_moe.dispatch.protocol import Caps, Transport
from ep_moe.dispatch.symm import SymmTransport
from ep_moe.errors import ConfigError
from ep_moe.parallel import ExpertParallel

TRANSPORTS = {
    transport.name: transport
    for transport in (
        LocalTransport,
        CollectiveTransport,
        SymmTransport,
        DeepEPTransport,
        LowLatencyTransport,
    )
}

log = logging.getLogger("ep_moe")

__all__ = [
    "TRANSPORTS",
    "Caps",
    "Transport",
    "combine",
    "dispatch",
    "dispatch_beside",
    "make_transport",
    "pipelined",
]


def make_transport(
    name: str,
    ep: ExpertParallel,
    *,
    max_tokens_per_rank: int | None = None,
) -> Transport:
    """The transport of that name for these ranks. `auto` takes `local` for one rank; for more the
    fastest of those that can run, as measured in its first call, or `collective` where there are no
    GPUs or no bound on tokens. max_tokens_per_rank: that bound, the most rows of x in a call, for
    transports whose buffers have a fixed size.

    Raises ConfigError for an unknown name or a number of ranks that the transport does not serve.
    """
    if name == "auto":
        if ep.size > 1 and torch.cuda.is_available() and max_tokens_per_rank:
            return AutoTransport(ep, max_tokens_per_rank)
        chosen = "local" if ep.size == 1 else "collective"
        _announce(chosen, ep.size)
    else:
        chosen = name
    if chosen not in TRANSPORTS:
        raise ConfigError("transport", name, "one of " + ", ".join(["auto", *TRANSPORTS]))
    transport = TRANSPORTS[chosen]
    if transport.caps.needs_group and ep.group is None:
        raise ConfigError("transport", name, "local or auto without a process group in `ep`")
    if transport.caps.max_ranks is not None and ep.size > transport.caps.max_ranks:
        raise ConfigError("transport", name, f"another than that for {ep.size} ranks, such as auto")
    if transport.caps.fixed_size and not max_tokens_per_rank:
        raise ConfigError(
            "max_tokens_per_rank",
            max_tokens_per_rank,
            f"the most tokens that a rank has in a call: transport = {name!r} has buffers of a "
            "fixed size",
        )
    return transport(ep, max_tokens_per_rank)


@lru_cache  # once, however many layers a model has
def _announce(chosen: str, ranks: int) -> None:
    on_gpus = torch.cuda.is_available() and ranks > 1
    why = "; with max_tokens_per_rank set, auto also measures symm and deepep" if on_gpus else ""
    log.info("transport auto: %s for %d rank(s)%s", chosen, ranks, why)
