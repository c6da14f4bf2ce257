"""One trial of a sweep while it runs."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from ...background import in_background
from ..explain import explain
from ..launch import Ending
from .backends import StartRanks, TrialRanks


class RunningTrial:
    """The processes of one trial, started and watched by a thread; restarted if they are killed."""

    def __init__(
        self, start: StartRanks, command: Sequence[str], folder: Path, ranks: int, restarts: int, before: float
    ) -> None:
        """``before``: seconds of earlier attempts."""
        self.folder, self.ranks = folder, ranks
        self._start, self._command, self._restarts = start, [*command, str(folder)], restarts
        self._processes: TrialRanks | None = None
        self.ending: Ending | None = None
        self.failure = ""  # why it has failed
        self.pruned = False
        self._began = time.monotonic() - before
        self._watching = in_background(self._run, f"halocline trial {folder.name}")

    def _run(self) -> None:
        try:
            for _ in range(self._restarts + 1):
                self._processes = self._start(self._command, self.ranks, self.folder)
                self.ending = self._processes.wait()
                self.failure = "" if self.ending is None else self.ending.words
                if self.ending is None or self.ending.status >= 0 or self.pruned:  # only what was killed starts again
                    return
        except Exception as error:  # noqa: BLE001  a trial that cannot be started does not end the others
            self.failure = explain(error)

    @property
    def seconds(self) -> float:
        """Since it began, earlier attempts included."""
        return time.monotonic() - self._began

    @property
    def over(self) -> bool:
        """Has it ended?"""
        return self._watching.done()

    def prune(self) -> None:
        """Let it write a checkpoint and end."""
        self.pruned = True
        if self._processes is not None:
            self._processes.signal(signal.SIGTERM)
