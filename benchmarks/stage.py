"""``bench stage``: is every source file opened once, and none again after a kill? On an emulated cluster.

Opens are counted by an audit hook of the interpreter in each rank, and written down at once: what is counted does not
depend on what staging says of itself, and survives a kill.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halocline.data.staging import stage
from halocline.errors import HaloclineError, RankFailure
from halocline.world import this_world

from .cluster import Cluster, check_possible
from .machine import describe
from .topology import ClusterError, bits_per_second

DEADLINE = 120.0  # seconds for one call on the ranks
GRACE = 20.0  # for the others to notice that one was killed
NODE = "node{node}"

Say = Callable[[str], None]


@dataclass(frozen=True)
class StagePlan:
    """What is staged, and over what."""

    nodes: int = 4
    files: int = 64
    megabytes: float = 4.0  # of a file; sizes vary by up to a half
    rate: str = "1gbit"

    def check(self) -> None:
        if self.nodes < 2:
            raise ClusterError(f"{self.nodes} nodes have nobody to pass files to; give two or more")
        if self.files < 2 * self.nodes:
            raise HaloclineError(f"{self.files} files are too few to kill a node in the middle; give {2 * self.nodes}")


def measure_stage(plan: StagePlan, say: Say = lambda text: None, folder: Path | None = None) -> dict[str, Any]:
    """Stage undisturbed, then with a node killed in the middle and all started again."""
    plan.check()
    check_possible()
    with tempfile.TemporaryDirectory(prefix="halocline-stage-", dir=folder) as name:
        source = Path(name).resolve() / "source"
        say(f"writing {plan.files} files")
        make_source(source, plan)
        with Cluster(nodes=plan.nodes, rate=plan.rate, collective_timeout=DEADLINE) as cluster:
            whole = StagingTrial(cluster, plan, source, "whole")
            say("staging")
            undisturbed = whole.undisturbed()
            say("staging, with a node killed in the middle")
            killed = StagingTrial(cluster, plan, source, "killed").killed()
    return {**vars(plan), **undisturbed, **killed, "machine": describe(None)}


def make_source(root: Path, plan: StagePlan) -> None:
    chance = np.random.default_rng(0)
    for number in range(plan.files):
        path = root / f"group{number % 4}" / f"{number:04d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.bytes(int(plan.megabytes * 1e6 * chance.uniform(0.5, 1.5))))


class StagingTrial:
    """Staging to a folder of its own for each node."""

    def __init__(self, cluster: Cluster, plan: StagePlan, source: Path, name: str) -> None:
        self.cluster, self.plan, self.source = cluster, plan, source
        self.folder = source.parent / name
        self.names = names_under(source)
        self.bytes = sum((source / each).stat().st_size for each in self.names)

    def undisturbed(self) -> dict[str, Any]:
        self.cluster.run(this_rank, deadline=DEADLINE)  # when this is done, the ranks are there
        sent = self._sent()
        report = self._run("opens")
        opens = self._opens("opens")
        self._check_bytes()
        carried = self.bytes * (self.plan.nodes - 1) / self.plan.nodes  # by each link, at the least
        return {
            "source_bytes": self.bytes,
            "opens": len(opens),
            "opened_files": len(set(opens)),
            "seconds": report["seconds"],
            "gigabytes_per_second": report["gigabytes_per_second"],
            "link_seconds": carried * 8 / bits_per_second(self.plan.rate),
            "sent_bytes": self._sent() - sent,
        }

    def killed(self) -> dict[str, Any]:
        victim, after = self.plan.nodes - 1, max(1, self.plan.files // (2 * self.plan.nodes))
        assert self.cluster.pool is not None
        outcomes = self.cluster.pool.outcomes(
            stage_on_rank, *self._places("before"), victim, after, deadline=DEADLINE, grace=GRACE
        )
        if outcomes[victim].kind != "died":
            raise HaloclineError(f"node {victim} was to be killed in the middle of staging, but {outcomes[victim]}")
        finished = self._finished()
        report = self._run("after")
        before, opens = self._opens("before"), self._opens("after")
        self._check_bytes()
        return {
            "killed_node": victim,
            "survivors_told": sum(isinstance(outcome.error, RankFailure) for outcome in outcomes),
            "opens_before_kill": len(before),
            "finished_at_kill": len(finished),
            "opens_after_kill": len(opens),
            "duplicate_reads_of_finished": sum(name in finished for name in opens),
            "seconds_after_kill": report["seconds"],
            "identical": True,
        }

    def _run(self, log: str) -> dict[str, Any]:
        return self.cluster.run(stage_on_rank, *self._places(log), None, 0, deadline=DEADLINE)[0]

    def _places(self, log: str) -> tuple[Path, Path, Path]:
        (self.folder / log).mkdir(parents=True)
        return self.source, self.folder / NODE, self.folder / log

    def _opens(self, log: str) -> list[str]:
        return [line for file in (self.folder / log).iterdir() for line in file.read_text().splitlines()]

    def _sent(self) -> int:
        return sum(sum(cards) for cards in self.cluster.sent_bytes())

    def _destinations(self) -> list[Path]:
        return [self.folder / NODE.format(node=node) for node in range(self.plan.nodes)]

    def _finished(self) -> set[str]:
        """Files that lie whole on some node."""
        return {name for root in self._destinations() for name in self.names if (root / name).exists()}

    def _check_bytes(self) -> None:
        for root in self._destinations():
            if names_under(root) != self.names:
                raise HaloclineError(f"{root.name} has other files than the source")
            for name in self.names:
                if (root / name).read_bytes() != (self.source / name).read_bytes():
                    raise HaloclineError(f"{root.name}: {name} is not what it is in the source")


def names_under(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.glob("group*/*"))


# ---- on the ranks ----

_watched: list[tuple[str, Path]] = []  # folder, and where its opens are written down; the last counts


def this_rank() -> int:
    return this_world().rank


def stage_on_rank(source: Path, destination: Path, log: Path, victim: int | None, after: int) -> dict[str, Any]:
    """Stage; the victim kills its process once ``after`` files lie whole on its node."""
    rank = this_rank()
    watch_opens(source, log / f"{rank}.txt")
    if rank == victim:
        own = Path(str(destination).format(node=rank))
        threading.Thread(target=die_when, args=(own, after), daemon=True).start()
    return stage(source, destination).as_dict()


def watch_opens(folder: Path, log: Path) -> None:
    log.touch()
    if not _watched:
        sys.addaudithook(_on_audit)  # for good: hooks cannot be taken back
    _watched[:] = [(f"{folder}{os.sep}", log)]


def _on_audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not isinstance(arguments[0], str):
        return
    for folder, log in _watched:
        if arguments[0].startswith(folder):
            with log.open("a") as lines:
                lines.write(arguments[0].removeprefix(folder) + "\n")


def die_when(own: Path, count: int) -> None:
    while len(names_under(own)) < count:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)
