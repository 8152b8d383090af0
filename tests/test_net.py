"""The net itself, several ranks of it in one process: who is heard, who is taken for dead, and that
strangers, forks and garbage do no harm."""

import gc
import json
import os
import socket
import threading
import time
import weakref

import pytest
import torch.distributed as dist

from ep_moe.net import ENDED, KILLED, Departure, Net, Place

SOON = 10.0  # seconds, for threads on a busy machine


@pytest.fixture
def nets():
    """Ranks 0, 1, 2 in this process, all connected."""
    store = dist.HashStore()
    nets = [Net(rank, range(3), store) for rank in range(3)]
    until(lambda: not any(net.absent() for net in nets))
    yield nets
    for net in nets:
        net.leave()


def until(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.005)


def call(net, *words):
    """A plain connection to the net, which says this, and the token of the net."""
    host, port, token = json.loads(net.store.get(f"ep_moe/net/{net.rank}"))
    connection = socket.create_connection((host, port), timeout=SOON)
    for word in words:
        connection.send(word.encode() + b"\n")
    return connection, token


def test_a_killed_rank(nets):
    until(lambda: not nets[0].absent())
    for line in list(nets[2]._lines):  # as the kernel does
        line.socket.shutdown(socket.SHUT_RDWR)
    for net in nets[:2]:
        assert net.await_failure(SOON) == Departure("lost", 2, KILLED)


def test_the_root_is_passed_on(nets):
    """Rank 0 lost rank 2 and leaves; rank 1 hears of rank 2, though the line to it stands."""
    nets[0].tell(Departure("lost", 2, KILLED))
    nets[0].tell(Departure("lost", 0, "a second word does not count"))
    nets[0].leave(RuntimeError("nor a third"))
    assert nets[1].await_failure(SOON) == Departure("lost", 2, KILLED)
    assert list(nets[1].departed) == [0]


def test_who_ended_well_is_no_failure(nets):
    nets[0].leave()
    until(lambda: nets[1].departed)
    assert nets[1].departed == {0: Departure("ended", 0, ENDED)}
    assert nets[1].failure is None
    nets[2].leave(KeyError("x"))
    assert nets[1].await_failure(SOON) == Departure("lost", 2, "ended with KeyError: 'x'")


def test_a_word_from_before_the_line_stood():
    """Rank 0 has left already in words when rank 1 comes, and hangs up with its call pending."""
    store = dist.HashStore()
    first = Net(0, range(2), store)
    first.tell(Departure("lost", 0, "why"))
    second = Net(1, range(2), store)
    assert second.await_failure(SOON) == Departure("lost", 0, "why")
    first.leave()
    second.leave()


def test_who_leaves_calls_those_it_has_no_line_to():
    """Rank 1 comes later than rank 0 and cannot call it, but rank 0 calls before it leaves."""
    store = dist.HashStore()
    first = Net(0, range(2), store)
    until(lambda: store.check(["ep_moe/net/0"]))
    store.set("ep_moe/net/0", json.dumps(["127.0.0.1", 1, "nobody"]))
    second = Net(1, range(2), store)
    until(lambda: store.check(["ep_moe/net/1"]))
    assert second.absent() == [0]
    first.leave(RuntimeError("why"))
    assert second.await_failure(SOON) == Departure("lost", 0, "ended with RuntimeError: why")
    second.leave()


def test_places(nets):
    nets[1].place = Place(3, "a stage", True)
    nets[2].departed[0] = Departure("ended", 0, ENDED)  # so that it waits for rank 1 only
    assert nets[0].ask_places() == {1: Place(3, "a stage", True), 2: Place(0, "the start", False)}
    assert nets[2].ask_places()[1] == Place(3, "a stage", True)


@pytest.mark.parametrize(
    "words",
    [
        ["GET / HTTP/1.1"],
        ["{"],
        ["[]"],
        ['["left", "lost", 2, "a lie"]'],
        ['["hello", 2, "a wrong token"]', '["left", "lost", 2, "a lie"]'],
        ["\xff" * 5000],
    ],
)
def test_strangers_are_hung_up_on(nets, words):
    connection, _ = call(nets[0], *words)
    connection.settimeout(SOON)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        pass
    assert not nets[0].departed
    assert nets[0].is_alive()
    assert nets[1].ask_places().keys() == {0, 2}


def test_a_peer_that_talks_nonsense_is_lost(nets):
    connection, token = call(nets[0])
    connection.send(json.dumps(["hello", 1, token]).encode() + b'\n["left"]\n')
    assert nets[0].await_failure(SOON).peer == 1
    connection.close()


def test_nobody_can_be_reached(caplog):
    """The address of a rank that is gone: a warning, no failure."""
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as gone:
        store.set("ep_moe/net/1", json.dumps(["127.0.0.1", gone.getsockname()[1], "token"]))
    net = Net(0, range(2), store)
    until(lambda: "rank 0 cannot connect to rank 1 at 127.0.0.1" in caplog.text)
    assert net.absent() == [1]
    assert net.failure is None
    net.leave()


def test_a_forked_child_holds_nothing(nets):
    child = os.fork()
    if child == 0:
        closed = all(line.socket.fileno() == -1 for net in nets for line in net._lines)
        os._exit(0 if closed and nets[0]._listener.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert nets[0].ask_places().keys() == {1, 2}  # the parent's lines stand


def test_leaving_ends_the_thread_and_its_memory():
    before = threading.active_count()
    net = Net(0, range(1), dist.HashStore())
    net.leave()
    net.leave()
    assert threading.active_count() == before
    reference = weakref.ref(net)
    del net
    gc.collect()
    assert reference() is None
