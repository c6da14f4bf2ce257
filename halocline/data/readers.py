"""Who reads: threads of this process, or processes that write into shared memory.

HDF5 lets one thread of a process read at a time. Several readers of it are therefore processes; of all else, threads.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, Protocol

from ..errors import DataError
from .buffers import Memory
from .jobs import Job
from .store import Store

_HEADER = struct.Struct("<Q")
_LAST_WORD = 5.0  # seconds that a reader may take to end


class Readers(Protocol):
    #: Do they write into memory of other processes?
    shared: bool

    def submit(self, job: Job, memory: Memory) -> Future[None]: ...

    def close(self) -> None: ...


class ThreadReaders:
    shared = False

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="halocline-reader")

    def submit(self, job: Job, memory: Memory) -> Future[None]:
        return self._pool.submit(job.run)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class ProcessReaders:
    """Each process is fed by a thread of ours, which waits for it."""

    shared = True

    def __init__(self, count: int) -> None:
        self._processes = [_Reader() for _ in range(count)]
        self._free = list(self._processes)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="halocline-reader")

    def submit(self, job: Job, memory: Memory) -> Future[None]:
        return self._pool.submit(self._run, job, memory)

    def _run(self, job: Job, memory: Memory) -> None:
        with self._lock:
            reader = self._free.pop()
        try:
            reader.run(job, memory)
        finally:
            with self._lock:
                self._free.append(reader)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        for process in self._processes:
            process.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]


class _Reader:
    """Our end of one process: requests go in by its standard input, answers come by its output."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-m", "halocline.data.worker"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._known: dict[int, Store] = {}

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, job: Job, memory: Memory) -> None:
        number = id(job.store)
        news = None if number in self._known else job.store
        sent = job.sent(memory)
        sent.store = number  # type: ignore[assignment]  # it has the store, or gets it with this
        place = f"/proc/{os.getpid()}/fd/{memory.descriptor}", memory.bytes.nbytes, memory.number
        try:
            write_message(self._process.stdin, (number, news, place, sent))
            self._known[number] = job.store
            answer = read_message(self._process.stdout)
        except (OSError, EOFError) as error:
            raise DataError(
                f"a reader process has died (exit status {self._process.poll()}); look at its output above, or read "
                "with threads: readers=1"
            ) from error
        if answer is not None:
            raise answer

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):  # a process that died has nobody to take the last words
                    stream.close()
        try:
            self._process.wait(_LAST_WORD)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def write_message(stream: IO[bytes] | None, content: Any) -> None:
    assert stream is not None
    data = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_HEADER.pack(len(data)) + data)
    stream.flush()


def read_message(stream: IO[bytes] | None) -> Any:
    assert stream is not None
    head = stream.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise EOFError("the other end has closed")
    data = stream.read(_HEADER.unpack(head)[0])
    return pickle.loads(data)


def make_readers(count: int, stores: list[Store], processes: bool | None) -> Readers:
    if count < 1:
        raise DataError(f"readers={count}: one at least reads")
    if processes is None:
        processes = count > 1 and any(store.locks for store in stores)
    return ProcessReaders(count) if processes else ThreadReaders(count)
