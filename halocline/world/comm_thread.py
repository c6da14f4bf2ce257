"""The only class of background thread that communicates, beside the rank's own thread.

Two threads must not use one world at once. A component that communicates in the background therefore duplicates the
world and gives the duplicate a :class:`CommThread` of its own; data and gradients never share one.
"""

from __future__ import annotations

import atexit
import heapq
import math
import threading
import weakref
from collections.abc import Callable
from typing import Protocol, TypeVar

IDLE = 10.0  # seconds without a job after which the thread ends; the next job starts another
_CHECK = 0.25  # seconds after which an idle thread checks whether it has been dismissed
_AT_EXIT = 2.0  # seconds that the end of the program waits for the thread

Job = Callable[[], object]
Owner = TypeVar("Owner")


class Poller(Protocol):
    """Communication under way that a thread drives between its jobs, such as a :class:`ChunkScheduler`."""

    @property
    def busy(self) -> bool:
        """Is anything under way?"""

    def advance(self) -> bool:
        """Wait until a part of it is done and continue that; False if ``wake`` ended the wait before."""


class CommThread:
    """Runs submitted jobs one after another: the smallest ``urgency`` first, equal ones in the order of submission.

    Jobs handle their own errors. While there is no job, the thread drives ``poller``; ``wake`` ends the poller's wait
    from another thread. The thread starts with the first job and ends after ``IDLE`` seconds without work.
    """

    def __init__(self, name: str, poller: Poller | None = None, wake: Callable[[], None] | None = None) -> None:
        self.name = name
        self._poller, self._wake = poller, wake
        self._changed = threading.Condition()
        self._jobs: list[tuple[float, int, Job]] = []  # a heap
        self._submitted = 0
        self._polling = False
        self._patience = IDLE
        self._thread: threading.Thread | None = None
        stop_at_exit(self, lambda thread: thread.stop(_AT_EXIT, drop=True))

    @property
    def alive(self) -> bool:
        """Is the thread running?"""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, job: Job, urgency: float = -math.inf) -> None:
        """Add a job, from any thread. By default it comes before all jobs that have an urgency."""
        with self._changed:
            self._submitted += 1
            heapq.heappush(self._jobs, (urgency, self._submitted, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name=self.name)
                self._thread.start()
                return
            self._changed.notify()
            asleep = self._polling and threading.current_thread() is not self._thread
        if asleep and self._wake is not None:
            self._wake()

    def dismiss(self) -> None:
        """Let the thread end when its work is done. Takes no lock, so that finalizers may call it in any thread."""
        self._patience = 0.0

    def stop(self, seconds: float, drop: bool = False) -> None:
        """End the thread, and wait at most so many seconds for it; ``drop`` the jobs that have not begun."""
        self._patience = 0.0
        with self._changed:
            if drop:
                self._jobs.clear()
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)

    # In the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Run jobs until there are none. After a job with an urgency, the poller catches up."""
        try:
            while (entry := self._next()) is not None:
                urgency, _, job = entry
                job()
                del entry, job  # it may hold gradients, whose memory others wait for
                if urgency > -math.inf:
                    self._catch_up()
        finally:
            with self._changed:
                if self._thread is threading.current_thread():  # a job raised: the next starts another thread
                    self._thread = None

    def _next(self) -> tuple[float, int, Job] | None:
        """The next job, once there is one; None if the thread is to end."""
        while True:
            with self._changed:
                if self._jobs:
                    return heapq.heappop(self._jobs)
                self._polling = self._poller is not None and self._poller.busy
                if not self._polling and not self._sleep():
                    return None
            if self._polling and self._poller is not None:
                self._poller.advance()
                self._polling = False

    def _catch_up(self) -> None:
        """Drive the poller as far as it goes without waiting: other ranks wait for it while jobs run here."""
        while self._wake is not None and self._poller is not None and self._poller.busy:
            self._wake()
            if not self._poller.advance():
                return

    def _sleep(self) -> bool:
        """Wait for a job; False if the thread is to end. With the lock held."""
        left = IDLE
        while left > 0 and self._patience > 0:
            if self._changed.wait(_CHECK):
                return True
            left -= _CHECK
        if not self._jobs:
            self._thread = None
        return bool(self._jobs)


def stop_at_exit(owner: Owner, stop: Callable[[Owner], object]) -> None:
    """Call ``stop(owner)`` when the program ends, if the owner is still alive: a thread inside torch would abort the
    exit.

    Holds only a weak reference. Owners registered last are stopped first.
    """
    reference = weakref.ref(owner)

    def call() -> None:
        alive = reference()
        if alive is not None:
            stop(alive)

    atexit.register(call)
    weakref.finalize(owner, atexit.unregister, call).atexit = False
