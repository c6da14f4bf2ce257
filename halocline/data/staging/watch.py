"""Work that may hang: a read from a shared file system can block for ever, and nothing can interrupt it.

Such work runs in a thread of its own, which is abandoned if it makes no progress.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Generic, TypeVar

from ...background import in_background
from .listing import Tick

T = TypeVar("T")


class Abandoned(Exception):
    """Raised inside work that was given up."""


class Watched(Generic[T]):
    """Work in a thread of its own, which ticks while it makes progress; ``patience`` seconds without one: it hangs."""

    def __init__(self, work: Callable[[Tick], T], patience: float) -> None:
        self.patience, self._last, self._abandoned = patience, time.monotonic(), False
        self._future = in_background(lambda: work(self.tick), "halocline staging")

    @property
    def error(self) -> BaseException | None:
        """The error with which it ended; None while it runs, and after success."""
        if self._abandoned:
            return TimeoutError(f"nothing moved for {self.patience:g} s")
        return self._future.exception() if self._future.done() else None

    def tick(self) -> None:
        """Called by the work whenever something has moved."""
        if self._abandoned:
            raise Abandoned
        self._last = time.monotonic()

    def wait(self, seconds: float) -> bool:
        """Is it done, or given up for stalled?"""
        done = bool(wait([self._future], seconds).done)
        # The thread cannot be stopped: it is left behind, and its next tick raises inside it.
        if not done and time.monotonic() - self._last > self.patience:
            self._abandoned = True
        return done or self._abandoned

    def result(self) -> T:
        """The result of the work, however long it takes while it ticks."""
        while not self.wait(min(1.0, self.patience)):
            pass
        if (error := self.error) is not None:
            raise error
        return self._future.result()
