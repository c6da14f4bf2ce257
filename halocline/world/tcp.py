"""A world's own sockets: its connections, who makes them, and how a thread waits for messages on them.

gloo hands every message to a thread of its own and back: two wake-ups, half a millisecond where both compute. Here the
sender writes into the kernel's buffer and goes on, and the receiver reads what lies there. Two kinds of world use it:

* In most worlds the thread that communicates also computes. It sends small messages here and leaves large ones to gloo,
  whose threads move them while the rank computes.
* A *wide* world has a thread that does nothing but communicate (``CommThread``). It sends messages of any size here,
  over every network card, the most urgent first: gloo cannot say which of several messages has come, and its threads
  take more of the processor than the copying does.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from .connection import LARGEST_OF_ALL, READ_AHEAD, Connection, PendingReceive, PendingSend
from .launcher import is_local, ranks_on_this_node, rendezvous_of
from .listener import Listener, call, host_and_port
from .rendezvous import BoundedStore
from .secret import Secret
from .transport_errors import Diverged, TransportError

LARGEST = 1 << 17  # bytes of a message that fits into the kernel's buffers, so that sending does not wait
WIDE_POSSIBLE = hasattr(os, "eventfd") and hasattr(os, "memfd_create")  # on Linux
_EXPRESS = 1 << 16  # bytes up to which a message of a wide world goes past large ones that are half sent
_LEAST_UNSENT = 1 << 16  # bytes: the smallest limit on the kernel's unsent bytes
_PROBE = 1.0  # seconds between checks that a rank which has not called yet still listens
_KNOCK = 0.02  # seconds to wait for a caller before serving the open connections again
_SPIN = 50e-6  # seconds to spin before sleeping, since a wake-up takes longer

#: The peer, the pending message, and anything else that the caller keeps with it.
Job = tuple[Any, ...]


class TcpTransport:
    """This rank's connections, each made when first needed: of two ranks the lower one calls, the higher one answers.

    A lane is one connection to each peer. A wide world has two lanes over each network card, one for small messages and
    one for large ones; the tag of a message decides its card. Other worlds have one lane.

    Only one thread at a time may use it, but any may call :meth:`wake`. A transport that is not wide cannot be woken,
    and never waits for the first of several messages.
    """

    def __init__(self, rank: int, deadline: float, store: Any, name: str, secret: Secret, wide: bool = False) -> None:
        """``store`` is where the ranks tell their addresses, under a ``name`` that no other transport has had."""
        self.rank, self._name, self._raw_store, self._secret, self._wide = rank, name, store, secret, wide
        self.set_deadline(deadline)
        self._connections: dict[tuple[int, int], Connection] = {}  # by peer and lane
        self._poll = select.poll()
        self._open: dict[int, Connection] = {}  # by descriptor: connections that are polled
        self._writing: set[int] = set()  # descriptors of those with bytes left to write
        self._gone: set[int] = set()  # peers that have closed a connection
        self._unsent = 0  # limit on the kernel's unsent bytes; 0: none
        self._spin = 0.0 if wide else _spin()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK) if wide else -1  # an event by which other threads end a wait
        if wide:
            self._poll.register(self._bell, select.POLLIN)
        named = cards() if wide else cards()[:1]
        self._listeners = [
            Listener(_own_address(card), secret, f"{name}/{rank}/{number}") for number, card in enumerate(named or [""])
        ]
        for number, listener in enumerate(self._listeners):
            self._store.set(f"{name}/{rank}/{number}", listener.address)

    def set_deadline(self, seconds: float) -> None:
        """Set the seconds that any wait may take."""
        self.deadline, self._store = seconds, BoundedStore(self._raw_store, seconds)

    # Connections ------------------------------------------------------------------------------------------------------

    def connection(self, peer: int, tag: int, size: int) -> Connection:
        """The connection over which a message of that tag and size goes to or comes from ``peer``."""
        lane = tag % len(self._listeners)
        if self._wide and size > _EXPRESS:
            lane += len(self._listeners)
        return self._connections.get((peer, lane)) or self._connect(peer, lane)

    def connect(self, peers: Sequence[int]) -> None:
        """Connect to these peers on all lanes. By all ranks together: each answers the lowest caller first, so that no
        circle of ranks waits for each other."""
        for lane in range(2 * len(self._listeners) if self._wide else 1):
            for peer in sorted(peers):
                if (peer, lane) not in self._connections:
                    self._connect(peer, lane)

    @property
    def refused(self) -> Counter[str]:
        """Callers at this rank's ports that were no ranks of the job, by what they did."""
        return sum((listener.refused for listener in self._listeners), Counter())

    def _connect(self, peer: int, lane: int) -> Connection:
        connected, proof = self._call(peer, lane) if self.rank < peer else (self._answer(peer, lane), b"")
        return self.adopt(connected, peer, lane, proof)

    def adopt(self, connected: socket.socket, peer: int, lane: int, proof: bytes = b"") -> Connection:
        """Use a connected socket, whose other end is that lane of ``peer`` and sends ``proof`` first."""
        share = self._wide and connected.getpeername()[0] == connected.getsockname()[0]  # the peer is on this node
        # Large messages are asked for before they are read, and need no copy: see Connection.
        reads_ahead = lane < len(self._listeners)
        largest = LARGEST_OF_ALL if self._wide else LARGEST
        made = Connection(connected, peer, share, READ_AHEAD if reads_ahead else 0, proof, largest)
        self._limit(made)
        self._poll.register(made.socket, select.POLLIN)
        self._connections[peer, lane] = self._open[made.socket.fileno()] = made
        return made

    def _address(self, peer: int, lane: int) -> str:
        return f"{self._name}/{peer}/{lane % len(self._listeners)}"

    def _call(self, peer: int, lane: int) -> tuple[socket.socket, bytes]:
        """Connect to a higher rank, at the address that it has left in the store."""
        name = self._address(peer, lane)
        return call(self._store.get(name), self._secret, name, self.rank, lane, self.deadline)

    def _answer(self, peer: int, lane: int) -> socket.socket:
        """Wait until a lower rank calls. Other callers meanwhile are kept for later."""
        listener, now = self._listeners[lane % len(self._listeners)], time.monotonic()
        end, probe = now + self.deadline, now + _PROBE
        while (connected := listener.callers.pop((peer, lane), None)) is None:
            now = time.monotonic()
            if now > end:
                raise TimeoutError(f"rank {peer} has not called within {self.deadline:g} s")
            if now > probe:
                self._check_listening(peer, lane)
                probe = now + _PROBE
            listener.look(_KNOCK)
            self._look(0.0)
        return connected

    def _check_listening(self, peer: int, lane: int) -> None:
        """Raise if a rank that has not called yet has left or died."""
        name = self._address(peer, lane)
        if self._store.check(name):
            where = host_and_port(self._store.get(name), self._secret, name)
            try:
                socket.create_connection(where, timeout=_PROBE).close()
            except ConnectionRefusedError:
                raise ConnectionError(f"connection closed: rank {peer} no longer listens") from None
            except OSError:  # it may still call
                pass

    def limit_unsent(self, size: int) -> None:
        """Limit the kernel's unsent bytes on all connections, those made later included."""
        self._unsent = max(_LEAST_UNSENT, size)
        for connection in self._connections.values():
            self._limit(connection)

    def _limit(self, connection: Connection) -> None:
        if self._unsent and not connection.closed:
            connection.limit_unsent(self._unsent)

    # Waiting ----------------------------------------------------------------------------------------------------------

    def wait(self, peer: int, pending: PendingReceive | PendingSend, end: float) -> None:
        """Block until a message has come or gone; TransportError at ``end``, by ``time.monotonic``."""
        if not self._wide:
            self._try(self._connections[peer, 0], pending)
        while not pending.done:
            self.wait_any([[(peer, pending)]], end)

    def _try(self, connection: Connection, pending: PendingReceive | PendingSend) -> None:
        """Read and write without sleeping, at least once and for a few microseconds."""
        asleep_from = 0.0
        while not (pending.done or pending.diverged or connection.closed):
            connection.flush()
            connection.pump()
            now = time.monotonic()
            asleep_from = asleep_from or now + self._spin
            if now >= asleep_from:
                return

    def wait_any(self, under_way: Sequence[Sequence[Job]], end: float) -> int | None:
        """The index of the first of these groups whose messages are all done; None after :meth:`wake`.

        Raises TransportError at ``end`` or if a peer is gone, Diverged if a peer is elsewhere in the program.
        """
        while True:
            for number, jobs in enumerate(under_way):
                for job in jobs:
                    if not job[1].done:
                        if job[1].diverged:
                            raise Diverged(job[0], "the peer runs another operation")
                        break
                else:
                    return number
            now = time.monotonic()
            if self._gone or now > end:
                self._refuse_hopeless(under_way, now > end)
            if self._look(min(1.0, max(0.001, end - now))):
                return None

    def _refuse_hopeless(self, under_way: Sequence[Sequence[Job]], late: bool) -> None:
        """Raise for a message whose peer is gone or, if it is ``late``, for the first that is not done."""
        for jobs in under_way:
            for peer, pending, *_ in jobs:
                if not pending.done and peer in self._gone:
                    raise TransportError(peer, "connection closed by the peer")
                if not pending.done and late:
                    raise TransportError(peer, f"nothing within {self.deadline:g} s")

    def _look(self, seconds: float) -> bool:
        """Read and write what is possible, after waiting at most so many seconds; True after :meth:`wake`."""
        for descriptor, connection in self._open.items():
            if bool(connection.outbox) != (descriptor in self._writing):
                self._writing ^= {descriptor}
                self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if connection.outbox else 0))
        woken = False
        for descriptor, events in self._poll.poll(1000 * seconds):
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
                woken = True
                continue
            connection = self._open[descriptor]
            if events & select.POLLOUT:
                connection.flush()
            if events & ~select.POLLOUT:
                connection.pump()
            if connection.closed:
                self._hang_up(descriptor)
        return woken

    def wake(self) -> None:
        """From any thread: end the wait of a thread in :meth:`wait_any`."""
        if self._wide:
            os.eventfd_write(self._bell, 1)

    def _hang_up(self, descriptor: int) -> None:
        """Stop polling a connection, and mark its peer as gone on all lanes."""
        self._poll.unregister(descriptor)
        self._writing.discard(descriptor)
        connection = self._open.pop(descriptor)
        connection.closed = True
        self._gone.add(connection.peer)

    def close(self) -> None:
        """Close all connections and ports."""
        for descriptor in list(self._open):
            self._hang_up(descriptor)
        for connection in self._connections.values():
            connection.socket.close()
        for listener in self._listeners:
            listener.close()

    def __del__(self) -> None:
        if hasattr(self, "_listeners"):  # else it was never opened
            self.close()
        if getattr(self, "_bell", -1) >= 0:
            os.close(self._bell)


def _spin() -> float:
    """Seconds to spin before sleeping; 0 where ranks share cores, since the awaited rank needs them."""
    ranks = ranks_on_this_node(dist.get_world_size() if dist.is_initialized() else 1)
    return _SPIN if ranks <= (os.cpu_count() or 1) else 0.0


def cards() -> list[str]:
    """The network cards that GLOO_SOCKET_IFNAME names."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def _own_address(card: str) -> str:
    """The address of a network card, of loopback if all ranks are here, or of the card that leads to where they met."""
    if card:
        return card_address(card)
    if is_local(os.environ):
        return "127.0.0.1"
    meeting = rendezvous_of(os.environ)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((meeting.address, meeting.port or 29500))  # sends nothing
        return str(probe.getsockname()[0])


def card_address(card: str) -> str:
    """The IPv4 address of a network card, on Linux; OSError if it has none."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", card.encode()[:15]))  # SIOCGIFADDR
    return socket.inet_ntoa(answer[20:24])
