"""Signals that ask a run to stop: SIGTERM and SIGUSR1, as batch systems and clouds send before they take a machine, and
Ctrl-C.

The first lets the current step end, then the run saves and exits: with status ``PREEMPTED`` if it should be started
again. A second one ends it at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

PREEMPTED = 75  # exit status of a run that was asked to leave, and can go on later (EX_TEMPFAIL of sysexits.h)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_ONE_REQUEST = 1.0  # seconds in which further signals count as the first: launchers and batch systems both send one


class StopRequest:
    """Whether a run was asked to stop, and whether to come back later (``preempted``).

    As a context it handles the signals, in the main thread; those that are ignored stay ignored, since a launcher
    forwards them.
    """

    def __init__(self) -> None:
        self.asked = self.preempted = False
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self)
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def note(self, number: int) -> bool:
        """Record a signal; True if it is a second request, which does not wait for the end of the step."""
        now = time.monotonic()
        if not self.asked:
            self.asked, self.preempted, self._since = True, number != signal.SIGINT, now
            return False
        return number == signal.SIGINT or now - self._since > _ONE_REQUEST

    def __call__(self, number: int = signal.SIGTERM, _: FrameType | None = None) -> None:
        """The handler of a rank: a second request ends the process."""
        if not self.note(number):
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        os._exit(128 + number)  # as a shell reports a signal
