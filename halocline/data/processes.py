"""Helper processes on this machine that run functions for this process, and need nothing of the user's program.

They are started as new interpreters and do not import the user's main module, so that no script needs an ``if __name__
== "__main__"`` guard. Functions and arguments are pickled, and errors come back as errors.
"""

from __future__ import annotations

import os
import pickle
import queue
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from typing import IO, Any, TypeVar

from ..errors import DataError, HaloclineError

Item = TypeVar("Item")
Result = TypeVar("Result")

_HEADER = struct.Struct("<Q")
_LAST_WORD = 5.0  # seconds that a process may take to end by itself
_SERVE = "from halocline.data.processes import serve; serve()"


class Helper:
    """Our end of one process. Calls go in by its standard input, one at a time, and answers come by its output."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-c", _SERVE]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        # subprocess keeps a child that was not waited for, and its pipes, so that the child would wait for ever.
        self._forgotten = weakref.finalize(self, _end, self._process, 0.0)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The function's result in that process, or its error here."""
        try:
            request = pickle.dumps((function, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise DataError(f"this cannot be sent to another process ({error}); read in one process") from error
        try:
            _write(self._process.stdin, request)
            answer, failure = pickle.loads(_read(self._process.stdout))
        except (OSError, EOFError) as error:
            raise DataError(f"a reader process has died (exit status {self._status()}); look at its output") from error
        if failure is not None:
            raise failure
        return answer

    def _status(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_LAST_WORD)
        return None

    def close(self, *, kill: bool = False) -> None:
        """End the process: when it has done its call, or at once."""
        if kill:
            self._process.kill()
        self._forgotten.detach()
        _end(self._process, _LAST_WORD)


class Helpers:
    """Some processes, and for each a thread of ours that waits for its answers."""

    def __init__(self, count: int) -> None:
        self._all = [Helper() for _ in range(count)]
        self._free: queue.SimpleQueue[Helper] = queue.SimpleQueue()
        for helper in self._all:
            self._free.put(helper)
        self.threads = ThreadPoolExecutor(count, thread_name_prefix="halocline-helper")

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes."""
        return [helper.pid for helper in self._all]

    def call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """In whichever process is free; to be run in ``threads``, of which there are as many."""
        helper = self._free.get()
        try:
            return helper.call(function, *arguments)
        finally:
            self._free.put(helper)

    def close(self, *, kill: bool = False) -> None:
        """End all processes, then the threads that waited for them."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        for helper in self._all:
            helper.close(kill=kill)  # one that hangs does not keep this process waiting
        self.threads.shutdown(wait=True)


def in_processes(work: Callable[[Item], Result], items: Sequence[Item], jobs: int) -> Iterator[Result]:
    """``work(item)`` of every item, in any order; with one job in this process."""
    if jobs <= 1 or len(items) <= 1:
        yield from map(work, items)
        return
    helpers, done = Helpers(min(jobs, len(items))), False
    try:
        futures = [helpers.threads.submit(helpers.call, work, item) for item in items]
        for future in as_completed(futures):
            yield future.result()
        done = True
    finally:
        helpers.close(kill=not done)  # what is not wanted any more is not waited for


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Close the process's input, wait for it to end, and kill it after ``patience`` seconds."""
    with suppress(OSError):  # a dead process has closed its end
        process.stdin.close()  # type: ignore[union-attr]  # a pipe
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()  # type: ignore[union-attr]  # now that no thread waits for an answer


def _write(stream: IO[bytes] | None, data: bytes) -> None:
    stream.write(_HEADER.pack(len(data)) + data)  # type: ignore[union-attr]  # a pipe
    stream.flush()  # type: ignore[union-attr]


def _read(stream: IO[bytes] | None) -> bytes:
    """One length-prefixed message; EOFError where the other end is gone."""
    head = stream.read(_HEADER.size)  # type: ignore[union-attr]  # a pipe
    if len(head) < _HEADER.size:
        raise EOFError("the other end has closed")
    (size,) = _HEADER.unpack(head)
    data = stream.read(size)  # type: ignore[union-attr]
    if len(data) < size:
        raise EOFError("the other end has closed in the middle of a word")
    return data


def serve() -> None:
    """The main loop of a helper process. Its standard output carries answers; prints go to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    # A library that prints must not write into the stream of answers.
    os.dup2(2, 1)
    while True:
        try:
            request = _read(sys.stdin.buffer)
        except EOFError:
            return
        _write(answers, pickle.dumps(_outcome(request), protocol=pickle.HIGHEST_PROTOCOL))


def _outcome(request: bytes) -> tuple[Any, Exception | None]:
    """Run a request: its result, or the error to raise in the process that asked."""
    try:
        function, arguments = pickle.loads(request)
    except Exception as error:  # noqa: BLE001  told to the process that asked
        return None, DataError(f"another process cannot import this ({error}); read in one process")
    try:
        return function(*arguments), None
    except HaloclineError as error:
        return None, error
    except Exception as error:  # noqa: BLE001  told to the process that asked
        return None, DataError(f"{type(error).__name__}: {error}")
