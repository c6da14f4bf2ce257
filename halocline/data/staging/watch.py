"""Work that may hang: a read of a shared file system can last for ever, and nothing can interrupt it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from .listing import Tick

T = TypeVar("T")


class Abandoned(Exception):
    """Raised inside work that nobody waits for any more."""


class Watched(Generic[T]):
    """Work in a thread of its own, which ticks as it goes on. One that does not for ``patience`` seconds has hung."""

    def __init__(self, work: Callable[[Tick], T], patience: float) -> None:
        self.patience, self.error = patience, None
        self._work, self._last, self._abandoned = work, time.monotonic(), False
        self._done = threading.Event()
        # A daemon: one that hangs in the kernel must not keep the process from ending.
        threading.Thread(target=self._run, daemon=True).start()

    error: BaseException | None
    _value: T

    def _run(self) -> None:
        try:
            self._value = self._work(self.tick)
        except BaseException as error:  # noqa: BLE001 - raised again where the result is asked for
            self.error = error
        self._done.set()

    def tick(self) -> None:
        if self._abandoned:
            raise Abandoned
        self._last = time.monotonic()

    def wait(self, seconds: float) -> bool:
        """Is it done, or given up for stalled?"""
        if not self._done.wait(seconds) and time.monotonic() - self._last > self.patience:
            self.abandon()
            self.error = TimeoutError(f"nothing moved for {self.patience:g} s")
        return self._done.is_set() or self._abandoned

    def abandon(self) -> None:
        self._abandoned = True

    def result(self) -> T:
        """What came of it, however long it takes while it ticks."""
        while not self.wait(min(1.0, self.patience)):
            pass
        if self.error is not None:
            raise self.error
        return self._value
