"""Small messages on sockets of our own: matched by tag, in pieces, before they are asked for, and after the end."""

from __future__ import annotations

import socket
import struct
import time

import pytest
import torch

import halocline as hc
from halocline.testing import shared_pool
from halocline.world import Label
from halocline.world.listener import HELLO, Listener
from halocline.world.tcp import LARGEST, Connection, TcpTransport
from halocline.world.tensor_bytes import memory_of


def pair() -> tuple[Connection, Connection]:
    one, other = socket.socketpair(socket.AF_UNIX)
    for end in (one, other):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return Connection(one), Connection(other)


def alone(connection: Connection) -> TcpTransport:
    wire = TcpTransport.__new__(TcpTransport)
    wire.rank, wire.deadline, wire.connections = 0, 0.2, {1: connection}
    return wire


def bytes_of(text: str) -> memoryview:
    return memoryview(text.encode())


def test_messages_are_found_by_tag_whatever_their_order() -> None:
    here, there = pair()
    for tag, text in ((5, "five"), (7, "seven"), (5, "more")):
        here.send(tag, bytes_of(text))
    there.pump()
    first, second, third = bytearray(5), bytearray(4), bytearray(4)
    arrivals = [there.receive(tag, memoryview(room)) for tag, room in ((7, first), (5, second), (5, third))]
    assert all(arrival.done for arrival in arrivals)
    assert (first, second, third) == (b"seven", b"five", b"more")


def test_a_message_larger_than_the_buffers_comes_in_pieces() -> None:
    here, there = pair()
    sent = torch.arange(LARGEST, dtype=torch.int64).to(torch.uint8)
    room = torch.empty_like(sent)
    arrival = there.receive(3, memory_of(room))
    here.send(3, memory_of(sent))
    assert here.outbox and not arrival.done
    for _ in range(10_000):
        there.pump()
        here.flush()
        if arrival.done:
            break
    assert torch.equal(room, sent) and not here.outbox


def test_waiting_may_begin_between_header_and_payload() -> None:
    here, there = pair()
    sent = torch.arange(LARGEST, dtype=torch.int64).to(torch.uint8)
    here.send(3, memory_of(sent))
    there.pump()  # the header and a part
    room = torch.empty_like(sent)
    arrival = there.receive(3, memory_of(room))
    for _ in range(10_000):
        here.flush()
        there.pump()
    assert arrival.done and torch.equal(room, sent)


def test_an_empty_message_is_one_too() -> None:
    here, there = pair()
    arrival = there.receive(1, memoryview(b""))
    here.send(1, memoryview(b""))
    there.pump()
    assert arrival.done


def test_what_came_before_the_end_is_there_and_the_next_is_not() -> None:
    here, there = pair()
    here.send(1, bytes_of("last"))
    here.socket.close()
    room, wire = bytearray(4), alone(there)
    wire.wait(1, there.receive(1, memoryview(room)), time.monotonic() + 1)
    assert room == b"last"
    with pytest.raises(ConnectionError, match="closed"):
        wire.wait(1, there.receive(2, memoryview(bytearray(4))), time.monotonic() + 1)


def test_silence_ends_at_the_deadline() -> None:
    _here, there = pair()
    with pytest.raises(TimeoutError):
        alone(there).wait(1, there.receive(1, memoryview(bytearray(1))), time.monotonic() + 0.05)


def stranger(address: str, kind: str) -> socket.socket:
    """Calls at a rank's port without knowing its token."""
    host, port, _ = address.split()
    caller = socket.create_connection((host, int(port)))
    if kind == "resets":
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.close()
    elif kind == "hangs up":
        caller.close()
    elif kind == "talks":
        caller.sendall(b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n")
    elif kind == "says a part":
        caller.sendall(b"SSH")
    return caller


STRANGERS = ("idles", "resets", "hangs up", "talks", "says a part")


def test_strangers_are_sent_away_and_ranks_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halocline.world.listener._GREETING", 0.05)
    door = Listener("127.0.0.1")
    callers = [stranger(door.address, kind) for kind in STRANGERS]
    host, port, token = door.address.split()
    rank = socket.create_connection((host, int(port)))
    rank.sendall(HELLO.pack(bytes.fromhex(token), 3)[:10])
    door.look(0.01)
    rank.sendall(HELLO.pack(bytes.fromhex(token), 3)[10:])
    end = time.monotonic() + 10
    while 3 not in door.callers and time.monotonic() < end:
        door.look(0.01)
    assert set(door.callers) == {3}
    time.sleep(0.06)
    door.look(0.0)
    for caller in callers:
        caller.close()
    assert not door._greeting
    door.close()
    rank.close()


def meet_among_strangers() -> list[float]:
    world = hc.Mesh(data=-1).world.duplicate()
    callers = [stranger(world._tcp._listener.address, kind) for kind in STRANGERS for _ in range(3)]
    everyone = tuple(range(world.size))
    found = world.sum(torch.ones(2), everyone, Label("sum", "a test")).tolist()
    for caller in callers:
        caller.close()
    world.close()
    return found


def test_ranks_meet_among_strangers() -> None:
    assert shared_pool(3).run(meet_among_strangers) == [[3.0, 3.0]] * 3
