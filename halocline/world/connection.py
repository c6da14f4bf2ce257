"""One connection to one peer over a socket of our own: how messages are framed, matched, ordered and shared.

A message is a header (tag, bytes, place) and a payload, which follows on the socket or lies at ``place`` in memory that
both ranks of a node have mapped (``shared_memory.py``). Messages with negative tags are about that memory. Nothing here
blocks: :class:`~.tcp.TcpTransport` decides when a connection reads and writes.
"""

from __future__ import annotations

import heapq
import hmac
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from .shared_memory import Mailbox, offered
from .tags import diverged, is_counted
from .transport_errors import Diverged, TransportError

READ_AHEAD = 1 << 13  # bytes: headers and small payloads are read together, since a call costs more than a copy
_HEADER = struct.Struct("<qqq")  # tag, bytes, place
_FOLLOWS = -1  # as place: the payload follows on the socket
_OFFER, _ACCEPTED, _FREED = -2, -3, -4  # tags of messages about shared memory, without a payload but for the offer
_PROOF = -5  # stands for the proof that comes before all messages
_LONGEST_OFFER = 256  # bytes
LARGEST_OF_ALL = 1 << 40  # bytes of a message where nothing else limits it
_WORTH_SHARING = 1 << 14  # bytes from which a message goes through shared memory
_LOW_WATER = 1 << 18  # bytes of a half-read payload that the kernel collects before it reports the socket as readable
_PARTS = 8  # buffers that one call gives to the kernel

Item = TypeVar("Item")


class PendingSend:
    """A message on its way out; ``done`` when its last byte is in the kernel or in the shared memory."""

    diverged = False

    def __init__(self) -> None:
        self.done = False


class PendingReceive:
    """A message that is awaited, and the memory that it goes to.

    ``diverged``: it cannot come, because the peer has sent another message in its place.
    """

    def __init__(self, tag: int, target: memoryview) -> None:
        self.tag, self.target = tag, target
        self.done = self.diverged = False


class ByTag(Generic[Item]):
    """Queues of items by tag. An empty queue is removed, since thousands of tags come and go."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Item]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[tuple[int, Item]]:
        for tag, line in self._waiting.items():
            for item in line:
                yield tag, item

    def add(self, tag: int, item: Item) -> None:
        """Append an item to the queue of a tag."""
        self._waiting.setdefault(tag, deque()).append(item)

    def take(self, tag: int) -> Item | None:
        """Remove the first item of a tag's queue; None if there is none."""
        line = self._waiting.get(tag)
        if line is None:
            return None
        item = line.popleft()
        if not line:
            del self._waiting[tag]
        return item


class Connection:
    """Messages to and from one peer, matched by tag; those of one tag arrive in the order in which they were sent.

    Messages wait for their turn here and not in the kernel: the most urgent goes first, and one that has begun is
    finished. With ``share``, large messages to a rank of the same node go through shared memory as soon as both ends
    have it mapped. ``read_ahead`` is how many bytes a read may take beyond a message; with 0, reading stops at the end
    of each message, so that the next one can be asked for before it is read and need not be copied.

    ``proof`` is what must come first: nothing is believed without it. No message may be larger than ``largest`` bytes.
    """

    def __init__(
        self,
        connected: socket.socket,
        peer: int,
        share: bool = False,
        read_ahead: int = READ_AHEAD,
        proof: bytes = b"",
        largest: int = LARGEST_OF_ALL,
    ) -> None:
        connected.setblocking(False)
        if connected.family == socket.AF_INET:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.peer = connected, peer
        self.closed = False
        # Out
        self.outbox: deque[memoryview] = deque()  # bytes of messages that have begun: they go to the kernel next
        self._leaving: PendingSend | None = None  # the message whose last part is in the outbox
        self._later: list[tuple[float, int, int, memoryview, PendingSend]] = []  # a heap: by urgency, then by age
        self._count = 0  # messages sent so far
        # In
        self._awaited = ByTag[PendingReceive]()
        self._early = ByTag[memoryview]()  # messages that have arrived and were not asked for yet
        self._header, self._target, self._filled = memoryview(bytearray(_HEADER.size)), memoryview(b""), 0
        self._tag: int | None = None  # of the payload being read; None: a header is being read
        self._arrival: PendingReceive | None = None
        # Bytes that were read ahead and not used yet: from ``_begin`` to ``_end``.
        self._buffer, self._begin, self._end = memoryview(bytearray(read_ahead)), 0, 0
        self._low_water = 1
        self._proof, self._largest = proof, largest
        if proof:
            self._tag, self._target = _PROOF, memoryview(bytearray(len(proof)))
        # Shared memory
        self._share, self._accepted = share, False
        self._outgoing: Mailbox | None = None
        self._incoming: Mailbox | None = None
        self._unshared: deque[tuple[int, memoryview, PendingSend]] = deque()  # wait for room in the mailbox

    def __del__(self) -> None:
        self.socket.close()

    # Sending ----------------------------------------------------------------------------------------------------------

    def send(self, tag: int, payload: memoryview, urgency: float = 0.0) -> PendingSend:
        """Queue a message, and send as much as the kernel takes now. The payload must not change before it is done."""
        pending = PendingSend()
        if self._share and payload.nbytes >= _WORTH_SHARING:
            if self._outgoing is None:
                self._outgoing = Mailbox.new()
                self._enqueue(_OFFER, memoryview(self._outgoing.offer()), urgency, PendingSend())
            elif self._accepted and payload.nbytes <= self._outgoing.size:
                self._unshared.append((tag, payload, pending))
                self._fill_mailbox()
                return pending
        self._enqueue(tag, payload, urgency, pending)
        self.flush()
        return pending

    def _enqueue(self, tag: int, payload: memoryview, urgency: float, pending: PendingSend) -> None:
        self._count += 1
        heapq.heappush(self._later, (urgency, self._count, tag, payload, pending))

    def flush(self) -> None:
        """Give the kernel as many bytes as it takes without blocking."""
        while not self.closed and (self.outbox or self._later):
            if not self.outbox:
                _, _, tag, payload, self._leaving = heapq.heappop(self._later)
                self._say(tag, payload.nbytes)
                if payload.nbytes:
                    self.outbox.append(payload)
            parts = [self.outbox[at] for at in range(min(_PARTS, len(self.outbox)))]
            try:
                sent = self.socket.sendmsg(parts)
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            for part in parts:
                if sent < part.nbytes:
                    self.outbox[0] = part[sent:]
                    return
                sent -= part.nbytes
                self.outbox.popleft()
            if not self.outbox and self._leaving is not None:
                self._leaving.done, self._leaving = True, None

    def _say(self, tag: int, size: int = 0, place: int = _FOLLOWS) -> None:
        """Queue a header; without ``place`` the payload follows."""
        self.outbox.append(memoryview(_HEADER.pack(tag, size, place)))

    def _fill_mailbox(self) -> None:
        """Copy waiting messages into the shared memory as far as there is room, and announce them."""
        assert self._outgoing is not None
        while self._unshared:
            tag, payload, pending = self._unshared[0]
            place = self._outgoing.put(payload)
            if place is None:
                break
            self._say(tag, payload.nbytes, place)
            pending.done = True
            self._unshared.popleft()
        self.flush()

    def limit_unsent(self, size: int) -> None:
        """Keep at most about ``size`` unsent bytes in the kernel, so that urgent messages need not wait behind them."""
        if self.socket.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size)

    # Receiving --------------------------------------------------------------------------------------------------------

    def receive(self, tag: int, target: memoryview) -> PendingReceive:
        """Ask for a message, which may have arrived already."""
        arrival = PendingReceive(tag, target)
        early = self._early.take(tag)
        if early is None:
            self._awaited.add(tag, arrival)
            if self._early and is_counted(tag):
                arrival.diverged = any(diverged(tag, came) for came, _ in self._early)
            return arrival
        self._check_size(arrival, early.nbytes)
        if early.nbytes:  # empty targets may be read-only
            target[:] = early
        arrival.done = True
        return arrival

    def _check_size(self, arrival: PendingReceive, size: int) -> None:
        """Raise Diverged if a message has another size than the one awaited."""
        if arrival.target.nbytes != size:
            text = f"a message of another size came: {size} bytes where {arrival.target.nbytes} were awaited"
            raise Diverged(self.peer, text)

    def pump(self) -> None:
        """Read to the end of the next message, and everything that the last read took beyond it. Does not block."""
        while not self.closed:
            room = self._header if self._tag is None else self._target
            if self._filled < room.nbytes and not self._take_in(room):
                self._wake_at(1 if self._tag is None else min(room.nbytes - self._filled, _LOW_WATER))
                return
            if self._filled == room.nbytes and self._finish_part() and self._begin == self._end:
                self._wake_at(1)
                return

    def _take_in(self, room: memoryview) -> bool:
        """Fill a part of ``room``; False if nothing is there to be read now."""
        wanted = room.nbytes - self._filled
        if self._begin == self._end:
            if wanted > self._buffer.nbytes // 2:
                count = self._read(room[self._filled :])
                self._filled += count
                return count > 0
            self._begin, self._end = 0, self._read(self._buffer)
        part = min(wanted, self._end - self._begin)
        room[self._filled : self._filled + part] = self._buffer[self._begin : self._begin + part]
        self._begin += part
        self._filled += part
        return part > 0

    def _read(self, into: memoryview) -> int:
        """Bytes read from the socket; 0 if there are none, or if the peer has closed it."""
        try:
            count = self.socket.recv_into(into)
        except BlockingIOError:
            return 0
        except OSError:
            count = 0
        self.closed = not count  # 0 bytes: the peer has closed; everything it sent before is here
        return count

    def _wake_at(self, low_water: int) -> None:
        """Let the kernel report the socket as readable only from so many bytes on."""
        if low_water != self._low_water:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
            self._low_water = low_water

    def _finish_part(self) -> bool:
        """A header or a payload is complete; returns whether that ends a message."""
        self._filled = 0
        if self._tag is not None:
            tag, self._tag = self._tag, None
            if tag == _PROOF:
                self._check_proof(bytes(self._target))
            elif tag == _OFFER:
                self._accept(bytes(self._target))
            else:
                self._deliver(tag)
            return True
        tag, size, place = _HEADER.unpack(self._header)
        self._check_header(tag, size, place)
        if tag == _ACCEPTED:
            self._accepted = True
        elif tag == _FREED:
            assert self._outgoing is not None
            self._outgoing.free()
            self._fill_mailbox()
        elif place != _FOLLOWS:
            self._take_from_mailbox(tag, size, place)
        else:
            self._tag, self._arrival = tag, self._take_awaited(tag, size)
            self._target = memoryview(bytearray(size)) if self._arrival is None else self._arrival.target
            return False
        return True

    def _check_proof(self, came: bytes) -> None:
        """Raise TransportError unless the peer has shown that it knows the job's secret."""
        if not hmac.compare_digest(came, self._proof):
            self.closed = True
            raise TransportError(self.peer, "connection closed: its peer does not know the job's secret")

    def _check_header(self, tag: int, size: int, place: int) -> None:
        """Raise TransportError for a header that no rank sends: a length beyond what can come, or an unknown tag."""
        if place != _FOLLOWS:
            sound = tag >= 0 and self._incoming is not None and 0 <= place <= place + size <= self._incoming.size
        elif tag < 0:
            sound = (tag == _OFFER and 0 < size <= _LONGEST_OFFER) or (
                size == 0 and (tag == _ACCEPTED or (tag == _FREED and self._outgoing is not None))
            )
        else:
            sound = True
        if not sound or not 0 <= size <= self._largest:
            self.closed = True
            raise TransportError(self.peer, f"connection closed: no rank sends the header {tag}, {size}, {place}")

    def _take_awaited(self, tag: int, size: int) -> PendingReceive | None:
        """The pending receive that a message of this tag and size is for, if there is one."""
        arrival = self._awaited.take(tag)
        if arrival is not None:
            self._check_size(arrival, size)
        return arrival

    def _deliver(self, tag: int) -> None:
        """A payload has arrived on the socket. It may have been asked for only after its header was read."""
        arrival = self._arrival
        if arrival is None:
            arrival = self._take_awaited(tag, self._target.nbytes)
            if arrival is None:
                self._keep(tag, self._target)
                return
            if self._target.nbytes:
                arrival.target[:] = self._target
        arrival.done = True

    def _take_from_mailbox(self, tag: int, size: int, place: int) -> None:
        """A message has arrived in the shared memory: copy it, and tell the peer that its place is free."""
        assert self._incoming is not None
        arrival = self._take_awaited(tag, size)
        if arrival is not None:
            self._incoming.read(place, arrival.target)
            arrival.done = True
        else:
            early = memoryview(bytearray(size))
            self._incoming.read(place, early)
            self._keep(tag, early)
        self._say(_FREED)
        self.flush()

    def _keep(self, tag: int, payload: memoryview) -> None:
        """Keep a message that was not asked for yet, and see whether it proves that the peer is elsewhere."""
        self._early.add(tag, payload)
        if is_counted(tag):
            for awaited, arrival in self._awaited:
                arrival.diverged = arrival.diverged or diverged(awaited, tag)

    def _accept(self, offer: bytes) -> None:
        """Map the memory that the peer offers, and tell it so."""
        self._incoming = offered(offer)
        if self._incoming is not None:
            self._say(_ACCEPTED)
            self.flush()
