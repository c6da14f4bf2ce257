"""Small messages between CPU ranks on sockets of our own, read and written by the thread that needs them.

gloo hands every message to a thread of its own and back: two wake-ups, half a millisecond where both compute. Here the
sender writes into the kernel's buffer and goes on, and the receiver reads what lies there. Large messages stay with
gloo, whose thread moves them while the rank computes.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable
from functools import cache
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from .listener import HELLO, Listener
from .rendezvous import BoundedStore
from .tags import diverged

LARGEST = 1 << 17  # bytes of a message that the kernel's buffers hold
HEADER = struct.Struct("<qq")  # tag, bytes
_BUFFER = 1 << 13  # bytes
_PROBE = 1.0  # seconds of waiting for a call after which, and again, a rank sees whether the caller still listens
_KNOCK = 0.02  # seconds at the door before looking after those who are in
_SPIN = 50e-6  # seconds of asking again before going to sleep: a wake-up costs more


class PendingReceive:
    """A message that is awaited: where it goes, and whether it is there."""

    def __init__(self, tag: int, target: memoryview) -> None:
        self.tag, self.target, self.done = tag, target, False


class PendingSend:
    """A message on its way out: done when its last byte is in the kernel's hands."""

    def __init__(self, connection: Connection, mark: float) -> None:
        #: Where the message ends, in bytes of the connection; infinity before its turn has come.
        self._connection, self.mark = connection, mark

    @property
    def done(self) -> bool:
        return self._connection.written >= self.mark


Item = TypeVar("Item")


class Diverged(ConnectionError):
    """A peer sent another message than the one that is awaited, which proves that it is elsewhere in the program."""


class ByTag(Generic[Item]):
    """What waits, in order, under each tag. Tags come and go by the thousand: one that nothing waits under is gone."""

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Item]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, tag: int, item: Item) -> None:
        self._waiting.setdefault(tag, deque()).append(item)

    def tags(self) -> Iterable[int]:
        return self._waiting

    def first(self, tag: int) -> Item | None:
        line = self._waiting.get(tag)
        return line[0] if line else None

    def take(self, tag: int) -> Item | None:
        line = self._waiting.get(tag)
        if line is None:
            return None
        item = line.popleft()
        if not line:
            del self._waiting[tag]
        return item


class Connection:
    """The connection to one peer. Messages arrive in the order sent, and are known by their tag."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.closed = False
        self.outbox: deque[memoryview] = deque()
        self.queued = self.written = 0  # bytes
        self._awaited = ByTag[PendingReceive]()
        self._early = ByTag[bytearray]()
        self._header, self._target, self._filled = bytearray(HEADER.size), memoryview(b""), 0
        self._arrival: PendingReceive | None = None
        self._tag: int | None = None
        self._buffer, self._begin, self._end = memoryview(bytearray(_BUFFER)), 0, 0  # read, and not yet taken

    def __del__(self) -> None:
        self.socket.close()

    def send(self, tag: int, payload: memoryview) -> PendingSend:
        self.outbox.append(memoryview(HEADER.pack(tag, payload.nbytes)))
        if payload.nbytes:
            self.outbox.append(payload)
        self.queued += HEADER.size + payload.nbytes
        self.flush()
        return PendingSend(self, self.queued)

    def flush(self) -> None:
        while self.outbox:
            try:
                sent = self.socket.sendmsg(list(self.outbox)[:8])
            except BlockingIOError:
                return
            except ConnectionError:
                self.closed = True
                return
            self.written += sent
            while sent:
                first = self.outbox[0]
                if sent < first.nbytes:
                    self.outbox[0] = first[sent:]
                    break
                sent -= first.nbytes
                self.outbox.popleft()

    def receive(self, tag: int, target: memoryview) -> PendingReceive:
        arrival = PendingReceive(tag, target)
        early = self._early.take(tag)
        if early is not None:
            if len(early) != target.nbytes:
                raise Diverged(f"{len(early)} bytes came where {target.nbytes} were awaited")
            if early:  # empty targets may be read-only
                target[:] = early
            arrival.done = True
        else:
            self._awaited.add(tag, arrival)
        return arrival

    def check(self, arrival: PendingReceive) -> None:
        """Raise if it cannot come, because the peer is elsewhere in the program."""
        if self._early and any(diverged(arrival.tag, tag) for tag in self._early.tags()):
            raise Diverged("the peer runs another operation")

    def pump(self, job: PendingReceive | None = None) -> None:
        """Read whatever has arrived, or up to the end of that message."""
        while True:
            room = memoryview(self._header) if self._tag is None else self._target
            if self._filled < room.nbytes and not self._take_in(room):
                return
            if self._filled == room.nbytes:
                self._advance()
                if job is not None and job.done:
                    return

    def _take_in(self, room: memoryview) -> bool:
        """Some of it. Headers and small payloads are read together: a call costs more than a copy."""
        wanted = room.nbytes - self._filled
        if self._begin == self._end and not self._read_on(room if wanted > _BUFFER // 2 else self._buffer):
            return False
        part = min(wanted, self._end - self._begin)
        if part:
            room[self._filled : self._filled + part] = self._buffer[self._begin : self._begin + part]
            self._begin += part
            self._filled += part
        return True

    def _read_on(self, into: memoryview) -> bool:
        try:
            count = self.socket.recv_into(into if into is self._buffer else into[self._filled :])
        except BlockingIOError:
            return False
        except ConnectionError:
            count = 0
        self.closed = not count  # the peer is gone; what it sent before is here
        if into is self._buffer:
            self._begin, self._end = 0, count
        else:
            self._filled += count
        return bool(count)

    def _advance(self) -> None:
        """A header or a payload is complete."""
        if self._tag is None:
            self._tag, size = HEADER.unpack(self._header)
            self._arrival = self._awaited.take(self._tag)
            if self._arrival is not None and self._arrival.target.nbytes != size:
                raise Diverged(f"{size} bytes came where {self._arrival.target.nbytes} were awaited")
            self._target = self._arrival.target if self._arrival else memoryview(bytearray(size))
        else:
            self._deliver(self._tag)
            self._tag = None
        self._filled = 0

    def _deliver(self, tag: int) -> None:
        """Somebody may have begun to wait for it after its header had come."""
        arrival = self._arrival
        if arrival is None:
            arrival = self._awaited.take(tag)
            if arrival is None:
                self._early.add(tag, bytearray(self._target))
                return
            if self._target.nbytes:
                arrival.target[:] = self._target
        arrival.done = True


class TcpTransport:
    """This rank's connections, each made when first needed: the lower rank calls, the higher one answers."""

    def __init__(self, rank: int, deadline: float, store: Any, name: str, card: str = "") -> None:
        """``store`` is where the ranks tell their addresses, under a ``name`` that no other transport has had."""
        self.rank, self._name, self._raw_store = rank, name, store
        self.set_deadline(deadline)
        self.connections: dict[int, Connection] = {}
        self._listener = Listener(_own_address(card))
        self._store.set(f"{name}/{rank}", self._listener.address)

    def set_deadline(self, seconds: float) -> None:
        self.deadline, self._store = seconds, BoundedStore(self._raw_store, seconds)

    def close(self) -> None:
        for connection in self.connections.values():
            connection.socket.close()
            connection.closed = True
        self._listener.close()

    def __del__(self) -> None:
        if hasattr(self, "_listener"):  # else it was never opened
            self.close()

    def connection(self, peer: int) -> Connection:
        if peer not in self.connections:
            self.connections[peer] = Connection(self._call(peer) if self.rank < peer else self._answer(peer))
        return self.connections[peer]

    def _call(self, peer: int) -> socket.socket:
        host, port, token = self._store.get(f"{self._name}/{peer}").split()
        connection = socket.create_connection((host, int(port)), timeout=self.deadline)
        connection.sendall(HELLO.pack(bytes.fromhex(token), self.rank))
        return connection

    def _answer(self, peer: int) -> socket.socket:
        """Whoever else calls meanwhile is kept for later."""
        now = time.monotonic()
        end, probe = now + self.deadline, now + _PROBE
        while (connection := self._listener.callers.pop(peer, None)) is None:
            now = time.monotonic()
            if now > end:
                raise TimeoutError(f"rank {peer} has not called within {self.deadline:g} s")
            if now > probe:
                self._check_listening(peer)
                probe = now + _PROBE
            self._listener.look(_KNOCK)
            self.progress()
        return connection

    def _check_listening(self, peer: int) -> None:
        """Raise if a rank that has not called yet has left, or died."""
        name = f"{self._name}/{peer}"
        if self._store.check(name):
            host, port, _ = self._store.get(name).split()
            try:
                socket.create_connection((host, int(port)), timeout=_PROBE).close()
            except ConnectionRefusedError:
                raise ConnectionError(f"connection closed: rank {peer} no longer listens") from None
            except OSError:  # it may still call
                pass

    def progress(self) -> None:
        """Hand over and read what can be."""
        for each in self.connections.values():
            if not each.closed:
                each.flush()
                each.pump()

    def wait(self, peer: int, job: PendingReceive | None, end: float) -> None:
        """Until the message has come, or (None) all to this peer is handed over; TimeoutError at ``end``."""
        connection, asleep_from = self.connections[peer], 0.0
        while not (job.done if job is not None else not connection.outbox):
            if connection.closed:
                raise ConnectionError("connection closed by the peer")
            now = time.monotonic()
            if now > end:
                raise TimeoutError(f"nothing within {self.deadline:g} s")
            asleep_from = asleep_from or now + _spin()
            if now > asleep_from:
                self._sleep(min(1.0, end - now))
            connection.flush()
            connection.pump(job)
            if job is not None and not job.done:
                connection.check(job)

    def _sleep(self, seconds: float) -> None:
        """Wait until a connection can be read or written, and serve every one that can."""
        poll = select.poll()
        open_connections = [connection for connection in self.connections.values() if not connection.closed]
        for connection in open_connections:
            poll.register(connection.socket, select.POLLIN | (select.POLLOUT if connection.outbox else 0))
        ready = dict(poll.poll(max(1, int(1000 * seconds))))
        for connection in open_connections:
            if connection.socket.fileno() in ready:
                connection.flush()
                connection.pump()


@cache
def _spin() -> float:
    """Where ranks share cores, the one that is waited for has better use for them."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or (dist.get_world_size() if dist.is_initialized() else 1))
    return _SPIN if ranks <= (os.cpu_count() or 1) else 0.0


def cards() -> list[str]:
    """The network cards named to gloo."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def _own_address(card: str) -> str:
    """That of the network card, or the first of those named to gloo, or the one that leads to where the ranks met."""
    name = card or next(iter(cards()), "")
    if name:
        return _address_of(name)
    meeting = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(meeting)  # sends nothing
        found: str = probe.getsockname()[0]
    return found


def _address_of(card: str) -> str:
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", card.encode()[:15]))  # SIOCGIFADDR
    return socket.inet_ntoa(answer[20:24])
