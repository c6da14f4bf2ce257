"""A rank's side of the holder of its node: it is started if need be, and gives memory to write into."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..checkpoints import CheckpointError
from . import holder

_START = 20.0  # seconds until the holder listens
_ANSWER = 30.0  # seconds for an answer: the holder only allocates memory
_POLL = 0.02


class HolderClient:
    """The connection of a rank to the holder of its node, which is that of its launcher's process.

    ``folder`` is that of the run. A holder ends with the process that started the rank, by which it is named: the
    agents of a machine have one each.
    """

    def __init__(self, folder: Path, limit: int, parent: int | None = None) -> None:
        parent = os.getppid() if parent is None else parent
        run = hashlib.blake2b(f"{folder.resolve()} {os.geteuid()}".encode(), digest_size=12).hexdigest()
        self._name = f"halocline-{run}-{parent}"
        self._maps: dict[int, mmap.mmap] = {}  # memory by its number: a room that is used again is mapped already
        self._socket = self._connected(parent, limit)
        self.holder = str(self.ask(what="hello")["holder"])

    def _connected(self, parent: int, limit: int) -> socket.socket:
        """Connect to the holder; start it if it does not listen yet."""
        end, started = time.monotonic() + _START, False
        while True:
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            caller.settimeout(_ANSWER)
            try:
                caller.connect(f"\0{self._name}")
                return caller
            except OSError as error:
                caller.close()
                if time.monotonic() > end:
                    raise CheckpointError(
                        f"the process that keeps copies of the state does not start: {error}"
                    ) from error
            if not started:
                started = True
                command = [sys.executable, "-I", "-S", holder.__file__, self._name, str(parent), str(limit)]
                nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]
                # A session of its own: it outlives the rank, and ends with the rank's launcher.
                os.posix_spawn(command[0], command, os.environ, file_actions=nothing, setsid=True)
            time.sleep(_POLL)

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request. CheckpointError if it is refused, or none comes."""
        return self._asked(request)[0]

    def _asked(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        try:
            self._socket.send(json.dumps(request).encode())
            data, descriptors, _, _ = socket.recv_fds(self._socket, holder.LONGEST, 1)
            answer = json.loads(data)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the process that keeps copies of the state does not answer: {error}") from error
        if "error" in answer:
            raise CheckpointError(str(answer["error"]))
        return answer, list(descriptors)

    def room(self, key: str, size: int) -> mmap.mmap:
        """Memory of this size, to write a copy into. It is valid once :meth:`valid` says so."""
        answer, descriptors = self._asked({"what": "room", "key": key, "size": size})
        return self._mapped(int(answer["number"]), descriptors, size)

    def opened(self, key: str) -> mmap.mmap:
        """A copy, to read."""
        answer, descriptors = self._asked({"what": "open", "key": key})
        return self._mapped(int(answer["number"]), descriptors, int(answer["size"]))

    def _mapped(self, number: int, descriptors: list[int], size: int) -> mmap.mmap:
        try:
            if number not in self._maps:
                self._maps[number] = mmap.mmap(descriptors[0], size)
            return self._maps[number]
        finally:
            for each in descriptors:
                os.close(each)

    def valid(self, key: str, step: int, checksum: int) -> None:
        """The copy is complete."""
        self.ask(what="valid", key=key, step=step, checksum=checksum)

    def rooms(self) -> list[tuple[str, int, int, int]]:
        """Key, size, step and checksum of every complete copy on this node."""
        return [
            (str(key), int(size), int(step), int(check)) for key, size, step, check in self.ask(what="list")["rooms"]
        ]

    def forget(self, step: int) -> None:
        """Copies of earlier steps are no longer needed."""
        self.ask(what="forget", step=step)

    def close(self, end: bool) -> None:
        """Leave; with ``end`` the holder ends, too: the run is over."""
        if end:
            with suppress(OSError):
                self._socket.send(json.dumps({"what": "end"}).encode())
        self._socket.close()
