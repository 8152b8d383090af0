"""Waiting for the other ranks of a group, so that a wait that fails says for whom and where.

`Peers` belongs to a process group, as its timeout does, but torch's group objects take no
attributes: _PEERS stands for the missing one, and holds nothing once the group is gone.
"""

import atexit
import json
import math
import signal
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from ep_moe.net import Departure, Net, Place

GRACE = 5.0  # seconds for the news of a death to arrive beside the failure that it caused
EXIT = 5  # seconds for a process that lost a peer to end, once it is about to

ABSENT = "has not joined: it ended before it built a layer, or cannot be reached"


class Peers:
    """The other ranks of one group, as far as waiting for them goes. Ranks are global ones."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        self.layers = count()  # numbers the layers of this group alike on every rank
        self.shared: dict[str, Any] = {}  # what they have in common, by the name of a transport
        backends = [group._get_backend(device) for device in group._device_types]
        options = [backend.options for backend in backends if backend.options is not None]
        self._timeout = max((o._timeout.total_seconds() for o in options), default=math.inf)
        self._store = group.get_group_store()
        self._gathered = 0
        self._asynchronous = "nccl" in dist.get_backend(group)
        self._events = defaultdict[int, torch.cuda.Event](torch.cuda.Event)  # one for each device
        self._net = Net(self.rank, self.ranks, self._store)
        weakref.finalize(self, self._net.leave).atexit = False
        atexit.register(_at_exit, weakref.ref(self._net))

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Peers":
        """One for each group, however many layers it has: they share a net and count waits
        together."""
        if group not in _PEERS:
            _PEERS[group] = cls(group)
        return _PEERS[group]

    @property
    def timeout(self) -> float:
        """Seconds that a wait may take."""
        return self._timeout

    @property
    def last_stage(self) -> str:
        """What this rank waited for last."""
        return self._net.place.stage

    @contextmanager
    def waiting(self, stage: str) -> Iterator[None]:
        """Around every wait for a peer: a failure whose reason is a peer becomes PeerLost or
        DispatchTimeout, and is passed on to the other ranks."""
        net, began = self._net, time.monotonic()
        net.place = Place(net.place.number + 1, stage, True)
        try:
            if net.failure is not None:
                raise RuntimeError("a peer had left before this exchange began")
            yield
            if self._asynchronous:
                event = self._events[torch.cuda.current_device()]
                event.record()
                net.enqueued = event
        except RuntimeError as error:
            net.handled = True
            departure = self._reason(stage, time.monotonic() - began)
            if departure is None:
                net.handled = False
                error.add_note(f"rank {self.rank} was at {stage}")
                raise
            net.tell(departure)
            raise departure.seen_from(self.rank, stage) from error
        finally:
            net.place = net.place._replace(waiting=False)

    def gather(self, word: Any, stage: str) -> list[Any]:
        """Every rank's word, in the order of the ranks. Takes milliseconds.

        Through the group's store, where no other collective can be taken for this one.
        """
        self._gathered += 1
        keys = {rank: f"ep_moe/word/{self._gathered}/{rank}" for rank in self.ranks}
        with self.waiting(f"the check before {stage}"):
            self._store.set(keys[self.rank], json.dumps(word))
            deadline = time.monotonic() + self._timeout
            while missing := [r for r, key in keys.items() if not self._store.check([key])]:
                if time.monotonic() > deadline or not self._net.departed.keys().isdisjoint(missing):
                    raise RuntimeError(f"ranks {missing} did not come")
                time.sleep(0.002)
            words = [json.loads(self._store.get(key)) for key in keys.values()]
        if self._gathered > 1:  # all came to this one, so all have read the one before
            self._store.delete_key(f"ep_moe/word/{self._gathered - 1}/{self.rank}")
        return words

    def close(self, error: BaseException | None = None) -> None:
        """Tell the peers that this rank leaves the group, and why."""
        self._net.leave(error)

    def _reason(self, stage: str, waited: float) -> Departure | None:
        """Which peer's departure made a wait fail, if one did. The news of it may be a moment
        behind."""
        net, timed_out = self._net, waited >= self._timeout
        if failure := net.await_failure(0.0 if timed_out else GRACE):
            return failure
        if net.departed:
            return next(iter(net.departed.values()))._replace(kind="lost")
        if timed_out:
            return Departure("timeout", self.rank, self._whereabouts(stage, waited))
        absent = net.absent()
        return Departure("lost", absent[0], ABSENT) if absent else None

    def _whereabouts(self, stage: str, waited: float) -> str:
        here, places = self._net.place, self._net.ask_places()
        found = [f"waited {waited:.1f} s at {stage}"]
        for peer in self.ranks:
            if peer == self.rank:
                continue
            place = places.get(peer)
            if peer in self._net.departed:
                where = "has given up, too"
            elif place is None:
                where = "has not joined" if peer in self._net.absent() else "does not answer"
            elif place == here:
                where = "waits there, too"
            else:
                where = f"is at {place} (wait {place.number} of the group, not {here.number})"
            found.append(f"rank {peer} {where}")
        return "; ".join(found)


def _at_exit(reference: "weakref.ref[Net]") -> None:
    """Say goodbye. With a peer lost, the way out must not wait for it: NCCL's destructors may."""
    net = reference()
    if net is None:
        return
    net.leave(getattr(sys, "last_value", None))  # the uncaught exception, where one is the reason
    if net.failure is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a thread would stop with the interpreter
        signal.alarm(EXIT)


_PEERS: "weakref.WeakKeyDictionary[dist.ProcessGroup, Peers]" = weakref.WeakKeyDictionary()


def leave_all(error: BaseException | None = None) -> None:
    """For a process that ends without running exit handlers, as those of multiprocessing do."""
    for peers in list(_PEERS.values()):
        peers.close(error)
