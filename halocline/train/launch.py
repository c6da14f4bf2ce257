"""The ranks of a run: started by torchrun, Slurm or MPI, or as processes of this machine by :class:`LocalRanks`.

The launcher of local ranks does not use torch: it starts processes, reads their heartbeats, and finds out which of them
failed first. Restarts and signals are the business of the commands.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import HaloclineError
from ..world import DEFAULT_DEADLINE, LOOPBACK, SECRET, joined_world, new_secret, serve_store, this_rank_info
from .heartbeat import LAUNCHER, Pulse, die_with_parent, is_stopped, launcher_variable
from .template import ForkedRank, RankTemplate, deaf_to_interrupts

LOGS = "ranks"  # folder of the ranks' output in that of a run
REQUEST, RESULT = "request.json", "result.json"  # in a run's folder: what a command asks of ranks, and their answer
WRONG_SETTINGS = 2  # exit status of a rank whose settings are wrong
_STDERR = 2
_POLL = 0.1  # seconds between looks at the ranks
_LEAST_GRACE, _MOST_GRACE = 5.0, 20.0  # seconds in which ranks may end by themselves, once one has failed
_SHORT_GRACE = 2.0  # the same where a rank hangs: the cause is known
_SILENT = 5.0  # seconds without a heartbeat after which a rank is the culprit, once another has failed


class LaunchError(HaloclineError, RuntimeError):
    """Ranks could not be started, or ended with an error."""


def launched() -> bool:
    """Has torchrun, Slurm, mpiexec or our own launcher given this process a place among others?"""
    return this_rank_info() is not None


def this_rank() -> int:
    """The rank in the joined world; before ranks are joined, the one that the launcher gave."""
    place = joined_world() or this_rank_info()
    return 0 if place is None else place.rank


@dataclass
class Ending:
    """How an attempt failed: the rank where it began, its exit status, and its error text."""

    rank: int
    status: int
    words: str

    @property
    def is_final(self) -> bool:
        """Would another attempt fail too? A wrong setting stays wrong."""
        return self.status == WRONG_SETTINGS

    def __str__(self) -> str:
        return self.words if self.is_final else f"rank {self.rank}: {self.words}"  # wrong settings are no rank's own


class LocalRanks:
    """Starts ``command`` once for each rank on this machine, and watches the processes.

    Output of ranks other than 0 goes to files. This process serves the store at which the ranks meet, so that no rank
    depends on another for it, and reads their heartbeats: a rank without a sign of life for ``deadline`` seconds has
    failed. ``lock`` is a descriptor that all ranks inherit, ``output`` and ``errors`` those to which rank 0
    prints: standard output is for results. With a ``template`` ranks are forked of it, where it can.
    """

    def __init__(
        self,
        command: list[str],
        ranks: int,
        folder: Path,
        deadline: float | None = None,
        lock: int | None = None,
        output: int = _STDERR,
        errors: int = _STDERR,
        template: RankTemplate | None = None,
    ) -> None:
        self._output, self._errors, self._template = output, errors, template
        self._folder, self._deadline, self._lock = folder / LOGS, deadline or DEFAULT_DEADLINE, lock
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in self._folder.glob("rank-*.error"):
            old.unlink()
        self._store, port = serve_store("127.0.0.1")
        self._secret, self._die_with_parent = new_secret(), die_with_parent()
        self.processes: list[subprocess.Popen[bytes] | ForkedRank] = []
        self._pulses: list[Pulse] = []
        try:
            with deaf_to_interrupts():
                for rank in range(ranks):
                    self.processes.append(self._start(command, rank, ranks, str(port)))
        except BaseException:
            self.end()
            raise

    def _start(self, command: list[str], rank: int, ranks: int, port: str) -> subprocess.Popen[bytes] | ForkedRank:
        """Start one rank, with the variables that torchrun would set."""
        pulse = Pulse()
        self._pulses.append(pulse)
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        # torchrun sets the last one, too, to tell ranks that it serves the store.
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        tie = {LAUNCHER: launcher_variable(pulse, self._lock), SECRET: self._secret}
        environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LOOPBACK, **os.environ, **place, **meeting, **tie}
        kept = [pulse.writer, *([] if self._lock is None else [self._lock])]
        try:
            if rank == 0:
                return self._process(command, environment, kept, 0, self._output, self._errors)
            with (self._folder / f"rank-{rank}.log").open("ab") as log, Path(os.devnull).open("rb") as nothing:
                return self._process(command, environment, kept, nothing.fileno(), log.fileno(), log.fileno())
        finally:
            pulse.started()

    def _process(
        self, command: list[str], environment: dict[str, str], kept: list[int], *standard: int
    ) -> subprocess.Popen[bytes] | ForkedRank:
        """Start a process that inherits these descriptors, and that ends with this one."""
        if self._template is not None:
            arguments = command[command.index("-m") + 1 :]
            forked = self._template.start(arguments, environment, standard, kept)
            if forked is not None:
                return forked
            self._template = None
        stdin, stdout, stderr = standard
        return subprocess.Popen(
            command, env=environment, pass_fds=kept, preexec_fn=self._die_with_parent, stdin=stdin, stdout=stdout,
            stderr=stderr,
        )  # fmt: skip

    def wait(self, look: Callable[[], object] = lambda: None) -> Ending | None:
        """Wait for all ranks: None if all succeed. If one fails or hangs, end the others and return its ending.

        ``look`` is called again and again meanwhile.
        """
        try:
            while True:
                states = [process.poll() for process in self.processes]
                if any(state not in (None, 0) for state in states):
                    return self._give_up()
                if all(state == 0 for state in states):
                    return None
                self._look()
                if any(pulse.silence > self._deadline for pulse in self._pulses):
                    return self._give_up()
                look()
                time.sleep(_POLL)
        finally:
            self.end()

    def _look(self) -> None:
        """Read all heartbeats."""
        for process, pulse in zip(self.processes, self._pulses, strict=True):
            if process.poll() is None:
                pulse.look(process.pid)
            else:
                pulse.silence = 0.0

    def _give_up(self) -> Ending:
        """Find out which rank failed first. Others get some seconds to notice and to write what they saw.

        A rank that was killed, or hangs, explains the errors of all others; among errors, wrong settings come first.
        """
        failed = [rank for rank, process in enumerate(self.processes) if process.poll() not in (None, 0)]
        # A rank that was killed comes first: others may have noticed, and ended, before we looked.
        first = min(failed, key=lambda rank: (self._status(rank) >= 0, rank), default=None)
        hung = None if first is not None and self._status(first) < 0 else self._end_hung()
        if hung is not None:
            self._wait_for_others(_SHORT_GRACE)
            return hung
        self._wait_for_others(min(_MOST_GRACE, max(_LEAST_GRACE, self._deadline / 2)))
        assert first is not None, "a rank has failed, or hangs"
        told = sorted(self._folder.glob("rank-*.error"), key=self._said_first)
        status = self._status(first)
        if status < 0:
            return Ending(first, status, f"killed by {signal.Signals(-status).name}")
        if not told:
            return Ending(first, status, f"ended with status {status}{self._last_line(first)}")
        rank = _rank_of(told[0])
        return Ending(rank, self.processes[rank].returncode or 1, told[0].read_text().strip())

    def _status(self, rank: int) -> int:
        """The exit status of a rank that has ended."""
        return self.processes[rank].returncode or 0

    def _end_hung(self) -> Ending | None:
        """Kill ranks without a sign of life, so that the others notice at once. Returns the first one's ending."""
        self._look()
        silent = [
            rank
            for rank, (process, pulse) in enumerate(zip(self.processes, self._pulses, strict=True))
            if process.poll() is None and (pulse.silence > min(_SILENT, self._deadline) or is_stopped(process.pid))
        ]
        words = [self._silent(rank) for rank in silent]
        for rank in silent:
            self.processes[rank].kill()
        return Ending(silent[0], -signal.SIGKILL, words[0]) if silent else None

    def _silent(self, rank: int) -> str:
        """Why a rank counts as hanging."""
        if is_stopped(self.processes[rank].pid):
            return "it is stopped (SIGSTOP, or a debugger) and was killed: the other ranks waited for it"
        return f"no sign of life for {self._pulses[rank].silence:.0f} s; it hangs, and was killed"

    def _wait_for_others(self, seconds: float) -> None:
        """Give the ranks that still run some seconds to end by themselves."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and any(process.poll() is None for process in self.processes):
            time.sleep(_POLL)

    def _said_first(self, path: Path) -> tuple[bool, float]:
        """Sort key of error files: wrong settings first, since other errors follow from them; then by time."""
        return self.processes[_rank_of(path)].returncode != WRONG_SETTINGS, path.stat().st_mtime

    def _last_line(self, rank: int) -> str:
        """The last line of a rank's log, after a colon; empty for rank 0, which printed on the terminal."""
        path = self._folder / f"rank-{rank}.log"
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        return f": {lines[-1].strip()}" if lines else ""

    def signal(self, number: int) -> None:
        """Send a signal to every rank that still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def end(self) -> None:
        """Kill all ranks and wait for them."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        while self._pulses:
            self._pulses.pop().close()


def _rank_of(words: Path) -> int:
    return int(words.stem.removeprefix("rank-"))


def write_rank_error(folder: Path, rank: int, words: str) -> None:
    """Leave the error text of a failed rank for its launcher."""
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    (folder / LOGS / f"rank-{rank}.error").write_text(words)
