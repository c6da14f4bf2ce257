"""The process of a node that keeps copies of its ranks' state, so that they outlive the ranks.

``python holder.py NAME PARENT LIMIT``: listens on the abstract socket NAME, hands out memory as descriptors, and ends
with the process PARENT (the launcher or agent that started the ranks), or when told. This file is run as a script by an
interpreter that has imported nothing of the package: it starts in a moment and takes 10 MB.

Each request and answer is one line of JSON; an answer may carry a descriptor. Only processes of the same user are
answered.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import struct
import sys
from typing import Any

LONGEST = 1 << 16  # bytes of a request or answer
_ROOMS = 10_000


class CopyMemory:
    """Pieces of memory by key, each valid as of a step or not. Those no longer needed are used again."""

    def __init__(self, limit: int) -> None:
        self.limit, self.used = limit, 0
        self.ident = secrets.token_hex(8)
        self._rooms: dict[str, list[Any]] = {}  # key: descriptor, size, step or None, checksum, number
        self._spare: list[tuple[int, int, int]] = []  # descriptor, size, number
        self._made = 0

    def answer(self, request: dict[str, Any]) -> tuple[dict[str, Any], int | None]:
        """The answer to a request, and a descriptor to send with it."""
        what = request.get("what")
        if what == "hello":
            return {"holder": self.ident}, None
        if what == "room":
            return self._room(str(request["key"]), int(request["size"]))
        if what == "valid":
            room = self._rooms[str(request["key"])]
            room[2], room[3] = int(request["step"]), int(request["checksum"])
            return {}, None
        if what == "list":
            told = {key: room for key, room in self._rooms.items() if room[2] is not None}
            return {"rooms": [[key, room[1], room[2], room[3]] for key, room in told.items()]}, None
        if what == "open":
            room = self._rooms[str(request["key"])]
            return {"size": room[1], "number": room[4]}, room[0]
        if what == "forget":  # what is older than a step, and, if asked, what is not valid
            step, invalid = int(request["step"]), bool(request.get("invalid"))
            for key in [k for k, room in self._rooms.items() if (invalid if room[2] is None else room[2] < step)]:
                descriptor, size, _, _, number = self._rooms.pop(key)
                self._spare.append((descriptor, size, number))
            return {}, None
        return {"error": f"unknown request {what!r}"}, None

    def _room(self, key: str, size: int) -> tuple[dict[str, Any], int | None]:
        """Memory for a copy: a spare one of this size, or new; spare ones of other sizes make room."""
        if size < 1 or len(self._rooms) >= _ROOMS:
            return {"error": "no such room"}, None
        fitting = next((each for each in self._spare if each[1] == size), None)
        if fitting is None:
            while self._spare and self.used + size > self.limit:
                descriptor, old, _ = self._spare.pop()
                os.close(descriptor)
                self.used -= old
            if self.used + size > self.limit:
                return {"error": f"copies of the state would take {self.used + size:,} bytes of this node's memory, "
                                 f"and copies.memory allows {self.limit:,}"}, None  # fmt: skip
            descriptor = os.memfd_create("halocline copy", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            self.used += size
            self._made += 1
            fitting = (descriptor, size, self._made)
        else:
            self._spare.remove(fitting)
        descriptor, _, number = fitting
        if key in self._rooms:
            old_descriptor, old, _, _, old_number = self._rooms.pop(key)
            self._spare.append((old_descriptor, old, old_number))
        self._rooms[key] = [descriptor, size, None, 0, number]
        return {"number": number}, descriptor


def serve(name: str, parent: int, limit: int) -> None:
    """Answer the ranks of this node until the parent ends."""
    rooms = CopyMemory(limit)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(f"\0{name}")
        except OSError:  # another rank of this node was faster
            return
        listener.listen(64)
        try:
            watched = os.pidfd_open(parent)
        except OSError:  # it has ended already
            return
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(watched, select.POLLIN)
        open_now: dict[int, socket.socket] = {}
        while True:
            for number, _ in poll.poll():
                if number == watched:
                    return
                if number == listener.fileno():
                    caller, _ = listener.accept()
                    if _user_of(caller) == os.geteuid():
                        open_now[caller.fileno()] = caller
                        poll.register(caller, select.POLLIN)
                    else:
                        caller.close()
                    continue
                if not _served(open_now[number], rooms):
                    poll.unregister(number)
                    open_now.pop(number).close()


def _user_of(caller: socket.socket) -> int:
    """The user at the other end, as the kernel knows it."""
    told = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", told)[1])


def _served(caller: socket.socket, rooms: CopyMemory) -> bool:
    """Answer one request; False once the caller has gone, or wants this process to end."""
    try:
        data = caller.recv(LONGEST)
        if not data:
            return False
        request = json.loads(data)
        if request.get("what") == "end":
            os._exit(0)
        try:
            answer, descriptor = rooms.answer(request)
        except (KeyError, TypeError, ValueError, OSError) as error:
            answer, descriptor = {"error": f"{type(error).__name__}: {error}"}, None
        text = json.dumps(answer).encode()
        socket.send_fds(caller, [text], [] if descriptor is None else [descriptor])
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
    return True


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
