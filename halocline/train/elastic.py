"""How many ranks a run has: fewer while some are lost, all again when they are back."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:  # which needs pydantic; launchers do without
    from .settings import Settings

TAKE_BACK = 300.0  # seconds after which ranks that were lost are tried again; doubled each time that fails
_LONGEST = 3600.0
_HERE = "here.json"


class RankCount:
    """The number of ranks to start now, between ``least`` and ``most``.

    ``slots`` is a file with the number of ranks that there is room for, which the cluster's own tools write; it is read
    again and again. Without it a rank counts as lost if a restart makes no progress, and is tried again after
    ``take_back`` seconds.
    """

    def __init__(self, most: int, least: int, slots: Path | None = None, take_back: float = TAKE_BACK) -> None:
        self.most, self.least = most, least
        self._slots, self._take_back = slots, take_back
        self._room = most
        self._lost, self._retry = 0, math.inf
        self._unfit: set[int] = set()

    def wanted(self) -> int:
        """The number of ranks to run now; 0 where there is room for fewer than ``least``."""
        if time.monotonic() >= self._retry:
            self._lost, self._retry = 0, math.inf
        room = min(self.most - self._lost, self._available())
        return next((count for count in range(room, self.least - 1, -1) if count not in self._unfit), 0)

    def _available(self) -> int:
        """The number in the file; the last one known while the file is being written."""
        if self._slots is not None:
            with suppress(OSError, ValueError):
                self._room = int(self._slots.read_text())
        return self._room

    def lose_one(self) -> bool:
        """A restart has made no progress: one rank less from now on. False if there would be fewer than ``least``."""
        if self.most - self._lost <= self.least:
            return False
        self._lost += 1
        self._retry = time.monotonic() + self._take_back
        self._take_back = min(_LONGEST, 2 * self._take_back)
        return True

    def exclude(self, count: int) -> bool:
        """The run cannot be cut for so many ranks. False if no other number is left."""
        if count == self.most:  # what the user asked for: the error is the user's to see
            return False
        self._unfit.add(count)
        return self.wanted() > 0


def check_ranks(settings: Settings, ranks: int) -> None:
    """Raise ConfigError if the mesh of the settings is for another number of ranks."""
    count = math.prod(settings.mesh.values()) * settings.model_parts
    if count == ranks if settings.mesh else ranks % settings.model_parts == 0:
        return
    told = [f"{letter} = {number}" for letter, number in settings.mesh.items()]
    told += [f"model_parts = {settings.model_parts}"] if settings.model_parts > 1 else []
    raise ConfigError(
        f"mesh: {', '.join(told)} are {count} ranks, and there are {ranks}; give sizes that multiply to that"
    )


def for_ranks(settings: Settings, ranks: int) -> Settings:
    """The settings for another number of ranks than they were written for: a mesh or a plan that does not fit is left
    to the default, or to a new plan where the machine is known."""
    if settings.mesh and math.prod(settings.mesh.values()) * settings.model_parts != ranks:
        settings = replace(settings, mesh={})
    if settings.plan not in (None, "auto") and _ranks_of(settings.plan) != ranks:
        known = settings.machine is not None or Path(_HERE).is_file()
        settings = replace(settings, plan="auto" if known else None)
    return settings


def _ranks_of(plan: str | None) -> int:
    """The ranks that a plan is for."""
    from ..plan.plan_file import read_plan

    return read_plan(plan or "").arrangement.ranks
