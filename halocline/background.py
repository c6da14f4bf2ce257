"""Work in a thread of its own, which never keeps the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Run ``work`` in a daemon thread; its result, or its error, is the future's.

    A thread that hangs in the kernel can be left behind, which a ``ThreadPoolExecutor`` does not allow.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return future
