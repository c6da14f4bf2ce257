"""Lanes: messages of any size between two ends, through shared memory once both have it; and what does not fit."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from halocline.reduction.transport.rings import Rings
from halocline.testing import shared_pool
from halocline.world import Label, Mesh
from halocline.world.connection import Connection
from halocline.world.shared_memory import Mailbox, offered
from halocline.world.tensor_bytes import memory_of
from halocline.world.transport_errors import TransportError

SIZES = (1, 30_000, 100_000)  # the last goes flat


def lanes(same_node: bool) -> tuple[Connection, Connection]:
    one, other = socket.socketpair(socket.AF_UNIX)
    return Connection(one, 1, same_node, 0), Connection(other, 0, same_node, 0)


def drive(*ends: Connection) -> None:
    """Until nothing moves any more."""
    for _ in range(200):
        for lane in ends:
            lane.flush()
            lane.pump()


@pytest.mark.parametrize("same_node", [False, True])
def test_messages_of_all_sizes_arrive_by_tag(same_node: bool) -> None:
    here, there = lanes(same_node)
    sizes = (1, 100, 1 << 14, 1 << 18, 1 << 14, 3)
    sent = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    rooms = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    departures = []
    for first, last in ((0, 3), (3, 6)):  # between them the other end has learned of the memory
        departures += [here.send(tag, memory_of(sent[tag])) for tag in range(first, last)]
        drive(here, there)
    arrivals = [there.receive(tag, memory_of(rooms[tag])) for tag in reversed(range(len(sizes)))]
    drive(here, there)
    assert all(job.done for job in (*departures, *arrivals))
    assert all(torch.equal(room, message) for room, message in zip(rooms, sent, strict=True))
    assert (there._incoming is not None) == same_node


@pytest.mark.parametrize("same_node", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_nothing_is_kept_of_messages_that_have_come(same_node: bool, early: bool) -> None:
    """Every message has a tag of its own: whatever a tag leaves behind is there for good."""
    here, there = lanes(same_node)
    room, message = torch.zeros(1 << 14, dtype=torch.uint8), torch.ones(1 << 14, dtype=torch.uint8)
    for tag in range(20):
        if early:
            here.send(tag, memory_of(message))
            drive(here, there)
        arrival = there.receive(tag, memory_of(room))
        if not early:
            here.send(tag, memory_of(message))
            drive(here, there)
        assert arrival.done
        assert torch.equal(room, message)
        room.zero_()
    assert not there._awaited
    assert not there._early


def test_more_than_the_memory_holds_waits_for_room() -> None:
    here, there = lanes(True)
    here.send(0, memory_of(torch.zeros(1 << 14, dtype=torch.uint8)))
    drive(here, there)
    message = torch.randint(0, 256, (5 << 20,), dtype=torch.uint8)
    departures = [here.send(tag, memory_of(message)) for tag in range(1, 6)]
    assert [job.done for job in departures] == [True] * 3 + [False] * 2
    rooms = [torch.zeros_like(message) for _ in departures]
    arrivals = [there.receive(tag, memory_of(room)) for tag, room in enumerate(rooms, 1)]
    drive(here, there)
    assert all(job.done for job in (*departures, *arrivals))
    assert all(torch.equal(room, message) for room in rooms)


def test_a_mailbox_begins_again_at_its_front() -> None:
    box = Mailbox.new(100)
    places = [box.put(memoryview(bytes(size))) for size in (40, 40, 40)]
    assert places == [0, 40, None]
    box.free()
    assert box.put(memoryview(bytes(40))) is None  # the oldest begins where it would end: full and empty look alike
    assert box.put(memoryview(bytes(39))) == 0
    box.free()
    box.free()
    assert box.put(memoryview(bytes(100))) == 0


def test_memory_that_is_not_the_one_offered_is_left_alone() -> None:
    box = Mailbox.new(100)
    process, descriptor, size, token = box.offer().decode().split()
    assert offered(box.offer()) is not None
    for wrong in (("1", "999999", size, token), (process, descriptor, size, "00" * 16), (process, "0", size, token)):
        assert offered(" ".join(wrong).encode()) is None


@pytest.mark.parametrize("early", [False, True])
def test_a_message_of_another_size_is_an_error(early: bool) -> None:
    here, there = lanes(False)
    here.send(7, memory_of(torch.zeros(8, dtype=torch.uint8)))
    if early:
        drive(there)

    def receive() -> None:
        there.receive(7, memory_of(torch.zeros(9, dtype=torch.uint8)))
        drive(there)

    with pytest.raises(TransportError, match="another size"):
        receive()


def test_an_end_that_closes_is_noticed() -> None:
    here, there = lanes(False)
    here.socket.close()
    end = time.monotonic() + 5
    while not there.closed and time.monotonic() < end:
        there.pump()
    assert there.closed


def _after_rings() -> list[float]:
    """Duplicates that are made while others exist, and when rings have closed theirs."""
    mesh = Mesh(data=-1)
    rings = Rings(mesh.world, "levels")
    rings.begin(torch.ones(100), Label("sum", "a test", "gradients")).wait()
    rings.close()
    again, other, everyone = mesh.world.duplicate(wide=True), mesh.world.duplicate(), tuple(range(mesh.size))
    label = Label("sum", "a test")
    found = [float(world.sum(torch.ones(size), everyone, label).sum()) for world in (again, other) for size in SIZES]
    again.close()
    other.close()
    return found


def test_a_world_is_as_before_when_rings_are_done_with_it() -> None:
    for found in shared_pool(3).run(_after_rings, deadline=30):
        assert found == [3.0, 90_000.0, 300_000.0] * 2
