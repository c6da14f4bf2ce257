"""Signals that end a command: forwarded to the ranks that it started, or turned into an exit that cleans up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from ..train.launch import Ending, LocalRanks
from ..train.signals import SIGNALS, StopRequest


class Stop:
    """Forwards requests to stop to the ranks: the first asks them to end in an orderly way, the next kills them."""

    def __init__(self) -> None:
        self.asked, self._request, self._running = 0, StopRequest(), list[LocalRanks]()
        self.recalled = False  # whether the ranks of the last call of follow were asked to end, by its ``until``

    @property
    def preempted(self) -> bool:
        """Was the run asked to stop by a signal other than Ctrl-C, so that it should go on later?"""
        return self._request.preempted

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: object) -> None:
        """The signal handler."""
        if self._request.note(number):
            self.asked = 2
        elif not self.asked:
            self.asked = 1
        else:  # the same request, sent twice
            return
        self._forward()

    def _forward(self) -> None:
        """Send the ranks SIGTERM, or after a second signal SIGKILL."""
        for each in self._running:
            # SIGTERM lets ranks write a checkpoint; a second signal means that this takes too long.
            each.signal(signal.SIGTERM if self.asked == 1 else signal.SIGKILL)

    def follow(self, start: Callable[[], LocalRanks], until: Callable[[], bool] | None = None) -> Ending | None:
        """Start ranks and wait for their end. A signal that came while they started is forwarded then.

        When ``until`` becomes true, they are asked to end their step, save and leave.
        """
        self._running, self.recalled = [running := start()], False
        try:
            if self.asked:  # while the ranks were starting
                self._forward()
            return running.wait() if until is None else running.wait(partial(self._recall, running, until))
        finally:
            self._running = []

    def _recall(self, running: LocalRanks, until: Callable[[], bool]) -> None:
        """Ask the ranks to end if it is time, once."""
        if not self.recalled and not self.asked and until():
            self.recalled = True
            running.signal(signal.SIGTERM)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """A context in which SIGTERM raises SystemExit, so that ``finally`` clauses run and remove files."""
    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in the main thread only
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: object) -> None:
    raise SystemExit(128 + number)  # as a shell reports a signal
