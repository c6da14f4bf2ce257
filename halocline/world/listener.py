"""The port at which other ranks connect.

Other programs connect there, too: port scanners, monitors, another job. They are disconnected after two seconds at
most, and none of them delays a rank or makes it fail.
"""

from __future__ import annotations

import secrets
import select
import socket
import struct
import time

HELLO = struct.Struct("<16sqq")  # token, rank, lane
_GREETING = 2.0  # seconds that a caller has to send it


class Listener:
    """Accepts connections of other ranks, which send a secret token, their rank and a lane first."""

    def __init__(self, host: str) -> None:
        self._token = secrets.token_bytes(16)
        self._socket = socket.create_server((host, 0), backlog=256)
        self._socket.setblocking(False)
        #: Callers that are not identified yet, by descriptor: socket, what it has sent, and since when.
        self._greeting: dict[int, tuple[socket.socket, bytearray, float]] = {}
        self.callers: dict[tuple[int, int], socket.socket] = {}  # by rank and lane

    @property
    def address(self) -> str:
        """Host, port and token, for other ranks only."""
        host, port = self._socket.getsockname()[:2]
        return f"{host} {port} {self._token.hex()}"

    def look(self, seconds: float) -> None:
        """Accept and identify callers, and wait at most so many seconds for one."""
        poll = select.poll()
        for descriptor in (self._socket.fileno(), *self._greeting):
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll(max(1, int(1000 * seconds))):
            if descriptor == self._socket.fileno():
                self._accept()
            else:
                self._read(descriptor)
        for descriptor, (_, _, since) in list(self._greeting.items()):
            if time.monotonic() - since > _GREETING:
                self._send_away(descriptor)

    def _accept(self) -> None:
        """Accept all connections that are waiting."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):  # no caller, or one that has hung up already
                return
            connection.setblocking(False)
            self._greeting[connection.fileno()] = connection, bytearray(), time.monotonic()
            self._read(connection.fileno())

    def _read(self, descriptor: int) -> None:
        """Read a caller's greeting as far as it has come, and admit or disconnect the caller."""
        connection, said, _ = self._greeting[descriptor]
        try:
            part = connection.recv(HELLO.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        said += part
        if len(said) < HELLO.size and part:
            return
        token, rank, lane = HELLO.unpack(said) if len(said) == HELLO.size else (b"", -1, 0)
        if secrets.compare_digest(token, self._token):
            del self._greeting[descriptor]
            self.callers[rank, lane] = connection
        else:
            self._send_away(descriptor)

    def _send_away(self, descriptor: int) -> None:
        self._greeting.pop(descriptor)[0].close()

    def close(self) -> None:
        """Close the port and all connections that were not taken from ``callers``."""
        for connection in (*self.callers.values(), *(greeted[0] for greeted in self._greeting.values()), self._socket):
            connection.close()
