"""The port at which other ranks connect, and how a rank and its caller prove to each other that they are of one job.

Whoever connects sends a greeting first: a nonce, its rank, a lane, and a proof that it knows the job's secret, over a
challenge that the listener has drawn. The listener answers with a proof over the caller's nonce. Neither waits for the
other's, and neither believes anything that comes before it.

Other programs connect there, too: port scanners, monitors, attackers. They are disconnected and counted; none of them
delays a rank or makes it fail.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import time
from collections import Counter

from .secret import PROOF_SIZE, Secret, from_hex

_HELLO = struct.Struct(f"<16sqq{PROOF_SIZE}s")  # nonce, rank, lane, proof
_NONCE = 16  # bytes
_GREETING = 2.0  # seconds that a caller has to send it
_CROWDED = 0.25  # the same where too many callers wait
_PENDING = 128  # callers that may be identified at once; further ones wait in the kernel
_BACKLOG = 1024


class Listener:
    """Accepts connections of other ranks. ``name`` says whose port it is, and is different for each in a job."""

    def __init__(self, host: str, secret: Secret, name: str) -> None:
        self._secret, self._name = secret, name
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        bound, port = self._socket.getsockname()[:2]
        self._place = f"{bound} {port} {secrets.token_hex(_NONCE)}"
        #: Callers that are not identified yet, by descriptor: socket, what it has sent, and since when.
        self._greeting: dict[int, tuple[socket.socket, bytearray, float]] = {}
        self.callers: dict[tuple[int, int], socket.socket] = {}  # by rank and lane
        self._known: set[tuple[int, int]] = set()  # who has called: a greeting that is sent again is refused
        self.refused: Counter[str] = Counter()  # callers that were sent away, by reason

    @property
    def address(self) -> str:
        """Host, port and challenge, with a proof that they are this listener's: for :func:`call`."""
        return f"{self._place} {self._secret.proof('address', self._name, self._place).hex()}"

    def look(self, seconds: float) -> None:
        """Accept and identify callers, and wait at most so many seconds for one."""
        crowded = self._make_room()
        poll = select.poll()
        for descriptor in ([] if crowded else [self._socket.fileno()]) + list(self._greeting):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(max(1, int(1000 * seconds))):
            if descriptor == self._socket.fileno():
                self._accept()
            else:
                self._read(descriptor)

    def _make_room(self) -> bool:
        """Send away callers that took too long; True if no more can be accepted now."""
        crowded, now = len(self._greeting) >= _PENDING, time.monotonic()
        for descriptor, (_, _, since) in list(self._greeting.items()):
            if now - since > (_CROWDED if crowded else _GREETING):
                self._send_away(descriptor, "silent")
        return len(self._greeting) >= _PENDING

    def _accept(self) -> None:
        """Accept connections that are waiting, as many as may be identified at once."""
        while len(self._greeting) < _PENDING:
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):  # no caller, or one that has hung up already
                return
            except OSError:  # out of descriptors: those of strangers are given back
                for descriptor in list(self._greeting):
                    self._send_away(descriptor, "crowd")
                return
            connection.setblocking(False)
            self._greeting[connection.fileno()] = connection, bytearray(), time.monotonic()
            self._read(connection.fileno())

    def _read(self, descriptor: int) -> None:
        """Read a caller's greeting as far as it has come, and admit or disconnect the caller."""
        connection, said, _ = self._greeting[descriptor]
        try:
            part = connection.recv(_HELLO.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        said += part
        if len(said) < _HELLO.size:
            if not part:
                self._send_away(descriptor, "left")
            return
        nonce, rank, lane, proof = _HELLO.unpack(said)
        facts = self._place, nonce.hex(), rank, lane
        if not self._secret.proves(proof, "caller", *facts) or (rank, lane) in self._known:
            self._send_away(descriptor, "no proof")
            return
        try:
            connection.send(self._secret.proof("listener", *facts))
        except OSError:
            self._send_away(descriptor, "left")
            return
        del self._greeting[descriptor]
        self._known.add((rank, lane))
        self.callers[rank, lane] = connection

    def _send_away(self, descriptor: int, why: str) -> None:
        self.refused[why] += 1
        self._greeting.pop(descriptor)[0].close()

    def close(self) -> None:
        """Close the port and all connections that were not taken from ``callers``."""
        for connection in (*self.callers.values(), *(greeted[0] for greeted in self._greeting.values()), self._socket):
            connection.close()


def host_and_port(address: str, secret: Secret, name: str) -> tuple[str, int]:
    """Where a listener is. ConnectionError if the address is not that of a rank: anybody may write to the store."""
    *place, proof = address.split() or [""]
    if len(place) != 3 or not secret.proves(from_hex(proof), "address", name, " ".join(place)):
        raise ConnectionError(f"connection closed: {name} in the store is not the address of a rank of this job")
    return place[0], int(place[1])


def call(address: str, secret: Secret, name: str, rank: int, lane: int, deadline: float) -> tuple[socket.socket, bytes]:
    """Connect to a listener as that rank; returns the socket and the proof that must come from it first."""
    connected = socket.create_connection(host_and_port(address, secret, name), timeout=deadline)
    nonce = secrets.token_bytes(_NONCE)
    facts = address.rpartition(" ")[0], nonce.hex(), rank, lane
    try:
        connected.sendall(_HELLO.pack(nonce, rank, lane, secret.proof("caller", *facts)))
    except OSError:
        connected.close()
        raise
    return connected, secret.proof("listener", *facts)
