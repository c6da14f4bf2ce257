"""Trials on the machines of a Ray cluster: each is one task, whose ranks run on the machine that Ray chooses.

The sweep's folder must be seen by all machines under the same path. The ranks of one trial stay on one machine.
"""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import ConfigError, first_line
from ..launch import Ending, LocalRanks
from .backends import Backend, TrialRanks

_SIGNALS = "signals"  # in a trial's folder: numbers that its ranks are to get, one a line
_LOOK = 0.2  # seconds between looks at that file
_KILLED = -9


class RayBackend(Backend):
    """Joins the cluster of ``RAY_ADDRESS``, or starts Ray on this machine with as many CPUs as there are ranks."""

    def __init__(self, ranks: int) -> None:
        try:
            self._ray: Any = import_module("ray")
        except ModuleNotFoundError as error:
            raise ConfigError("backend = \"ray\": Ray is not installed: pip install 'halocline[ray]'") from error
        self._ranks, self._mine = ranks, False

    def __enter__(self) -> RayBackend:
        if not self._ray.is_initialized():
            self._mine = True
            if os.environ.get("RAY_ADDRESS"):
                self._ray.init(log_to_driver=False)
            else:
                os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
                os.environ.setdefault("RAY_worker_niceness", "0")  # else trials come after all other programs
                self._ray.init(
                    num_cpus=self._ranks, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1"
                )
        held = int(self._ray.cluster_resources().get("CPU", 0))
        if held < self._ranks:
            self.__exit__()
            raise ConfigError(f"ranks = {self._ranks}: the Ray cluster has {held} CPUs; give at most that")
        return self

    def __exit__(self, *_: object) -> None:
        if self._mine:
            self._ray.shutdown()
            self._mine = False

    def start(self, command: list[str], ranks: int, folder: Path) -> TrialRanks:
        """Hand the trial to Ray, which starts it where so many CPUs (and GPUs, if the cluster has any) are free."""
        folder = folder.resolve()
        (folder / _SIGNALS).unlink(missing_ok=True)
        gpus = ranks if self._ray.cluster_resources().get("GPU", 0) else 0
        # A rank has one thread unless the user says otherwise; Ray would give it one for each CPU of the task.
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        remote = self._ray.remote(train_on_worker).options(num_cpus=ranks, num_gpus=gpus, max_retries=0)
        words = command[1:-1] if command[0] == sys.executable else command[:-1]
        task = remote.remote([*words, str(folder)], ranks, str(folder), str(Path.cwd()), threads)
        return _RayRanks(self._ray, task, folder)


class _RayRanks:
    """A trial's task."""

    def __init__(self, ray: Any, task: Any, folder: Path) -> None:
        self._ray, self._task, self._folder = ray, task, folder

    def wait(self) -> Ending | None:
        """Until the task has ended; a machine that is lost counts as a kill, so that the trial starts again."""
        try:
            told = self._ray.get(self._task)
        except self._ray.exceptions.RayTaskError:
            raise
        except self._ray.exceptions.RayError as error:
            return Ending(0, _KILLED, f"its Ray worker was lost: {first_line(error)}")
        return None if told is None else Ending(*told)

    def signal(self, number: int) -> None:
        """Through a file, since the ranks may be on another machine."""
        with (self._folder / _SIGNALS).open("a") as file:
            file.write(f"{int(number)}\n")


def train_on_worker(
    words: list[str], ranks: int, place: str, directory: str, threads: str
) -> tuple[int, int, str] | None:
    """In a worker of Ray: run the ranks of one trial, and return how they ended."""
    os.environ["OMP_NUM_THREADS"] = threads
    os.chdir(directory)
    folder, over = Path(place), threading.Event()
    with (folder / "output.log").open("ab") as log:
        running = LocalRanks([sys.executable, *words], ranks, folder, output=log.fileno(), errors=log.fileno())
        threading.Thread(target=_forward_signals, args=(running, folder / _SIGNALS, over), daemon=True).start()
        try:
            ending = running.wait()
        finally:
            over.set()
    return None if ending is None else (ending.rank, ending.status, ending.words)


def _forward_signals(running: LocalRanks, path: Path, over: threading.Event) -> None:
    """Send the ranks the signals that the sweep writes down."""
    sent = 0
    while not over.wait(_LOOK):
        numbers = path.read_text().split() if path.exists() else []
        for number in numbers[sent:]:
            running.signal(int(number))
        sent = len(numbers)
