"""A training under way in a trial of ``bench chaos``, and the faults that come from outside it."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halocline.errors import HaloclineError
from halocline.train.checkpoints import CHECKPOINTS, Folder
from halocline.train.heartbeat import COMM
from halocline.train.log import read_log
from halocline.train.template import ForkedRank, RankTemplate

from .chaos_links import Links
from .chaos_network import write_data

STEPS, EVERY = 10, 2  # steps of a run, and between its checkpoints
PAUSE = 1.3  # seconds at most of what ranks must wait out
SETTINGS = (
    f"steps={STEPS}", "batch=2",
    f"checkpoint_every={EVERY}", "keep=3", "gradients.deterministic=true",
    'callbacks=["benchmarks.chaos_faults:Fault"]',
)  # fmt: skip
_POLL = 0.02


class ChaosError(HaloclineError, RuntimeError):
    """The trials could not be made."""


@dataclass
class Run:
    """A training under way: a launcher with its ranks, or, with ``links``, ranks on nodes as torchrun starts them."""

    folder: Path
    ranks: int
    template: RankTemplate
    links: Links | None = None
    started: list[ForkedRank] = field(default_factory=list)
    struck: float = 0.0  # time of the fault, as the log's entries have it
    more: tuple[str, ...] = ()  # settings of this run
    deadline: float = 60.0  # seconds of the ranks' waits
    texts: list[str] = field(default_factory=list)  # what each attempt wrote to stderr, all ranks' together

    @property
    def out(self) -> Path:
        """The folder of the run itself."""
        return self.folder / "run"

    @property
    def checkpoints(self) -> Folder:
        """Its checkpoints."""
        return Folder(self.out / CHECKPOINTS)

    def start(self, **more: str) -> None:
        """Start the command, or start it again."""
        if not (self.folder / "x.npy").exists():
            self._data = write_data(self.folder)
            (self.folder / "run.toml").write_text("")
        settings = (*SETTINGS, *self._data, f"deadline={self.deadline}", *self.more)
        told = [word for each in settings for word in ("--set", each)]
        command = ["halocline", "train", str(self.folder / "run.toml"), "--out", str(self.out), "--json", *told]
        places = [{}] if self.links is None else self.links.variables(self.ranks)
        if self.links is None:
            command += ["--ranks", str(self.ranks), "--restarts", "2"]
        self.started = []
        for number, place in enumerate(places):
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **place, **more}
            with Path(os.devnull).open("r+b") as nothing, self._errors(number).open("wb") as errors:
                standard = (nothing.fileno(), nothing.fileno(), errors.fileno())
                made = self.template.start(command, environment, standard, ())
            if made is None:
                raise ChaosError("the process of which commands are forked has died")
            self.started.append(made)

    def _errors(self, number: int) -> Path:
        return self.folder / f"stderr-{number}"

    @property
    def launcher(self) -> int:
        """The process that was started first."""
        return self.started[0].pid

    def over(self) -> bool:
        """Have all processes that were started ended?"""
        return all(each.poll() is not None for each in self.started)

    def processes(self) -> list[int]:
        """All processes of this trial that are alive: those in the sessions of the ones that were started."""
        return [pid for pid, state in self._of_sessions() if state != "Z"]

    def _of_sessions(self) -> list[tuple[int, str]]:
        sessions, found = {each.pid for each in self.started}, []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit():
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                    if int(fields[3]) in sessions or int(entry.name) in sessions:
                        found.append((int(entry.name), fields[0]))
        return found

    def rank_processes(self) -> list[int]:
        """Those that are ranks, in the order of ranks."""
        found: dict[int, int] = {}
        for pid in self.processes():
            with suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                if name.startswith(COMM):
                    found[int(name.removeprefix(COMM))] = pid
        return [found[rank] for rank in sorted(found)]

    def steps(self) -> int:
        """Steps in the log."""
        return sum(1 for _ in read_log(self.out, "step")) if (self.out / "log.jsonl").exists() else 0

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for something to happen while the run goes on; False if it does not in time."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or self.over():
                return condition()
            time.sleep(_POLL)
        return True

    def wait(self, seconds: float) -> int | None:
        """The exit status, of ranks on nodes the first that is not 0; None if the run has not ended by then."""
        end = time.monotonic() + seconds
        while not self.over():
            if time.monotonic() > end:
                return None
            time.sleep(_POLL)
        self.texts.append("".join(self.words()))
        return next((each.returncode for each in self.started if each.returncode), 0)

    def words(self) -> list[str]:
        """What each process that was started wrote to stderr."""
        return [self._errors(number).read_text(errors="replace") for number in range(len(self.started))]

    def end(self) -> list[int]:
        """Kill whatever is left; returns the processes that should have been gone."""
        end = time.monotonic() + 3.0
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(_POLL)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for each in self.started:
            each.wait()
        for pid, _ in self._of_sessions():  # those of a launcher that was killed are handed to this process
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return left


def raw_log(out: Path) -> list[dict[str, Any]]:
    """All entries of a run's log, those of steps that were made again included."""
    entries = []
    for line in (out / "log.jsonl").read_bytes().splitlines():
        with suppress(ValueError):
            entries.append(json.loads(line))
    return entries


def listening_ports(pid: int | str = "self") -> list[tuple[str, int]]:
    """Address and port of every IPv4 socket on which a process listens, according to /proc."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:  # a socket that listens
            address, port = fields[1].split(":")
            found.append((socket.inet_ntoa(struct.pack("<I", int(address, 16))), int(port, 16)))
    return sorted(found)


# ---- faults from outside ----


def at_random(run: Run, rng: random.Random, limit: float) -> str:
    """Wait for a random moment: of the start, of a step, or of a save."""
    when = rng.choice(("start", "step", "step", "save"))
    if when == "start":
        run.until(lambda: len(run.rank_processes()) == run.ranks, limit)
        time.sleep(rng.uniform(0, 3))
    else:
        step = rng.randrange(1, STEPS - 1)
        run.until(lambda: run.steps() >= step, limit)
        if when == "save":
            run.until(lambda: any(run.checkpoints.root.glob(".*.part")), 1.0)
        time.sleep(rng.uniform(0, 0.05))
    return f"{when}, {run.steps()} steps made"


def _send(run: Run, pids: list[int], number: int) -> None:
    run.struck = time.time()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _to_launcher(number: int) -> Callable[[Run, random.Random], None]:
    def strike(run: Run, _: random.Random) -> None:
        _send(run, [run.launcher], number)

    return strike


def _kill_a_rank(run: Run, rng: random.Random) -> None:
    _send(run, [rng.choice(run.rank_processes() or [run.launcher])], signal.SIGKILL)


def _kill_all_ranks(run: Run, _: random.Random) -> None:
    _send(run, run.rank_processes(), signal.SIGKILL)


def _stop_a_rank(run: Run, rng: random.Random) -> None:
    _send(run, [rng.choice(run.rank_processes() or [run.launcher])], signal.SIGSTOP)


def _kill_and_damage(run: Run, rng: random.Random, remove: bool) -> None:
    """End everything, then change a bit of the newest checkpoint, or remove a file of it."""
    run.until(lambda: len(run.checkpoints.steps()) >= 2, 30.0)
    _send(run, run.processes(), signal.SIGKILL)
    run.started[0].wait()
    steps = run.checkpoints.steps()
    if not steps:
        return
    file = rng.choice(sorted(run.checkpoints.path(steps[-1]).iterdir()))
    if remove:
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def _pause(run: Run, rng: random.Random, everything: bool) -> None:
    """Stop a rank, or launcher and ranks as a machine that sleeps, for less than the deadline."""
    pids = run.processes() if everything else [rng.choice(run.rank_processes() or [run.launcher])]
    _send(run, pids, signal.SIGSTOP)
    time.sleep(rng.uniform(0.2, PAUSE))
    _send(run, pids, signal.SIGCONT)


def _kill_the_template(run: Run, _: random.Random) -> None:
    """Kill the process that ranks are forked of, then a rank: the restart has to do without."""
    ranks = run.rank_processes()
    _send(run, [pid for pid in run.processes() if pid not in (run.launcher, *ranks)], signal.SIGKILL)
    _send(run, ranks[-1:], signal.SIGKILL)


def _cut(run: Run, rng: random.Random, seconds: float | None) -> None:
    """Cut the link of a node, for good or for some seconds."""
    assert run.links is not None
    run.struck = time.time()
    run.links.cut(rng.randrange(run.ranks))
    if seconds is not None:
        time.sleep(seconds)
        run.links.mend()


def _strangers(run: Run, rng: random.Random) -> None:
    """Connect to every port on which ranks listen, and send garbage, huge lengths, or nothing."""
    held: list[socket.socket] = []
    for pid in run.rank_processes():
        for host, port in listening_ports(pid):
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, rng.randbytes(100)):
                with suppress(OSError):
                    held.append(socket.create_connection((host, port), timeout=1.0))
                    held[-1].sendall(data)
    run.struck = time.time()
    time.sleep(0.2)
    for each in held:
        each.close()


Outside = Callable[[Run, random.Random], None]
OUTSIDE: dict[str, Outside] = {
    "kill a rank": _kill_a_rank,
    "kill all ranks": _kill_all_ranks,
    "kill the launcher": _to_launcher(signal.SIGKILL),
    "stop a rank": _stop_a_rank,
    "flip a bit": lambda run, rng: _kill_and_damage(run, rng, remove=False),
    "remove a file": lambda run, rng: _kill_and_damage(run, rng, remove=True),
    "Ctrl-C": _to_launcher(signal.SIGINT),
    "SIGTERM": _to_launcher(signal.SIGTERM),
    "SIGUSR1": _to_launcher(signal.SIGUSR1),
    "strangers": _strangers,
    "pause a rank": lambda run, rng: _pause(run, rng, everything=False),
    "pause everything": lambda run, rng: _pause(run, rng, everything=True),
    "kill the template": _kill_the_template,
}
#: Faults of the links between nodes.
LINKS: dict[str, Outside] = {
    "cut link": lambda run, rng: _cut(run, rng, None),
    "link comes back": lambda run, rng: _cut(run, rng, rng.uniform(0.1, PAUSE)),
    "lose a node": _kill_a_rank,
}
