"""The fastest transport for a layer's own sizes, by a short measurement in its first call.

What can run at all is read off the machine (`needs`); among those nothing but a clock decides: a
link, a number of tokens or a width turns the order round. Every rank takes part in each measurement
and all decide alike, by the slowest of them. Layers of equal sizes decide once.

EP_MOE_TRANSPORTS=file keeps what was found, for the next start.
"""

import json
import logging
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ep_moe.dispatch.collective import CollectiveTransport
from ep_moe.dispatch.deepep import DeepEPTransport
from ep_moe.dispatch.moves import agree, capturing
from ep_moe.dispatch.needs import needs_of, unmet
from ep_moe.dispatch.protocol import Caps, Plan, Sent, Transport
from ep_moe.dispatch.symm import SMS, SymmTransport
from ep_moe.errors import (
    BackendUnavailable,
    CallMismatch,
    ConfigError,
    DispatchTimeout,
    PeerLost,
)
from ep_moe.host import Host
from ep_moe.parallel import ExpertParallel
from ep_moe.types import Routing

MEASURED = {
    transport.name: transport for transport in (CollectiveTransport, SymmTransport, DeepEPTransport)
}
FILE = "EP_MOE_TRANSPORTS"
WARM, TURNS = 2, 5

log = logging.getLogger("ep_moe")


@dataclass(frozen=True)
class Sizes:
    """What a choice is for. tokens: the most of a rank; measured: the most that a rank has in the
    first call, raised to a power of two. keep: rows, for a backward."""

    gpu: str
    ranks: int
    tokens: int
    measured: int
    hidden_size: int
    num_experts: int
    top_k: int
    dtype: str
    keep: bool
    sms: int | None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


class AutoTransport:
    """Stands for the one that its first call chooses. Made where there is a choice: several ranks
    with GPUs, and a bound on their tokens, which `symm` and `deepep` want."""

    name: ClassVar[str] = "auto"

    def __init__(self, ep: ExpertParallel, max_tokens_per_rank: int | None = None) -> None:
        self.ep, self.max_tokens, self.layer = ep, max_tokens_per_rank, next(ep.peers.layers)
        self._sms: int | None = None  # None = as many as alone
        self.transport: Transport | None = None

    def __deepcopy__(self, _: dict[int, Any]) -> "AutoTransport":
        copy = AutoTransport(self.ep, self.max_tokens)
        copy._sms = self._sms
        return copy

    @property
    def sms(self) -> int:
        """Multiprocessors that a move takes. May be set before the first call, for symm or
        deepep, alike on every rank; those that are tried have otherwise as many as alone."""
        if self.transport is not None:
            return self.transport.sms
        return SMS if self._sms is None else self._sms

    @sms.setter
    def sms(self, sms: int) -> None:
        if self.transport is not None:
            raise ConfigError("sms", sms, "set before the first call, which has measured with it")
        self._sms = sms

    @property
    def caps(self) -> Caps:
        if self.transport is not None:
            return self.transport.caps
        return Caps(  # graphable: the first call itself says that it cannot be captured
            needs_group=True,
            max_ranks=None,
            deterministic=True,
            graphable=True,
            fixed_size=True,
        )

    @property
    def chosen(self) -> Transport:
        assert self.transport is not None, "a move before the first dispatch"
        return self.transport

    def dispatch(self, x: Tensor, routing: Routing, num_experts: int, *, keep: bool = True) -> Sent:
        if self.transport is None:
            self.transport = self._choose(x, routing, num_experts, keep=keep)
        return self.transport.dispatch(x, routing, num_experts, keep=keep)

    def replay(self, plan: Plan, x: Tensor, *, keep: bool = True) -> Tensor:
        return self.chosen.replay(plan, x, keep=keep)

    def replay_gates(self, plan: Plan, gates: Tensor) -> Tensor:
        return self.chosen.replay_gates(plan, gates)

    def combine(self, plan: Plan, rows: Tensor) -> Tensor:
        return self.chosen.combine(plan, rows)

    def combine_gates(self, plan: Plan, gates: Tensor) -> Tensor:
        return self.chosen.combine_gates(plan, gates)

    def _choose(self, x: Tensor, routing: Routing, num_experts: int, *, keep: bool) -> Transport:
        if capturing():
            raise BackendUnavailable(
                "transport = 'auto' chooses in its first call, which cannot be captured in a CUDA "
                "graph: run it before, or call layer.warmup(tokens), or name a transport"
            )
        sizes = Sizes(
            gpu=torch.cuda.get_device_name(x.device) if x.is_cuda else "none",
            ranks=self.ep.size,
            tokens=self.max_tokens or 0,
            measured=len(x),
            hidden_size=x.shape[1],
            num_experts=num_experts,
            top_k=routing.ids.shape[1],
            dtype=str(x.dtype).removeprefix("torch."),
            keep=keep,
            sms=self._sms,
        )
        sizes = self._agree(sizes)
        found: dict[Sizes, str] = self.ep.peers.shared.setdefault(self.name, {})
        if sizes not in found:
            found[sizes] = self._find(sizes, x, routing)
        transport = self._make(found[sizes])
        transport.layer = self.layer  # those that were tried have numbers of their own
        return transport

    def _agree(self, sizes: Sizes) -> Sizes:
        """The same on every rank: ranks that differ would not all look for a choice."""
        told = asdict(replace(sizes, gpu="", measured=0))  # several makes, and any share of tokens
        told["max_tokens_per_rank"] = told.pop("tokens")
        agree(self.ep.peers, self.layer, told)
        most = max(self.ep.peers.gather(sizes.measured, f"the choice of layer {self.layer}"))
        return replace(sizes, measured=1 << max(most - 1, 0).bit_length())

    def _make(self, name: str) -> CollectiveTransport | SymmTransport | DeepEPTransport:
        transport = MEASURED[name](self.ep, self.max_tokens)
        if self._sms is not None and isinstance(transport, SymmTransport | DeepEPTransport):
            transport.sms = self._sms
        return transport

    def _find(self, sizes: Sizes, x: Tensor, routing: Routing) -> str:
        """The fastest one's name, the same on every rank."""
        peers, reasons = self.ep.peers, self._reasons(x, sizes.top_k)
        able = peers.gather([name for name in MEASURED if name not in reasons], "what can run")
        among = [name for name in MEASURED if all(name in of_rank for of_rank in able)]
        reasons = {
            n: reasons.get(n, "cannot run on every rank") for n in MEASURED if n not in among
        }
        if not among:
            raise BackendUnavailable(
                f"transport = 'auto' finds none that can run: {_words(reasons)}"
            )
        if len(among) == 1:
            self._announce(sizes, among[0], "the only one that can run here", reasons)
            return among[0]
        saved = peers.gather(_saved(sizes), "what was measured before")
        if saved[0] in among and saved.count(saved[0]) == len(saved):
            self._announce(sizes, saved[0], f"as {os.environ[FILE]} says", reasons)
            return saved[0]
        times = self._measure(among, reasons, x, routing, sizes)
        fastest = min(times, key=times.__getitem__)
        if self.ep.rank == 0:
            _save(sizes, fastest, times)
        measured = ", ".join(f"{name} {ms:.3g} ms" for name, ms in sorted(times.items()))
        how = f"dispatch and combine of {len(x)} tokens took {measured}"
        self._announce(sizes, fastest, how, reasons)
        return fastest

    def _reasons(self, x: Tensor, top_k: int) -> dict[str, str]:
        """Why some cannot run here."""
        host, reasons = Host.look(), {}
        for name, transport in MEASURED.items():
            caps = transport.caps
            if caps.max_ranks is not None and self.ep.size > caps.max_ranks:
                reasons[name] = f"serves {caps.max_ranks} ranks at most"
            elif caps.max_choices is not None and top_k > caps.max_choices:
                reasons[name] = f"sends a token to {caps.max_choices} experts at most"
            elif caps.dtypes is not None and x.dtype not in caps.dtypes:
                reasons[name] = f"does not move {x.dtype}"
            elif missing := unmet(needs_of(name, host, self.ep.size)):
                reasons[name] = "; ".join(f"{n.what}: {n.has} ({n.remedy})" for n in missing)
        return reasons

    @torch.no_grad()
    def _measure(
        self,
        among: list[str],
        reasons: dict[str, str],
        x: Tensor,
        routing: Routing,
        sizes: Sizes,
    ) -> dict[str, float]:
        """ms of a dispatch and a combine, by the median of turns that all take one after the other,
        on the slowest rank. One that fails on a rank is left out, and its reason noted."""
        peers, before, ready = self.ep.peers, set(self.ep.peers.shared), {}
        for name in among:
            failure = None
            try:
                transport = self._make(name)
                for _ in range(WARM):
                    _turn(transport, x, routing, sizes)
                ready[name] = transport
            except (PeerLost, DispatchTimeout, CallMismatch):
                raise
            except (RuntimeError, AssertionError) as error:  # no memory, a compiler, DeepEP's own
                failure = str(error) or type(error).__name__
                log.warning("transport auto: %s failed when it was tried: %s", name, failure)
            failures = [word for word in peers.gather(failure, f"a trial of {name}") if word]
            if failures:
                ready.pop(name, None)
                reasons[name] = failures[0]
        if not ready:
            raise BackendUnavailable(f"transport = 'auto' finds none that runs: {_words(reasons)}")
        turns: dict[str, list[float]] = {name: [] for name in ready}
        for _ in range(TURNS):
            for name, transport in ready.items():
                turns[name].append(_turn(transport, x, routing, sizes))
        mine = {name: statistics.median(ms) for name, ms in turns.items()}
        of_ranks = peers.gather(mine, "what was measured")
        slowest = {name: max(of_rank[name] for of_rank in of_ranks) for name in ready}
        fastest = min(slowest, key=slowest.__getitem__)
        for key in sorted(set(peers.shared) - before):  # buffers of those that nobody will use
            if not key.startswith(fastest):
                peers.shared.pop(key).close()
        return slowest

    def _announce(self, sizes: Sizes, chosen: str, why: str, reasons: Mapping[str, str]) -> None:
        if self.ep.rank == 0:
            others = f"; not {_words(reasons)}" if reasons else ""
            log.info("transport auto: %s for %s: %s%s", chosen, sizes, why, others)


def _turn(transport: Transport, x: Tensor, routing: Routing, sizes: Sizes) -> float:
    """ms until the device is done, with all that the host does for it."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    begin = time.perf_counter()
    sent = transport.dispatch(x, routing, sizes.num_experts, keep=sizes.keep)
    transport.combine(sent.plan, torch.empty_like(sent.rows))  # in memory of its own, as experts'
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - begin) * 1e3


def _words(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


def _saved(sizes: Sizes) -> str | None:
    """What an earlier run chose."""
    path = os.environ.get(FILE)
    return _read(path).get(str(sizes), {}).get("transport") if path else None


def _read(path: str) -> dict[str, dict[str, Any]]:
    """What the file keeps, by the words of sizes; nothing where there is none yet."""
    field, rule = f"{FILE}={path}", "a file that auto wrote, or none"
    try:
        known = json.loads(Path(path).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(field, repr(error), rule) from error
    if not isinstance(known, dict) or not all(isinstance(entry, dict) for entry in known.values()):
        raise ConfigError(field, known, rule)
    return known


def _save(sizes: Sizes, fastest: str, times: Mapping[str, float]) -> None:
    path = os.environ.get(FILE)
    if not path:
        return
    known = _read(path) | {str(sizes): {"transport": fastest, "ms": dict(times)}}
    unfinished = Path(f"{path}.{os.getpid()}")
    try:
        unfinished.write_text(json.dumps(known, indent=2) + "\n")
        unfinished.replace(path)
    except OSError as error:  # this rank alone writes; the others go on
        log.warning("transport auto: %s=%s keeps nothing: %r", FILE, path, error)
