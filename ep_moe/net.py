"""Who is gone: a thin net of TCP connections between the ranks of a group, beside the data.

torch's errors name an address (gloo) or nobody (NCCL), and a survivor that gave up first looks as
dead to the next one as the victim. So every two ranks hold a plain connection that carries no data.
The kernel closes a killed process's connections at once; whoever leaves for another reason says so
on them first, and passes on whom it had lost itself. A thread asleep in `select` listens. Nobody is
asked anything before something goes wrong, so an exchange costs no more.

The net is a help, never a condition. It forms in the background, whoever comes second connects;
where TCP is closed between two hosts all works, and errors name less.
"""

import json
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch._C._distributed_c10d import Store

from ep_moe.errors import DispatchTimeout, PeerLost

PATIENCE = 3.0  # seconds for a wait to fail by itself once a peer is gone; NCCL's do not
ANSWER = 3.0  # seconds for a peer to say where it is
CONNECT = 5.0  # seconds for a connection to stand
NEWS = 2.0  # seconds for the news of a death to arrive behind an error that it caused elsewhere

KILLED = "closed its connections without a word: it was killed, or its host is gone"
ENDED = "ended without an error, so it made fewer calls than this rank"

log = logging.getLogger("ep_moe")


class Departure(NamedTuple):
    """Why a process left. `peer` is where it began, not a survivor that passed it on."""

    kind: Literal["lost", "timeout", "ended"]
    peer: int
    why: str

    def seen_from(self, rank: int, stage: str) -> RuntimeError:
        """The error of a rank that was at `stage` when it learned this."""
        error = DispatchTimeout if self.kind == "timeout" else PeerLost
        return error(rank, self.peer, stage=stage, why=self.why)


class Place(NamedTuple):
    """How far a rank is: in the n-th wait of its group, or past it."""

    number: int
    stage: str
    waiting: bool

    def __str__(self) -> str:
        return self.stage if self.waiting else f"work after {self.stage}"


@dataclass(eq=False)
class _Line:
    """One connection, known by the token of the rank that was called: its port may be anybody's by
    now. `peer` is the other end, once it has shown that token."""

    socket: socket.socket
    token: str
    peer: int | None = None
    unread: bytes = b""

    def say(self, *message: Any) -> None:
        with suppress(OSError):  # the peer is gone, which reading finds out
            self.socket.send(json.dumps(message).encode() + b"\n")


class Net(threading.Thread):
    """This rank's end of all lines. The thread must not keep whoever uses it alive; `leave` ends
    it."""

    def __init__(self, rank: int, ranks: Sequence[int], store: Store) -> None:
        super().__init__(name="ep_moe.net", daemon=True)
        self.rank, self.ranks, self.store = rank, ranks, store
        self.place = Place(0, "the start", False)
        self.departed: dict[int, Departure] = {}  # who left, in the order of the news
        self.handled = False  # some wait has failed and found its error
        self.enqueued: torch.cuda.Event | None = None  # behind the last exchange on a GPU
        self._word: Departure | None = None  # this rank's own
        self._closed = False
        self._places: dict[int, Place] = {}
        self._changed = threading.Condition()
        self._lines: list[_Line] = []
        self._selector = selectors.DefaultSelector()
        self._awake, self._waker = socket.socketpair()
        self._token = secrets.token_hex(8)
        family, host = _own_address()
        self._listener = socket.create_server((host, 0), family=family, backlog=len(ranks))
        self._listener.setblocking(False)
        self._address = json.dumps([host, self._listener.getsockname()[1], self._token])
        _close_in_forks(self)
        self.start()

    @property
    def failure(self) -> Departure | None:
        """The first news after which no exchange of all ranks can succeed. A peer that ended well
        may have had nothing to exchange in those to come."""
        return next((d for d in list(self.departed.values()) if d.kind != "ended"), None)

    def await_failure(self, seconds: float) -> Departure | None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure, seconds)
        return self.failure

    def absent(self) -> list[int]:
        """The ranks that never had a line to this one."""
        here = {self.rank, *self.departed, *(line.peer for line in self._lines)}
        return [rank for rank in self.ranks if rank not in here]

    def ask_places(self) -> dict[int, Place]:
        """Where the peers are; those that do not answer are left out."""
        with self._changed:
            self._places.clear()
            self._say_all("where")
            peers = {line.peer for line in self._lines if line.peer is not None}
            self._changed.wait_for(lambda: self._places.keys() >= peers - {*self.departed}, ANSWER)
            return dict(self._places)

    def tell(self, departure: Departure) -> None:
        """Say why this process leaves. Only the first word counts."""
        with self._changed:
            if self._word is None:
                self._word = departure
                self._say_all("left", *departure)

    def leave(self, error: BaseException | None = None) -> None:
        """Say goodbye and hang up; `error` is what ends this process, if one does."""
        if isinstance(error, RuntimeError) and self._word is None:  # as those of other waits are
            self.await_failure(NEWS)
        if error is None:
            self.tell(Departure("ended", self.rank, ENDED))
        elif self.failure is not None and self._word is None:  # in a wait of another library
            log.critical("%s", self.failure.seen_from(self.rank, str(self.place)))
            self.tell(self.failure)
        else:
            why = f"ended with {type(error).__name__}: {error}"[:500]
            self.tell(Departure("lost", self.rank, why))
        self._closed = True
        with suppress(OSError):  # closed already
            self._waker.send(b"\n")
        if self is not threading.current_thread():  # where the garbage collector may run this
            self.join(timeout=1.0)

    def hang_up(self) -> None:
        """Close this process's copies of all sockets, saying nothing."""
        self._closed = True
        for line in self._lines:
            line.socket.close()
        for one in (self._listener, self._awake, self._waker, self._selector):
            one.close()

    def run(self) -> None:
        self._selector.register(self._awake, selectors.EVENT_READ, lambda: self._awake.recv(1))
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._connect()
        while not self._closed:
            for key, _ in self._selector.select():
                key.data()
        self._accept()
        self._connect()  # the last word is for those, too, to whom no line stood yet
        self.hang_up()

    def _connect(self) -> None:
        """To the ranks that came before; each publishes its address before it looks for others."""
        try:
            self.store.set(self._key(self.rank), self._address)
            for peer in self.absent():
                if self.store.check([self._key(peer)]):
                    self._call(peer, *json.loads(self.store.get(self._key(peer))))
        except RuntimeError as error:
            log.warning("rank %d cannot look up its peers: %s", self.rank, error)

    def _call(self, peer: int, host: str, port: int, token: str) -> None:
        try:
            line = _Line(socket.create_connection((host, port), timeout=CONNECT), token)
        except OSError as error:
            log.warning(
                "rank %d cannot connect to rank %d at %s, port %d: %s. Should that rank die, "
                "errors may not name it",
                *(self.rank, peer, host, port, error),
            )
        else:
            self._open(line)

    def _accept(self) -> None:
        with suppress(OSError):  # nobody else
            while True:
                self._open(_Line(self._listener.accept()[0], self._token))

    def _open(self, line: _Line) -> None:
        line.socket.setblocking(False)
        _tune(line.socket)
        with self._changed:
            self._lines.append(line)
            line.say("hello", self.rank, line.token)
            if self._word is not None:
                line.say("left", *self._word)
        self._selector.register(line.socket, selectors.EVENT_READ, partial(self._read, line))

    def _read(self, line: _Line) -> None:
        try:
            data = line.socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:  # reset, or its host has been silent for too long
            data = b""
        *messages, line.unread = (line.unread + data).split(b"\n")
        try:
            for message in messages:
                self._hear(line, json.loads(message))
        except (ValueError, TypeError):  # not one of us
            data = b""
        if not data:
            self._drop(line)

    def _hear(self, line: _Line, message: Any) -> None:
        with self._changed:
            match message:
                case ["hello", int(peer), line.token]:
                    line.peer = peer
                case _ if line.peer is None:
                    raise ValueError("the first word must be hello")
                case ["left", *departure]:
                    self._note(line.peer, Departure(*departure))
                case ["where"]:
                    line.say("at", *self.place)
                case ["at", *place]:
                    self._places[line.peer] = Place(*place)
            self._changed.notify_all()

    def _drop(self, line: _Line) -> None:
        self._selector.unregister(line.socket)
        line.socket.close()
        with self._changed:
            self._lines.remove(line)
            if line.peer is not None:
                self._note(line.peer, Departure("lost", line.peer, KILLED))
            self._changed.notify_all()

    def _note(self, peer: int, departure: Departure) -> None:
        if peer in self.departed:
            return
        self.departed[peer] = departure
        if self.failure is departure:
            if self.enqueued is not None:  # NCCL's watchdog may end this process any moment
                log.critical("%s", departure.seen_from(self.rank, str(self.place)))
            timer = threading.Timer(PATIENCE, self._last_resort, (self.place, departure))
            timer.daemon = True
            timer.start()

    def _last_resort(self, then: Place, departure: Departure) -> None:
        """No wait has failed: this rank works on, or hangs, on the host or in a kernel of NCCL. Say
        what is known, and end what nothing else can end."""
        if self.handled or self._closed:
            return
        if self.enqueued is None:
            log.critical("%s", departure.seen_from(self.rank, str(self.place)))
        if self.place == then and (self.place.waiting or self._gpu_is_behind()):
            self.tell(departure)
            os._exit(1)

    def _gpu_is_behind(self) -> bool:
        """The host went on, as it does with NCCL; its GPU has not finished the last exchange."""
        return self.enqueued is not None and not self.enqueued.query()

    def _say_all(self, *message: Any) -> None:
        with self._changed:
            for line in self._lines:
                line.say(*message)

    def _key(self, rank: int) -> str:
        return f"ep_moe/net/{rank}"


def _own_address() -> tuple[socket.AddressFamily, str]:
    """Where the peers can reach this host: its address on the way to the master of the run, or
    where none is named, what its own name stands for. Sends nothing."""
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with suppress(OSError):  # an unknown name, or no way there
        family, kind, protocol, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return family, probe.getsockname()[0]
    return socket.AF_INET, "127.0.0.1"


def _tune(connection: socket.socket) -> None:
    """A last word must leave at once. A host that lost its power closes nothing: take it for dead
    after two minutes, which networks need to heal."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)


def _close_in_forks(net: Net) -> None:
    """A forked child, such as a worker of a data loader, would hold the connections of its dead
    parent open."""
    reference = weakref.ref(net)

    def hang_up() -> None:
        if (mine := reference()) is not None:
            mine.hang_up()

    os.register_at_fork(after_in_child=hang_up)
