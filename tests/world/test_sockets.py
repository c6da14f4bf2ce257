"""Small messages on sockets of our own: matched by tag, in pieces, before they are asked for, and after the end."""

from __future__ import annotations

import socket
import time

import pytest
import torch
import torch.distributed as dist

from halocline.world.connection import Connection
from halocline.world.secret import Secret
from halocline.world.tags import counted_tag
from halocline.world.tcp import LARGEST, TcpTransport
from halocline.world.tensor_bytes import memory_of
from halocline.world.transport_errors import Diverged, TransportError


def sockets() -> tuple[socket.socket, socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return ends


def pair() -> tuple[Connection, Connection]:
    one, other = sockets()
    return Connection(one, 1), Connection(other, 0)


def transport(peer: socket.socket) -> tuple[TcpTransport, Connection]:
    """Rank 0's, with one connection, to rank 1."""
    made = TcpTransport(0, 0.2, dist.HashStore(), "a test", Secret(b"a secret of this test"))
    return made, made.adopt(peer, 1, 0)


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
    one, other = sockets()
    here, (wire, there) = Connection(one, 0), transport(other)
    here.send(1, bytes_of("last"))
    here.socket.close()
    room = bytearray(4)
    wire.wait(1, there.receive(1, memoryview(room)), time.monotonic() + 1)
    assert room == b"last"
    with pytest.raises(TransportError, match="closed"):
        wire.wait(1, there.receive(2, memoryview(bytearray(4))), time.monotonic() + 1)


def test_silence_ends_at_the_deadline() -> None:
    here, other = sockets()
    wire, there = transport(other)
    with pytest.raises(TransportError, match=r"nothing within 0\.2 s"):
        wire.wait(1, there.receive(1, memoryview(bytearray(1))), time.monotonic() + 0.05)
    here.close()


def test_the_most_urgent_goes_first_and_what_has_begun_goes_on() -> None:
    here, there = pair()
    large = memoryview(bytes(LARGEST))
    pending = {urgency: here.send(tag, large, urgency) for tag, urgency in ((1, 2.0), (2, 1.0), (3, 0.0), (4, 1.0))}
    rooms = {tag: there.receive(tag, memoryview(bytearray(LARGEST))) for tag in (1, 2, 3, 4)}
    came: list[int] = []
    for _ in range(10_000):
        here.flush()
        there.pump()
        came += [tag for tag, arrival in rooms.items() if arrival.done and tag not in came]
    assert came == [1, 3, 2, 4]
    assert all(each.done for each in pending.values())


@pytest.mark.parametrize("early", [False, True])
def test_a_message_in_place_of_another_is_a_divergence(early: bool) -> None:
    """The peer's message of the same turn of the same ranks comes from another line of the program."""
    ranks, (one, other) = (0, 1), sockets()
    here, (wire, there) = Connection(one, 0), transport(other)
    here.send(counted_tag(7, ranks, "conv", 1), bytes_of("text"))
    if early:
        there.pump()
    awaited = there.receive(counted_tag(7, ranks, "conv", 2), memoryview(bytearray(4)))
    next_turn = there.receive(counted_tag(8, ranks, "conv", 2), memoryview(bytearray(4)))
    with pytest.raises(Diverged, match="another operation"):
        wire.wait(1, awaited, time.monotonic() + 1)
    assert not next_turn.diverged
