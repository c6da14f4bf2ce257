"""The tie between a launcher and its ranks: ranks show that they live, and end when the launcher does.

Each rank writes a byte every half second into a pipe of its own, whose reading end the launcher holds. A rank that
neither writes nor uses the processor hangs; one that cannot write any more knows that the launcher is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = "HALOCLINE_LAUNCHER"  # what a launcher tells its ranks: its process, the pipe, and the folder's lock
_BEAT = 0.5  # seconds
_AWAKE = 5.0  # seconds: a launcher that looks less often was itself stopped, with its ranks perhaps
_STOPPED = ("T", "t")
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


# ---- the launcher's side ----


class Pulse:
    """How long one rank has shown no life, in seconds during which this process ran."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()  # the rank inherits the writer
        os.set_blocking(self._reader, False)
        self.silence = 0.0
        self._heard = False
        self._ticks = 0
        self._looked = time.monotonic()

    def started(self) -> None:
        """The rank has its end now: ours would hide that it closed."""
        os.close(self.writer)

    def look(self, process: int) -> None:
        """Read the heartbeats that have come from a process."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _AWAKE), now
        beats = self._beats()
        self._heard = self._heard or beats
        state, ticks = _state_of(process)
        # A rank that computes is alive: on a busy machine its thread may get no turn for long, as during an import.
        computes, self._ticks = ticks > self._ticks, max(ticks, self._ticks)
        # Until its first beat a rank imports: that it is slow says nothing, that it is stopped does.
        lives = beats or computes or not (self._heard or state in _STOPPED)
        self.silence = 0.0 if lives else self.silence + passed

    def _beats(self) -> bool:
        try:
            return bool(os.read(self._reader, 4096))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._reader)


def is_stopped(process: int) -> bool:
    """By SIGSTOP or a debugger, where /proc says so."""
    return _state_of(process)[0] in _STOPPED


def _state_of(process: int) -> tuple[str, int]:
    """The letter of its state and the processor time that it has used, in ticks; nothing and 0 without /proc."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[11]) + int(fields[12])
    except (OSError, IndexError):
        return "", 0


def told_to_rank(pulse: Pulse, lock: int | None) -> str:
    """The variable that tells a rank its pipe, and the lock on the run's folder."""
    return f"{os.getpid()} {pulse.writer} {-1 if lock is None else lock}"


# ---- a rank's side ----


@dataclass(frozen=True)
class Tie:
    """What a launcher gave this rank: the lock on the run's folder, held by both, if there is one."""

    lock: int | None = None


def follow_launcher() -> Tie:
    """In a rank, as early as can be: show life from now on, and end with the launcher."""
    told = os.environ.pop(LAUNCHER, None)  # processes that a rank starts are no ranks
    if told is None:
        return Tie()
    launcher, writer, lock = map(int, told.split())
    for descriptor in (writer, lock):
        if descriptor >= 0:
            os.set_inheritable(descriptor, False)
    _die_with(launcher)
    threading.Thread(target=_beat, args=(writer,), daemon=True, name="halocline heartbeat").start()
    return Tie(lock if lock >= 0 else None)


def _die_with(launcher: int) -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it died before that
        os.kill(os.getpid(), signal.SIGKILL)


def _beat(writer: int) -> None:
    os.set_blocking(writer, False)
    while True:
        try:
            os.write(writer, b".")
        except BlockingIOError:  # the launcher has not read for long: it is stopped
            pass
        except OSError:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_BEAT)
