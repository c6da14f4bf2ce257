"""A thread beside backward and forward: it fills messages, begins their sums, and takes in what comes back.

All of it takes time that the rank's own thread has better use for. Sums are carried by rings, which say when one is
done; whichever is done first is taken in first.
"""

from __future__ import annotations

import atexit
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from itertools import count

from ...errors import RankFailure
from ...world import World
from .sum_queue import Begin, QueuedSum

IDLE = 10.0  # seconds after which the thread ends; the next job starts another
_DISMISSED = 0.05  # the same where nobody has more to ask
_LOOK, _AT_EXIT = 0.005, 10.0  # seconds


class AfterSum:
    """Something that the thread does for these parameters, once a sum is there."""

    def __init__(self, do: Callable[[], None], indices: set[int], sum_of_it: QueuedSum) -> None:
        self._do, self.indices, self._sum = do, indices, sum_of_it
        self._error: BaseException | None = None
        self._done = threading.Event()

    def run(self) -> None:
        try:
            if self._sum.error is None:
                self._do()
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            self._error = error
        self._do = _nothing  # what it holds must be able to go
        self._done.set()

    def wait(self) -> None:
        """When the sum is there."""
        if not self._done.wait(self._sum.deadline + 5):
            raise RankFailure(f"a step of the optimizer did not end within {self._sum.deadline:g} s")
        if self._error is not None:
            raise self._error


def _nothing() -> None:
    pass


def _end_at_exit(thread: CommThread) -> None:
    """It does not keep it."""
    known = weakref.ref(thread)

    def end() -> None:
        left = known()
        if left is not None:
            left.end()

    atexit.register(end)
    weakref.finalize(thread, atexit.unregister, end).atexit = False


class CommThread:
    """Of one engine."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._under_way = 0
        _end_at_exit(self)
        self._jobs: queue.PriorityQueue[tuple[float, int, Callable[[], None]]] = queue.PriorityQueue()
        self._number = count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._patience = IDLE

    @property
    def idle(self) -> bool:
        """Is nothing under way, or still to begin?"""
        return not self._under_way and self._jobs.empty()

    def dismiss(self) -> None:
        """The engine is gone: end when all is done."""
        self._patience = _DISMISSED
        if self._thread is not None:
            self.ask(_nothing)

    def add(self, begin: Begin) -> QueuedSum:
        """A sum that is to begin after those added before."""
        added = QueuedSum(begin, self._world.deadline, in_line=False)
        self.ask(lambda: self._begin(added))
        return added

    def after(self, waiting: QueuedSum, urgency: float, do: Callable[[], None], indices: set[int]) -> AfterSum:
        """As soon as that sum is there; all sums come first, and then the urgent."""
        job = AfterSum(do, indices, waiting)
        self.ask(lambda: job.run() if waiting.over.is_set() else waiting.then.append(job.run), urgency)
        return job

    def ask(self, job: Callable[[], None], urgency: float = -math.inf) -> None:
        with self._lock:
            self._jobs.put((urgency, next(self._number), job))
            if self._thread is None:
                thread = threading.Thread(target=self._run, daemon=True, name="halocline thread")
                thread.start()
                self._thread = thread

    def end(self) -> None:
        """When all is done, or at the deadline: a thread that is in torch's code when the program ends aborts it, and
        the other ranks wait for our part of what has begun."""
        until = time.monotonic() + self._world.deadline
        while self._under_way and self._error is None and time.monotonic() < until:
            time.sleep(_LOOK)
        thread = self._thread
        if thread is not None:
            self._ended = True
            self.ask(_nothing, math.inf)
            thread.join(_AT_EXIT)

    # In the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not (self._ended and self._jobs.empty()):
            try:
                _, _, job = self._jobs.get(timeout=self._patience)
            except queue.Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._thread = None
                        return
                continue
            job()
            del job  # it holds its gradients, which must be able to go

    def _begin(self, added: QueuedSum) -> None:
        self._under_way += 1
        if self._error is None:
            try:
                added.pending = added.begin(lambda: self.ask(lambda: self._take_in(added)))
                return
            except BaseException as error:  # noqa: BLE001  raised where it is waited for
                self._error = error
        self._under_way -= 1
        added.end(self._error)

    def _take_in(self, added: QueuedSum) -> None:
        pending = added.pending
        if pending is None:  # it failed when it had begun
            return
        try:
            pending.wait()
        except BaseException as error:  # noqa: BLE001
            self._error = self._error or error
        self._under_way -= 1
        added.end(self._error)
        for job in added.then:
            job()
        added.then = []
