"""What only rank 0 may do, such as writing a file: all ranks wait for it and get its result, or its error."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..world import Label, World

_LABEL = Label("file", "a script")


class FirstRank:
    """Calls that rank 0 makes for all ranks.

    A call that does not come from all ranks together is made where it comes from: one of a thread, of a worker process,
    or of code that runs on this rank's share of a batch (:meth:`alone`).
    """

    def __init__(self, world: World) -> None:
        self._world, self._everyone = world, tuple(range(world.size))
        self._thread, self._process, self._alone = threading.get_ident(), os.getpid(), 0
        self.ended = False  # has the script ended? What is closed afterwards is closed by each rank

    @property
    def is_first(self) -> bool:
        """Is this rank 0?"""
        return self._world.rank == 0

    @property
    def together(self) -> bool:
        """Do all ranks run the code that asks?"""
        here = threading.get_ident(), os.getpid()
        return not (self._alone or self.ended) and here == (self._thread, self._process)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which each rank acts for itself."""
        self._alone += 1
        try:
            yield
        finally:
            self._alone -= 1

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self._world.sum(torch.zeros(1, dtype=torch.int64), self._everyone, _LABEL)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The result of ``function`` on rank 0, on every rank; its exception is raised on every rank.

        It begins when all ranks are here, so that none still reads what it changes.
        """
        self.wait()
        value, error = None, None
        if self.is_first:
            try:
                with self.alone():
                    value = function(*args, **kwargs)
            except Exception as raised:  # noqa: BLE001 - raised below, when all ranks know
                error = raised
        told_value, told_error = self.broadcast((None if error else value, error))
        if error is not None or told_error is not None:
            raise error or told_error
        return value if self.is_first else told_value

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        data = _pickled(value) if self.is_first else b""
        size = torch.tensor([len(data)], dtype=torch.int64)
        size = self._world.broadcast(size, self._everyone, _LABEL)
        line = torch.zeros(int(size), dtype=torch.uint8)
        if self.is_first:
            line = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return pickle.loads(self._world.broadcast(line, self._everyone, _LABEL).numpy().tobytes())


def _pickled(value: Any) -> bytes:
    """The value, or an error in words where an exception cannot be pickled."""
    try:
        data = pickle.dumps(value)
        pickle.loads(data)  # some exceptions can be pickled, and not be loaded again
    except Exception:  # noqa: BLE001 - whatever pickling raises
        _, error = value
        data = pickle.dumps((None, RuntimeError(f"on rank 0: {type(error).__name__}: {error}")))
    return data
