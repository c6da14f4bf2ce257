"""Heartbeats between a launcher and its ranks: ranks show that they are alive, and end when the launcher does.

Each rank writes a byte every half second into a pipe of its own, whose reading end the launcher holds. A rank that
neither writes nor uses the processor hangs. A rank that cannot write any more knows that the launcher is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

LAUNCHER = "HALOCLINE_LAUNCHER"  # variable by which a launcher passes its process id, the pipe and the folder's lock
COMM = "halocline:"  # beginning of the name that the system has for a rank's process; the rank follows
_BEAT = 0.5  # seconds between heartbeats
_AWAKE = 5.0  # seconds counted per look at most: a launcher that looks less often was itself stopped
_STOPPED = ("T", "t")  # states in /proc
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


# ---- the launcher's side ----


class Pulse:
    """The launcher's end of one rank's pipe. ``silence``: seconds without a sign of life while this process ran.

    Time in which the launcher itself was stopped does not count: its ranks were then probably stopped, too.
    """

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()  # the rank inherits the writer
        os.set_blocking(self._reader, False)
        self.silence = 0.0
        self._heard = False
        self._ticks = 0
        self._looked = time.monotonic()

    def started(self) -> None:
        """The rank has been started: close our copy of its end, which would hide that the rank closed it."""
        os.close(self.writer)

    def look(self, process: int) -> None:
        """Read the heartbeats of a process, and update ``silence``. Waits for nothing."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _AWAKE), now
        beats = self._beats()
        self._heard = self._heard or beats
        state, ticks = _state_of(process)
        # A rank that computes is alive: on a busy machine, or during an import, its thread may get no turn for long.
        computes, self._ticks = ticks > self._ticks, max(ticks, self._ticks)
        # Before its first heartbeat a rank imports modules, however slowly; it is silent only if it is stopped.
        lives = beats or computes or not (self._heard or state in _STOPPED)
        self.silence = 0.0 if lives else self.silence + passed

    def _beats(self) -> bool:
        """Have heartbeats come since the last call?"""
        try:
            return bool(os.read(self._reader, 4096))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._reader)


def is_stopped(process: int) -> bool:
    """Is a process stopped by SIGSTOP or a debugger, according to /proc?"""
    return _state_of(process)[0] in _STOPPED


def _state_of(process: int) -> tuple[str, int]:
    """The letter of a process's state and its processor time in ticks; "" and 0 without /proc."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, IndexError):
        return "", 0


def die_with_parent() -> Callable[[], object] | None:
    """A function for a new rank to call before it runs its program: the system kills it when the launcher ends.

    From then on, since importing torch takes seconds. None where the system has no such call.
    """
    if sys.platform != "linux":
        return None
    import ctypes

    return partial(ctypes.CDLL(None).prctl, SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def launcher_variable(pulse: Pulse, lock: int | None) -> str:
    """The value of the variable ``LAUNCHER`` for a rank."""
    return f"{os.getpid()} {pulse.writer} {-1 if lock is None else lock}"


# ---- a rank's side ----


@dataclass(frozen=True)
class LauncherLink:
    """What a rank got from its launcher: a descriptor of the lock on the run's folder, if there is one."""

    lock: int | None = None


def follow_launcher() -> LauncherLink:
    """In a rank, as early as possible: start the heartbeat, and end with the launcher from now on."""
    if "RANK" in os.environ:
        with suppress(OSError):  # so that `top` tells ranks from each other
            Path("/proc/self/comm").write_text(f"{COMM}{os.environ['RANK']}")
    told = os.environ.pop(LAUNCHER, None)  # removed, since processes that a rank starts are no ranks
    if told is None:
        return LauncherLink()
    launcher, writer, lock = map(int, told.split())
    for descriptor in (writer, lock):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    if os.getppid() != launcher:  # it ended before the system was told, by die_with_parent
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_beat, args=(writer,), daemon=True, name="halocline heartbeat").start()
    return LauncherLink(lock if lock >= 0 else None)


def _beat(writer: int) -> None:
    """The heartbeat's thread. Kills this process when the launcher has closed the pipe."""
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, b".")
        except BlockingIOError:  # the pipe is full: the launcher is stopped, not gone
            pass
        except OSError:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_BEAT)
