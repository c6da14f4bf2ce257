"""Small messages on sockets of our own: matched by tag, in pieces, before they are asked for, and after the end."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from halocline.testing import shared_pool
from halocline.world.wire import LARGEST, Pipe, Wire, memory_of


def pair() -> tuple[Pipe, Pipe]:
    one, other = socket.socketpair(socket.AF_UNIX)
    for end in (one, other):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return Pipe(one), Pipe(other)


def alone(pipe: Pipe) -> Wire:
    wire = Wire.__new__(Wire)
    wire.rank, wire.deadline, wire.pipes = 0, 0.2, {1: pipe}
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


def exchange_sizes() -> list[bool]:
    """Below and above the size from which gloo carries a message, in both directions at once."""
    import halocline as hc
    from halocline.world import Label, Receive, Send

    world = hc.Mesh(a=-1).world
    peer, found = world.size - 1 - world.rank, []
    for elements in (0, 1, LARGEST // 8, LARGEST // 8 + 1, LARGEST):
        mine = torch.full((elements,), float(world.rank), dtype=torch.float64)
        ranks = tuple(range(world.size))
        (theirs,) = world.begin([Send(peer, mine)], [Receive(peer, elements)], mine, ranks, Label("t", "t")).wait()
        found.append(bool((theirs == peer).all()))
    return found


def test_both_ways_of_travelling_give_the_same() -> None:
    assert shared_pool(2).run(exchange_sizes) == [[True] * 5] * 2
