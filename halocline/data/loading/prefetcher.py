"""A thread that prepares batches ahead of the step that needs them.

It owns the pipeline: only this thread calls it. The training thread asks for steps and receives batches, or the error
that ended the preparation.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections import deque
from contextlib import suppress

from ...errors import DataError
from .pipeline import Batch, Pipeline, Started

_AT_EXIT = 3.0  # seconds, twice at most


class Prefetcher:
    """Works on the steps from ``first`` on, and is never more than ``ahead`` of those that were asked for.

    How far it goes depends on that alone. The prefetchers of all ranks, which exchange data, therefore stop at the same
    step, however fast each of them is.
    """

    def __init__(self, pipeline: Pipeline, first: int, ahead: int, last: int | None = None) -> None:
        self._pipeline, self._ahead, self._last = pipeline, ahead, last
        self._next, self._limit = first, first
        self._moved = threading.Condition()
        self._ended = False
        self._ready: queue.SimpleQueue[tuple[int, Batch | BaseException | None]] = queue.SimpleQueue()
        self._begun: deque[Started] = deque()
        self._thread = threading.Thread(target=self._run, name="halocline-prefetcher", daemon=True)
        self.waited = 0.0
        self.over = False  # has it told of an error, its last word?
        self._exiting = False
        self.allow(first)
        atexit.register(self._at_exit)
        self._thread.start()

    def allow(self, tick: int) -> None:
        """The step ``tick`` is wanted: prepare those up to ``ahead`` after it."""
        with self._moved:
            limit = tick + self._ahead + 1
            self._limit = limit if self._last is None else min(limit, self._last)
            self._moved.notify()

    def get(self, tick: int) -> Batch | None:
        """The batch of a step, or what went wrong with it; None where all its samples are bad."""
        self.allow(tick)
        began = time.perf_counter()
        number, batch = self._ready.get()
        self.waited = time.perf_counter() - began
        if isinstance(batch, BaseException):
            self.over = True
            try:
                raise batch
            finally:
                del batch  # an error that holds its own frame holds all that is in it
        if number != tick:
            raise DataError(f"the batch of step {tick} was lost in an interruption; start a new iteration")
        return batch

    def end(self) -> None:
        """Ask the thread to end. Safe in finalizers: takes no lock; the thread notices within a second."""
        self._ended = True

    def stop(self, deadline: float) -> None:
        """Stop at the same step as the other ranks' prefetchers, and drop what was prepared."""
        with self._moved:
            self._ended = True
            self._moved.notify()
        self._thread.join(deadline)
        if self._thread.is_alive():
            raise DataError(f"batches are still being prepared after {deadline:g} s; does a read or a rank hang?")
        while not self._ready.empty():
            self._ready.get()

    def _at_exit(self) -> None:
        """The program ends with the loader still open: a thread inside torch's code would then abort the process."""
        self._exiting = True
        with suppress(DataError):
            self.stop(_AT_EXIT)
        if self._thread.is_alive():
            self._pipeline.leave()
            self._thread.join(_AT_EXIT)

    def _run(self) -> None:
        """The thread's main function."""
        try:
            self._feed()
        finally:
            if not self._exiting:
                atexit.unregister(self._at_exit)

    def _feed(self) -> None:
        """Start steps as far ahead as allowed, finish the oldest, and hand it out.

        An error is the last thing handed out.
        """
        try:
            while self._wait():
                # All steps that may be begun are begun, so that their reads overlap.
                while self._next < self._limit:
                    self._begun.append(self._pipeline.start(self._next))
                    self._next += 1
                started = self._begun.popleft()
                self._ready.put((started.tick, self._pipeline.finish(started)))
        except BaseException as error:  # noqa: BLE001  raised where the batch is asked for
            if not isinstance(error, DataError):  # which all ranks raise
                self._pipeline.leave()
            for started in self._begun:
                self._pipeline.abandon(started)
            self._begun.clear()
            self._ready.put((-1, error))

    def _wait(self) -> bool:
        """Until there is something to prepare; False when there will be nothing more."""
        with self._moved:
            while not self._begun and self._next >= self._limit:
                if self._ended:
                    return False
                self._moved.wait(1.0)
        return True
