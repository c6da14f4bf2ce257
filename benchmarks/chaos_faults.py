"""Faults that strike inside a rank, by count rather than by clock: in an exchange, an optimizer step, a rename.

A rank of a trial has :class:`Fault` among its callbacks, and what to do in the variable ``HALOCLINE_CHAOS``. It strikes
once in a trial, whatever the number of restarts: a file says that it has.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "HALOCLINE_CHAOS"


@dataclass(frozen=True)
class Strike:
    """A fault: on which rank, at which place, at the how manieth time it gets there, and what happens."""

    rank: int
    place: str  # exchange, optimizer, rename, step
    count: int
    what: str  # kill, stop, slow, memory, full
    mark: str  # file that exists once it has struck

    def variables(self) -> dict[str, str]:
        """The environment of a rank that gets it."""
        return {VARIABLE: json.dumps(asdict(self))}


class Fault:
    """The callback: arms the strike when training starts."""

    def __init__(self) -> None:
        told = os.environ.get(VARIABLE)
        self._strike = Strike(**json.loads(told)) if told else None
        self._seen = 0

    def on_start(self, trainer: Any) -> None:
        """Count the calls of the place where it strikes."""
        strike = self._strike
        if strike is None or strike.rank != trainer.mesh.rank or Path(strike.mark).exists():
            return
        if strike.place == "exchange":
            world = trainer.mesh.world
            world.post = self._counted(world.post)
            world.post_sum = self._counted(world.post_sum)
        elif strike.place == "optimizer":
            trainer.optimizer.register_step_pre_hook(lambda *_: self._count())
        elif strike.place == "rename":
            Path.rename = self._counted(Path.rename)  # type: ignore[method-assign]  # in this process alone

    def on_step(self, trainer: Any, step: int, loss: float) -> None:
        """A step has ended."""
        if self._strike is not None and self._strike.place == "step" and self._strike.rank == trainer.mesh.rank:
            self._count()

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **more: Any) -> Any:
            self._count()
            return call(*arguments, **more)

        return counting

    def _count(self) -> None:
        self._seen += 1
        strike = self._strike
        if strike is None or self._seen != strike.count or Path(strike.mark).exists():
            return
        Path(strike.mark).touch()
        if strike.what == "slow":
            time.sleep(2.0)
        elif strike.what in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if strike.what == "kill" else signal.SIGSTOP)
        elif strike.what == "memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
        elif strike.what == "full":  # no file may grow beyond this, as on a disk that is full
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
