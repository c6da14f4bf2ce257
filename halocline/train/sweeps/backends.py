"""Where the processes of a trial run: on this machine, or on the machines of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from ..launch import Ending, LocalRanks
from .spec import SweepSpec


class TrialRanks(Protocol):
    """The processes of one trial."""

    def wait(self) -> Ending | None:
        """Until they have ended: None if all succeeded."""

    def signal(self, number: int) -> None:
        """Send a signal to each."""


StartRanks = Callable[[list[str], int, Path], TrialRanks]


class Backend(AbstractContextManager["Backend"]):
    """Starts the processes of trials on this machine, with output in the trial's folder."""

    def start(self, command: list[str], ranks: int, folder: Path) -> TrialRanks:
        """Start the ranks; returns at once."""
        with (folder / "output.log").open("ab") as log:
            return LocalRanks(command, ranks, folder, output=log.fileno(), errors=log.fileno())

    def __exit__(self, *_: object) -> None:
        pass


def make_backend(spec: SweepSpec) -> Backend:
    """The backend that a sweep asks for. Raises ConfigError where it is not installed."""
    if spec.backend == "ray":
        from .ray_cluster import RayBackend

        return RayBackend(spec.ranks)
    return Backend()
