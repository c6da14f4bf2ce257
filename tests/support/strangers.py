"""Programs that connect to a port without being asked to: scanners, attackers, programs that got the wrong port."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import suppress

from halocline.world.listener import _HELLO

KINDS = ("idles", "resets", "hangs up", "talks", "says a part", "huge", "forges", "drips")


def stranger(host: str, port: int, kind: str) -> socket.socket:
    """Connect and do as that kind of stranger does. Raises OSError if the port refuses or drops it in the act."""
    caller = socket.create_connection((host, port), timeout=2.0)
    if kind == "resets":
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        caller.close()
    elif kind == "hangs up":
        caller.close()
    elif kind == "talks":
        caller.sendall(b"GET / HTTP/1.1\r\nHost: rank\r\n\r\n")
    elif kind == "says a part":
        caller.sendall(b"SSH")
    elif kind == "huge":
        caller.sendall(b"\xff" * (1 << 16))
    elif kind == "forges":  # a greeting as rank 0, then a message that says it has 2^62 bytes
        caller.sendall(_HELLO.pack(bytes(16), 0, 0, bytes(32)) + struct.pack("<qqq", 7, 1 << 62, -1))
    elif kind == "drips":
        caller.sendall(b"\0")
    return caller


class Siege:
    """Strangers of all kinds who keep connecting to these ports, from a thread, until the context ends."""

    def __init__(self, ports: list[tuple[str, int]], pause: float = 0.05) -> None:
        self._ports, self._pause = ports, pause
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._attack, daemon=True)
        self.calls = 0

    def __enter__(self) -> Siege:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(30)

    def _attack(self) -> None:
        held: list[socket.socket] = []
        while not self._end.is_set():
            for host, port in self._ports:
                for kind in KINDS:
                    with suppress(OSError):
                        held.append(stranger(host, port, kind))
                    self.calls += 1
            while len(held) > 200:
                held.pop(0).close()
            time.sleep(self._pause)
        for each in held:
            each.close()
