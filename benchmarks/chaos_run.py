"""A training under way in a trial of ``bench chaos``, and the faults that come from outside it."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from halocline.train.checkpoints import CHECKPOINTS, Folder
from halocline.train.log import read_log

STEPS, EVERY = 10, 2  # steps of a run, and between its checkpoints
DEADLINE = 4.0  # seconds of the ranks' waits
SETTINGS = (
    "network.width=2", "data.arguments.size=16", "data.samples=4", "data.validation=0", f"steps={STEPS}",
    f"checkpoint_every={EVERY}", "keep=3", f"deadline={DEADLINE}", "gradients.deterministic=true",
    'callbacks=["benchmarks.chaos_faults:Fault"]',
)  # fmt: skip
TRIAL = "HALOCLINE_TRIAL"  # variable by which the processes of a trial are found
_POLL = 0.02


@dataclass
class Run:
    """A training under way, in a process group and with an environment of its own."""

    folder: Path
    ranks: int
    variables: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    struck: float = 0.0  # time of the fault, as the log's entries have it
    texts: list[str] = field(default_factory=list)  # what each attempt wrote to stderr

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
        told = [word for each in SETTINGS for word in ("--set", each)]
        base = [sys.executable, "-m", "halocline.cli", "train", "unet3d", "--out", str(self.out), "--json", *told]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", TRIAL: self.variables[TRIAL], **more}
        with (self.folder / "stderr").open("wb") as errors:
            self.process = subprocess.Popen(
                [*base, "--ranks", str(self.ranks), "--restarts", "2"], stdout=subprocess.DEVNULL, stderr=errors,
                env=environment, process_group=0, cwd=Path(__file__).parents[1],
            )  # fmt: skip

    def processes(self) -> list[int]:
        """All processes of this trial that are alive."""
        wanted, found = f"{TRIAL}={self.variables[TRIAL]}".encode(), []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                ours = entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0")
                if ours and (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found.append(int(entry.name))
        return found

    def rank_processes(self) -> list[int]:
        """Those that are ranks, in the order of ranks."""
        found: dict[int, int] = {}
        for pid in self.processes():
            with suppress(OSError, KeyError):
                told = dict(
                    each.split(b"=", 1)
                    for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    if b"=" in each
                )
                found[int(told[b"RANK"])] = pid
        return [found[rank] for rank in sorted(found)]

    def steps(self) -> int:
        """Steps in the log."""
        return sum(1 for _ in read_log(self.out, "step")) if (self.out / "log.jsonl").exists() else 0

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait for something to happen while the run goes on; False if it does not in time."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end or self.process is None or self.process.poll() is not None:
                return condition()
            time.sleep(_POLL)
        return True

    def wait(self, seconds: float) -> int | None:
        """The exit status; None if the run has not ended by then."""
        assert self.process is not None
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self.texts.append((self.folder / "stderr").read_text(errors="replace"))
        return status

    def end(self) -> list[int]:
        """Kill whatever is left; returns the processes that should have been gone."""
        end = time.monotonic() + 3.0
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(_POLL)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        return left


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
        assert run.process is not None
        _send(run, [run.process.pid], number)

    return strike


def _kill_a_rank(run: Run, rng: random.Random) -> None:
    _send(run, [rng.choice(run.rank_processes() or [run.process.pid])], signal.SIGKILL)  # type: ignore[union-attr]


def _kill_all_ranks(run: Run, _: random.Random) -> None:
    _send(run, run.rank_processes(), signal.SIGKILL)


def _stop_a_rank(run: Run, rng: random.Random) -> None:
    _send(run, [rng.choice(run.rank_processes() or [run.process.pid])], signal.SIGSTOP)  # type: ignore[union-attr]


def _kill_and_damage(run: Run, rng: random.Random, remove: bool) -> None:
    """End everything, then change a bit of the newest checkpoint, or remove a file of it."""
    run.until(lambda: len(run.checkpoints.steps()) >= 2, 30.0)
    _send(run, run.processes(), signal.SIGKILL)
    assert run.process is not None
    run.process.wait()
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
}
