"""Sums that stand in line: a few are under way, and the next begins when one is done.

Whatever has begun is ahead of all that has not. So where one that is needed soon may come late, little should be begun
before it is its turn. A thread waits for those under way, while the rank computes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ...errors import RankFailure
from ...world import World
from .rings import Pending

Tell = Callable[[], None]
Begin = Callable[[Tell | None], Pending]  # who is told when it is done, if anybody
WIDTH = 2  # under way at once: the transport is busy with one while another starts
IDLE = 10.0  # seconds after which the thread ends; the next sum starts another


class QueuedSum:
    """A sum in line."""

    def __init__(self, begin: Begin, deadline: float, in_line: bool = True) -> None:
        self._in_line = in_line
        self.begin, self.deadline = begin, deadline
        self.pending: Pending | None = None
        self.error: BaseException | None = None
        self.over = threading.Event()
        self.done = 0.0  # when, by ``time.perf_counter``
        self.then: list[Tell] = []

    def wait(self) -> None:
        # Those before it in line each have the deadline too; the thread that waits for them says so first.
        while not self.over.wait(self.deadline + 5):
            if self.pending is not None or not self._in_line:
                raise RankFailure(f"a sum of gradients did not end within {self.deadline:g} s")
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None) -> None:
        self.error, self.done = error, time.perf_counter()
        self.pending = None  # it holds the memory, which the next pass wants
        self.over.set()


class SumQueue:
    """Of one engine. Its thread sleeps while nothing is under way, and ends when that lasts."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._changed = threading.Condition()
        self._waiting: deque[QueuedSum] = deque()
        self._under_way: deque[QueuedSum] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._patience = IDLE

    @property
    def idle(self) -> bool:
        """Is nothing under way, or still to begin?"""
        return not self._waiting and not self._under_way

    def dismiss(self) -> None:
        """The engine is gone: end when all is done."""
        with self._changed:
            self._patience = 0.0
            self._changed.notify_all()

    def add(self, begin: Begin) -> QueuedSum:
        """The next in line, which ``begin`` begins: here, or in the thread."""
        added = QueuedSum(begin, self._world.deadline)
        with self._changed:
            self._waiting.append(added)
            self._advance()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="halocline sums in line")
                self._thread.start()
            self._changed.notify_all()
        return added

    def _advance(self) -> None:
        """Under the lock, so that all begin in one order."""
        while self._waiting and len(self._under_way) < WIDTH:
            first = self._waiting.popleft()
            if self._error is None:
                try:
                    first.pending = first.begin(None)
                except BaseException as error:  # noqa: BLE001  raised where it is waited for
                    self._error = error
            self._under_way.append(first)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way or not self._patience, self._patience)
                if not self._under_way:
                    self._thread = None
                    return
                first = self._under_way[0]
            self._bring_to_its_end(first)
            with self._changed:
                self._under_way.popleft()
                self._advance()
            first.end(self._error)
            del first  # it holds its gradients, which must be able to go

    def _bring_to_its_end(self, first: QueuedSum) -> None:
        try:
            if self._error is None and first.pending is not None:
                first.pending.wait()
        except BaseException as error:  # noqa: BLE001
            self._error = error
