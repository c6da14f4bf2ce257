"""Messages of any size on sockets of our own, over every network card, for a thread that does nothing but communicate.

gloo cannot say which of several messages has come, so that a thread that drives many would wait for the wrong one; and
its threads take more of the processor than the copying does. Between ranks of one node large messages lie in memory
that both have mapped (``shared.py``), and the socket carries a word about each.
"""

from __future__ import annotations

import heapq
import math
import os
import select
import socket
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from .shared_memory import Mailbox, PendingCopy, offered
from .tcp import HEADER, Connection, PendingReceive, PendingSend, TcpTransport, cards

_WORTH_SHARING = 1 << 14  # bytes
_SMALL = 1 << 16  # bytes
_SHORTEST = 1 << 16  # bytes that the kernel may have unsent, at least
_LOW = 1 << 18  # bytes that are to lie in the kernel's buffer before it wakes us in the middle of a message
_OFFER, _ACCEPTED, _FREED = -2, -3, -4  # tags of words about shared memory
_OTHER = "a message of another size came: do the ranks sum different things?"

Job = tuple[
    Any, ...
]  # the peer, the PendingReceive, PendingSend or PendingCopy, and whatever the caller needs to know of it


class PriorityConnection(Connection):
    """A connection that stops reading after each message, since the next may be asked for before it is read.

    Messages wait here, and not in the kernel, for their turn: the most urgent goes first.
    """

    def __init__(self, connection: socket.socket, peer: int, same_node: bool) -> None:
        super().__init__(connection)
        self.peer = peer
        self._low = 1
        self._later: list[tuple[float, int, int, memoryview, PendingSend]] = []  # a heap: by urgency, then by age
        self._sent = 0  # messages
        self._outgoing: Mailbox | None = None
        self._incoming: Mailbox | None = None
        self._may_share, self._accepted = same_node, False
        self._unshared: deque[tuple[int, memoryview, PendingCopy]] = deque()

    def send(self, tag: int, payload: memoryview, urgency: float = 0.0) -> PendingSend | PendingCopy:  # type: ignore[override]
        if self._may_share and payload.nbytes >= _WORTH_SHARING:
            if self._outgoing is None:
                self._outgoing = Mailbox.new()
                self._put_in_line(_OFFER, memoryview(self._outgoing.offer()), urgency)
            elif self._accepted and payload.nbytes <= self._outgoing.size:
                copied = PendingCopy()
                self._unshared.append((tag, payload, copied))
                self._share()
                return copied
        return self._put_in_line(tag, payload, urgency)

    def _put_in_line(self, tag: int, payload: memoryview, urgency: float) -> PendingSend:
        departure = PendingSend(self, math.inf)
        self._sent += 1
        heapq.heappush(self._later, (urgency, self._sent, tag, payload, departure))
        self.flush()
        return departure

    def _first_in_line(self) -> None:
        """Goes to the kernel next, whatever comes."""
        _, _, tag, payload, departure = heapq.heappop(self._later)
        self.outbox.append(memoryview(HEADER.pack(tag, payload.nbytes)))
        if payload.nbytes:
            self.outbox.append(payload)
        self.queued += HEADER.size + payload.nbytes
        departure.mark = self.queued

    def limit_unsent(self, size: int) -> None:
        """Let the kernel have no more that it has not sent."""
        if self.socket.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size)

    def _share(self) -> None:
        """Put into the mailbox what there is room for."""
        assert self._outgoing is not None
        while self._unshared:
            tag, payload, copied = self._unshared[0]
            place = self._outgoing.put(payload)
            if place is None:
                break
            self._say(tag | place << 32, ~payload.nbytes)
            copied.done = True
            self._unshared.popleft()
        self.flush()

    def _say(self, tag: int, size: int) -> None:
        self.outbox.append(memoryview(HEADER.pack(tag, size)))
        self.queued += HEADER.size

    def pump(self, job: PendingReceive | None = None) -> None:
        """Read up to the end of the next message."""
        while not self.closed:
            room = memoryview(self._header) if self._tag is None else self._target
            if self._filled < room.nbytes:
                self._filled += self._read(room[self._filled :])
            if self._filled < room.nbytes:  # there is no more for now
                self._wake_at(room.nbytes - self._filled)
                return
            if self._next_part():
                self._wake_at(HEADER.size)
                return

    def _read(self, room: memoryview) -> int:
        try:
            count = self.socket.recv_into(room)
        except BlockingIOError:
            return 0
        except OSError:
            count = 0
        self.closed = not count  # the peer is gone; what it sent before is here
        return count

    def flush(self) -> None:
        """As much as the kernel takes at once."""
        while (self.outbox or self._later) and not self.closed:
            if not self.outbox:
                self._first_in_line()
            parts = [self.outbox[at] for at in range(min(8, len(self.outbox)))]
            try:
                sent = self.socket.sendmsg(parts)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            self.written += sent
            if not self._drop(sent, len(parts)):
                return

    def _drop(self, sent: int, parts: int) -> bool:
        """What went is off the list; True if all parts did."""
        for _ in range(parts):
            first = self.outbox[0]
            if sent < first.nbytes:
                self.outbox[0] = first[sent:]
                return False
            sent -= first.nbytes
            self.outbox.popleft()
        return True

    def _wake_at(self, left: int) -> None:
        low = min(left, _LOW) if self._tag is not None else 1
        if low != self._low:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low)
            self._low = low

    def _next_part(self) -> bool:
        """A header or a payload is complete; True if it was the end of a message."""
        if self._tag is not None:
            offer = bytes(self._target) if self._tag == _OFFER else None
            if offer is None:
                self._advance()
            else:
                self._tag, self._filled = None, 0
                self._accept(offer)
            return offer is None
        tag, size = HEADER.unpack(self._header)
        if (size >= 0 and tag >= 0) or tag == _OFFER:
            self._check_size(tag, size)
            self._advance()
            return False
        self._filled = 0
        if tag == _ACCEPTED:
            self._accepted = True
        elif tag == _FREED:
            assert self._outgoing is not None
            self._outgoing.free()
            self._share()
        else:
            self._take(tag & 0xFFFFFFFF, tag >> 32, ~size)
        return True

    def receive(self, tag: int, target: memoryview) -> PendingReceive:
        early = self._early.first(tag)
        if early is not None and len(early) != target.nbytes:
            raise TransportError(self.peer, _OTHER)
        return super().receive(tag, target)

    def _check_size(self, tag: int, size: int) -> None:
        """Ranks that sum different things are to hear of it."""
        arrival = self._awaited.first(tag)
        if arrival is not None and arrival.target.nbytes != size:
            raise TransportError(self.peer, _OTHER)

    def _accept(self, offer: bytes) -> None:
        self._incoming = offered(offer)
        if self._incoming is not None:
            self._say(_ACCEPTED, 0)
            self.flush()

    def _take(self, tag: int, place: int, size: int) -> None:
        """A message lies in the mailbox."""
        assert self._incoming is not None
        self._check_size(tag, size)
        arrival = self._awaited.take(tag)
        if arrival is not None:
            self._incoming.read(place, arrival.target)
            arrival.done = True
        else:
            early = bytearray(size)
            self._incoming.read(place, memoryview(early))
            self._early.add(tag, early)
        self._say(_FREED, 0)
        self.flush()


class _CardTransport(TcpTransport):
    """The lanes over one network card."""

    def __init__(self, bulk: PriorityTransport, rank: int, deadline: float, store: Any, name: str, card: str) -> None:
        super().__init__(rank, deadline, store, name, card)
        self._priority = weakref.proxy(bulk)  # no circle: sockets close when the last who uses them is gone

    def connection(self, peer: int) -> PriorityConnection:
        if peer not in self.connections:
            connection = self._call(peer) if self.rank < peer else self._answer(peer)
            same_node = connection.getpeername()[0] == connection.getsockname()[0]
            lane = PriorityConnection(connection, peer, same_node)
            self._priority.watch(lane)
            self.connections[peer] = lane
        found = self.connections[peer]
        assert isinstance(found, PriorityConnection)
        return found

    def progress(self) -> None:
        self._priority.look(0.0)


POSSIBLE = all(hasattr(os, name) for name in ("eventfd", "memfd_create")) and hasattr(select, "epoll")  # on Linux


class PriorityTransport:
    """Lanes over every card; a message takes the card that its tag says."""

    def __init__(self, rank: int, deadline: float, store: Any, name: str) -> None:
        self._deadline = deadline
        self._poll = select.epoll()
        self._lanes: dict[int, PriorityConnection] = {}
        self._writing: set[int] = set()
        self._most = 0  # bytes that a lane's kernel may have; as many as it likes
        self._gone: set[int] = set()  # peers
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._poll.register(self._bell, select.EPOLLIN)
        self._wires, self._express = (
            [
                _CardTransport(self, rank, deadline, store, f"{name}/{kind} {number}", card)
                for number, card in enumerate(cards() or [""])
            ]
            for kind in ("bulk", "express")
        )

    def set_deadline(self, seconds: float) -> None:
        self._deadline = seconds
        for wire in (*self._wires, *self._express):
            wire.set_deadline(seconds)

    def lane(self, peer: int, tag: int, size: int) -> PriorityConnection:
        """Small messages have lanes of their own: they wait for none that is half sent."""
        wires = self._express if size <= _SMALL else self._wires
        return wires[tag % len(wires)].connection(peer)

    def watch(self, lane: PriorityConnection) -> None:
        self._limit(lane)
        self._lanes[lane.socket.fileno()] = lane
        self._poll.register(lane.socket, select.EPOLLIN)

    def connect(self, peers: Sequence[int]) -> None:
        """Open all lanes to these. By all ranks together: the lower of two calls, and each answers the lowest first,
        so that none waits in a circle."""
        for wire in (*self._wires, *self._express):
            for peer in sorted(peers):
                wire.connection(peer)

    def limit_unsent(self, size: int) -> None:
        """Of all lanes."""
        self._most = size
        for lane in list(self._lanes.values()):
            self._limit(lane)

    def _limit(self, lane: PriorityConnection) -> None:
        if self._most and not lane.closed:
            lane.limit_unsent(max(_SHORTEST, self._most))

    def ring(self) -> None:
        """From another thread: whoever waits is to return."""
        os.eventfd_write(self._bell, 1)

    def first(self, under_way: Sequence[Sequence[Job]], end: float) -> int | None:
        """Which of these has come and gone in full; None when the bell rang."""
        while True:
            for number, jobs in enumerate(under_way):
                for job in jobs:
                    if not job[1].done:
                        break
                else:
                    return number
            now = time.monotonic()
            if self._gone or now > end:
                self._check(under_way, now > end)
            if self.look(min(1.0, max(0.001, end - now))):
                return None

    def wait(self, jobs: Sequence[Job], end: float) -> None:
        while self.first([jobs], end) is None:
            pass

    def _check(self, under_way: Sequence[Sequence[Job]], late: bool) -> None:
        for jobs in under_way:
            for peer, job, *_ in jobs:
                if not job.done and peer in self._gone:
                    raise TransportError(peer, "connection closed by the peer")
                if not job.done and late:
                    raise TransportError(peer, f"nothing within {self._deadline:g} s")

    def look(self, seconds: float) -> bool:
        """Read and write what can be, after some sleep if nothing can; True if the bell rang."""
        self._watch_for_room()
        rung = False
        for descriptor, events in self._poll.poll(seconds):
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
                rung = True
                continue
            lane = self._lanes[descriptor]
            if events & select.EPOLLOUT:
                lane.flush()
            if events & ~select.EPOLLOUT:
                lane.pump()
            if lane.closed:
                self._poll.unregister(descriptor)
                del self._lanes[descriptor]
                self._gone.add(lane.peer)
        return rung

    def _watch_for_room(self) -> None:
        for descriptor, lane in self._lanes.items():
            if bool(lane.outbox) != (descriptor in self._writing):
                self._writing ^= {descriptor}
                self._poll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if lane.outbox else 0))

    def close(self) -> None:
        self._gone.update(lane.peer for lane in self._lanes.values())
        self._lanes.clear()
        for wire in (*self._wires, *self._express):
            wire.close()

    def __del__(self) -> None:
        if hasattr(self, "_bell"):
            os.close(self._bell)
            self._poll.close()


class TransportError(OSError):
    """With the peer that it is about."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer
