"""Ranks of a pool that mpiexec has started, and that talk over MPI.

They are not children of this process: each calls back through a socket file, and is watched by its process number.
Linux only.
"""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ..errors import HaloclineError
from .place import START_DEADLINE, RankPlace, environment

_SHORT = 5.0  # seconds for what the system does at once


class MpiPlace(RankPlace):
    """Ranks on this machine, started by the ``mpiexec`` beside this Python, or else by the first on the path."""

    parent = 0

    def environment(self, rank: int, size: int, port: int) -> Mapping[str, str]:
        """The variables of loopback ranks, and MPI as their transport."""
        return {**super().environment(rank, size, port), "HALOCLINE_TRANSPORT": "mpi"}

    def start(
        self, main: Callable[..., None], stacks: Sequence[str], port: int
    ) -> tuple[list[Any], list[Connection[Any, Any]]]:
        """Start mpiexec, wait until all ranks have called back, and hand each its main function."""
        self.parent = os.getpid()
        door_path = str(Path(stacks[0]).parent / "door")
        with socket.socket(socket.AF_UNIX) as door, environment(self.environment(0, len(stacks), port)):
            door.bind(door_path)
            door.listen(len(stacks))
            launcher = _launch(len(stacks), door_path)
            try:
                called = _answer(door, launcher, len(stacks))
            except BaseException:
                launcher.kill()
                launcher.wait(_SHORT)
                raise
        Path(door_path).unlink()
        for rank, (_, pipe) in called.items():
            pipe.send_bytes(pickle.dumps((main, rank, stacks[rank])))
        return [called[rank][0] for rank in range(len(stacks))], [called[rank][1] for rank in range(len(stacks))]

    def wait_for_parent(self) -> None:
        """By a descriptor of the parent's process, since mpiexec stands in between."""
        _ended(os.pidfd_open(self.parent), None)

    def manner_of_death(self, process: Any) -> str:
        """Only mpiexec learns the exit status."""
        return "closed its pipe and did not exit" if process.is_alive() else "died; mpiexec knows how"


def mpiexec() -> str | None:
    """Where it is."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


def _launch(size: int, door: str) -> subprocess.Popen[bytes]:
    """mpiexec in a session of its own, so that Ctrl-C reaches the parent only."""
    program = mpiexec()
    if program is None:
        raise HaloclineError("no mpiexec on the path; pip install mpich, or load the machine's MPI")
    ranks = [sys.executable, "-c", f"from halocline.testing.mpi_place import serve; serve({door!r})"]
    # Without clean-up a rank that dies leaves the others alive, to say what they saw.
    return subprocess.Popen(
        [program, "-disable-auto-cleanup", "-n", str(size), *ranks], stdin=subprocess.DEVNULL, start_new_session=True
    )


def _answer(
    door: socket.socket, launcher: subprocess.Popen[bytes], size: int
) -> dict[int, tuple[MpiProcess, Connection[Any, Any]]]:
    """Wait for all ranks to call: each says which it is, and its process number."""
    started: dict[int, tuple[MpiProcess, Connection[Any, Any]]] = {}
    until = time.monotonic() + START_DEADLINE
    door.settimeout(0.2)
    while len(started) < size:
        if launcher.poll() is not None or time.monotonic() > until:
            raise HaloclineError(f"mpiexec started {len(started)} of {size} ranks; see what it wrote")
        with suppress(TimeoutError):
            connection, _ = door.accept()
            connection.setblocking(True)
            pipe: Connection[Any, Any] = Connection(connection.detach())
            rank, pid = pickle.loads(pipe.recv_bytes())
            started[rank] = MpiProcess(pid, launcher), pipe
    return started


class MpiProcess:
    """A rank as the pool wants a process, known by a descriptor that becomes readable when it ends."""

    exitcode = None  # known to mpiexec alone

    def __init__(self, pid: int, launcher: subprocess.Popen[bytes]) -> None:
        self.pid, self._launcher = pid, launcher
        self.sentinel = os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self.sentinel)

    def is_alive(self) -> bool:
        """Does the rank still run?"""
        return not _ended(self.sentinel, 0.0)

    def kill(self) -> None:
        """mpiexec first, which otherwise fills the screen."""
        self._launcher.kill()
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def join(self, timeout: float) -> None:
        """Wait until it has ended."""
        _ended(self.sentinel, timeout)
        if self._launcher.poll() is None and not self.is_alive():
            with suppress(subprocess.TimeoutExpired):  # it may have other ranks to look after
                self._launcher.wait(0.01)


def _ended(descriptor: int, timeout: float | None) -> bool:
    return bool(select.select([descriptor], [], [], timeout)[0])


# ---- in the rank processes ----


def serve(door: str) -> None:
    """A rank's whole life."""
    with socket.socket(socket.AF_UNIX) as call:
        call.settimeout(_SHORT)
        call.connect(door)
        call.setblocking(True)
        pipe: Connection[Any, Any] = Connection(call.detach())
    pipe.send_bytes(pickle.dumps((int(os.environ["PMI_RANK"]), os.getpid())))
    main, rank, stack = pickle.loads(pipe.recv_bytes())
    main(rank, pipe, stack)
