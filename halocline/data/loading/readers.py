"""Who reads: threads of this process, or processes that write into shared memory.

HDF5 lets one thread of a process read at a time, so that several readers of HDF5 are processes; of all other formats,
threads.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from ...errors import DataError
from ..processes import Helpers
from ..stores.store import Array, Store
from .buffers import Memory
from .jobs import TileJob


class Readers(Protocol):
    """Who reads boxes: threads of this process, or processes that write into shared memory."""

    #: Do they write into memory of other processes?
    shared: bool

    def submit(self, job: TileJob, memory: Memory) -> Future[None]:
        """Run the job in the background; ``memory`` is where its tile lies."""

    def close(self) -> None:
        """End the threads or processes; reads that have not begun are dropped."""


class ThreadReaders:
    """For formats whose libraries let several threads read at once."""

    shared = False

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="halocline-reader")

    def submit(self, job: TileJob, memory: Memory) -> Future[None]:
        """In one of the threads."""
        return self._threads.submit(job.run)

    def close(self) -> None:
        """Waits for reads that are under way."""
        self._threads.shutdown(wait=True, cancel_futures=True)


Place = tuple[str, int, int]  # a file that only the kernel knows, its size, and the number of that memory


class ProcessReaders:
    """For HDF5 and NIfTI, whose libraries admit one thread at a time."""

    shared = True

    def __init__(self, count: int) -> None:
        self._helpers = Helpers(count)

    @property
    def pids(self) -> list[int]:
        """Process numbers, for tests that kill them."""
        return self._helpers.pids

    def submit(self, job: TileJob, memory: Memory) -> Future[None]:
        """In one of the processes, which maps the memory by its path in ``/proc``."""
        # The number tells memories apart whose descriptors were reused.
        place = f"/proc/{os.getpid()}/fd/{memory.descriptor}", memory.bytes.nbytes, memory.number
        return self._helpers.threads.submit(self._fill, memory, place, job)

    def _fill(self, memory: Memory, place: Place, job: TileJob) -> None:
        """The memory is held meanwhile: the number of a descriptor that was closed may soon be another file's."""
        self._helpers.call(fill, place, id(job.store), job.sent(memory))

    def close(self) -> None:
        """Ends the processes."""
        self._helpers.close()


_memories: dict[Place, Array] = {}
_stores: dict[int, Store] = {}


def fill(place: Place, store: int, job: TileJob) -> None:
    """In a reader process: do the job on the memory of the process that asks. Files stay open from job to job."""
    torch.set_num_threads(1)
    if place not in _memories:
        path, size, _ = place
        with open(path, "r+b") as file:  # noqa: PTH123
            _memories[place] = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    replace(job, store=_stores.setdefault(store, job.store)).received(_memories[place]).run()


def make_readers(count: int, stores: Sequence[Store], processes: bool | None) -> Readers:
    """Threads, or processes where a store locks its library; ``processes`` overrides that."""
    if count < 1:
        raise DataError(f"readers={count}: give 1 or more")
    if processes is None:
        processes = count > 1 and any(store.locks for store in stores)
    made: Any = ProcessReaders if processes else ThreadReaders
    return made(count)
