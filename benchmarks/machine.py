"""The machine that figures come from, and whether anybody else used it meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

#: Of all cores' time: what others may take before figures say more of them than of us.
BUSY = 0.1
STATISTICS = Path("/proc/stat")

Run = Callable[..., list[float]]  # a function on every rank


def process_seconds() -> float:
    """Processor time that this process has used, all its threads."""
    return time.process_time()


class Others:
    """What other programs take of the cores between its making and :meth:`share`. ``run`` calls on the ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before = self._now()

    def _now(self) -> tuple[float, float, float]:
        ours = sum(self._run(process_seconds)) + process_seconds()
        return time.monotonic(), machine_seconds(), ours

    def share(self) -> float | None:
        """Of all cores' time; None where the system does not say."""
        if not STATISTICS.exists():
            return None
        wall, machine, ours = (after - before for after, before in zip(self._now(), self._before, strict=True))
        return max(0.0, (machine - ours) / (wall * (os.cpu_count() or 1)))


def machine_seconds() -> float:
    """Processor time that all programs have used; interrupts are nobody's."""
    if not STATISTICS.exists():
        return 0.0
    user, nice, system, *_ = (int(field) for field in STATISTICS.read_text().splitlines()[0].split()[1:])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def describe(others: float | None) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "others_share": others,
        "disturbed": others is not None and others > BUSY,
    }
