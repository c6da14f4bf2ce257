"""Memory that two ranks of one node have mapped, for messages in one direction.

It has no name in any file system: the reader opens it through the writer's process, and nothing is left when both have
ended. If the reader is not permitted to, messages go over the socket.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections import deque

import numpy as np

_SIZE = 1 << 24  # bytes; the system allocates a page when it is first written
_TOKEN = 16  # bytes


class Mailbox:
    """A ring buffer in shared memory: messages are written one behind another and freed in the same order."""

    def __init__(self, memory: mmap.mmap, descriptor: int = -1) -> None:
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        self.size = self._bytes.size
        self._descriptor = descriptor
        self._next = 0
        self._held: deque[tuple[int, int]] = deque()

    @classmethod
    def new(cls, size: int = _SIZE) -> Mailbox:
        """A new mailbox, for the writer."""
        descriptor = os.memfd_create("halocline", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        return cls(mmap.mmap(descriptor, size), descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)

    def offer(self) -> bytes:
        """How the peer finds the memory, with a random token at its front that proves it is the right one."""
        token = secrets.token_bytes(_TOKEN)
        self._bytes[:_TOKEN] = np.frombuffer(token, dtype=np.uint8)
        return f"{os.getpid()} {self._descriptor} {self.size} {token.hex()}".encode()

    def _place(self, size: int) -> int | None:
        """Where a message of so many bytes fits; None if there is no room yet."""
        if not self._held:
            return 0
        oldest = self._held[0][0]
        if self._next <= oldest:
            return self._next if self._next + size < oldest else None
        if self._next + size <= self.size:
            return self._next
        return 0 if size < oldest else None

    def put(self, payload: memoryview) -> int | None:
        """Copy a message in and return its place; None if there is no room yet."""
        place = self._place(payload.nbytes)
        if place is None:
            return None
        self._bytes[place : place + payload.nbytes] = np.frombuffer(payload, dtype=np.uint8)
        self._next = place + payload.nbytes
        self._held.append((place, self._next))
        return place

    def free(self) -> None:
        """The reader has read the oldest message."""
        self._held.popleft()

    def read(self, place: int, target: memoryview) -> None:
        """Copy a message out."""
        np.frombuffer(target, dtype=np.uint8)[:] = self._bytes[place : place + target.nbytes]


def offered(offer: bytes) -> Mailbox | None:
    """Map the mailbox that a peer offers; None if that is not permitted."""
    try:
        process, descriptor, size, token = offer.decode().split()
        opened = os.open(f"/proc/{int(process)}/fd/{int(descriptor)}", os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    try:
        memory = mmap.mmap(opened, int(size), prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)
    return Mailbox(memory) if memory[:_TOKEN].hex() == token else None
