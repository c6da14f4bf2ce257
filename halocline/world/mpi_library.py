"""The MPI library under mpi4py: started with threads, driven while ranks compute, and ended together."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from ..errors import MeshError

_SPIN = 20e-6  # seconds of polling without a pause
_YIELD = 100e-6  # seconds of polling that yields the core: where ranks share cores, the awaited rank may need it
_PAUSES = 20e-6, 500e-6  # seconds of sleep between polls after that: the first and the longest
_MOVED = 10e-6  # seconds: a call that takes longer has moved data, and there may be more
_STDERR = 2
_UNUSED = 600.0  # seconds to wait for other ranks at the end, if no world was made

_yield = getattr(os, "sched_yield", lambda: time.sleep(0))


@cache
def library() -> Any:
    """``mpi4py.MPI``, with MPI initialised for calls from several threads. Raises MeshError if that is impossible."""
    try:
        import mpi4py

        started_here = "mpi4py.MPI" not in sys.modules
        if started_here:
            mpi4py.rc.thread_level = "multiple"
            mpi4py.rc.finalize = False  # MPI_Finalize would wait for ever for a rank that has failed
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library to load
        raise MeshError(
            f"ranks over MPI need mpi4py and an MPI library ({error}); pip install 'halocline[mpi]', and mpich where "
            "the machine has no MPI of its own, or start the ranks with torchrun"
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise MeshError(
            f"MPI was started with thread level {MPI.Query_thread()}, and level {MPI.THREAD_MULTIPLE} is needed: "
            "several threads talk at once; leave mpi4py.rc.thread_level at 'multiple', or take an MPI that has it"
        )
    if started_here:
        atexit.register(_end, MPI)
    return MPI


def started_library(deadline: float) -> Any:
    """:func:`library`, initialised now if need be. The process ends if not all ranks come by the deadline."""
    if library.cache_info().currsize:
        return library()
    with ending_process(deadline):
        return library()


@contextmanager
def ending_process(deadline: float) -> Iterator[None]:
    """A context for calls of MPI that wait for other ranks without a deadline, such as ``MPI_Init``.

    They cannot be interrupted: at the deadline the stack goes to stderr and the process ends with status 1.
    """
    faulthandler.dump_traceback_later(deadline, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def poll(done: Callable[[], bool], end: float, look: Callable[[], None] | None = None) -> bool:
    """Call ``done`` until it is true; False at ``end``. ``look`` is called between longer pauses, and may raise.

    It first spins, then yields the core, then sleeps longer and longer.
    """
    began, pause = time.monotonic(), _PAUSES[0]
    while not done():
        now = time.monotonic()
        if now >= end:
            return False
        if now - began < _SPIN:
            continue
        if now - began < _YIELD:
            _yield()
            continue
        if look is not None:
            look()
        time.sleep(min(pause, end - now))
        pause = min(1.5 * pause, _PAUSES[1])
    return True


class Progress:
    """A thread that calls MPI while messages are under way and no thread waits: MPI moves them only inside calls."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._source = comm, library().ANY_SOURCE
        self._lock, self._wanted = threading.Lock(), threading.Event()
        self._under_way, self._stopped = 0, False
        self._thread: threading.Thread | None = None

    def begun(self) -> None:
        """One more message needs the thread."""
        with self._lock:
            self._under_way += 1
            self._wanted.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="halocline MPI progress")
                self._thread.start()

    def ended(self) -> None:
        """One message fewer needs the thread."""
        with self._lock:
            self._under_way = max(0, self._under_way - 1)
            if not self._under_way:
                self._wanted.clear()

    def stop(self) -> None:
        """End the thread, and wait for it at most a second."""
        self._stopped = True
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        """The thread: call MPI often while messages move, less often while they do not."""
        pause = _PAUSES[0]
        while True:
            if not self._wanted.is_set():
                pause = _PAUSES[0]
                self._wanted.wait()
            if self._stopped:
                return
            began = time.perf_counter()
            self._comm.Iprobe(self._source, 0)  # any call moves everything that can be moved
            if time.perf_counter() - began < _MOVED:
                time.sleep(pause)
                pause = min(1.5 * pause, _PAUSES[1])
            else:
                pause = _PAUSES[0]


@cache
def progress() -> Progress:
    """The progress thread of this process."""
    return Progress(library().COMM_SELF.Dup())


# ---- the end ----


class Leaver(Protocol):
    """A world that takes part in the end of the program."""

    def farewell(self) -> None:
        """Tell the others."""

    def patience(self) -> float:
        """Seconds to wait for the others to end too."""


_leavers: weakref.WeakSet[Leaver] = weakref.WeakSet()


def at_the_end(leaver: Leaver) -> None:
    """Let ``leaver`` take part in the end of the program. Holds only a weak reference."""
    _leavers.add(leaver)


def not_at_the_end(leaver: Leaver) -> None:
    """``leaver`` has closed already."""
    _leavers.discard(leaver)


def _end(mpi: Any) -> None:
    """End MPI on all ranks together. mpiexec kills the other ranks if one ends without, so it waits for them.

    A rank that ends with an error does not wait: its status says so, and mpiexec ends the run.
    """
    progress().stop()
    for leaver in _leavers:
        leaver.farewell()
    if getattr(sys, "last_value", None) is not None or mpi.Is_finalized():
        return
    patience = min((leaver.patience() for leaver in _leavers), default=_UNUSED)
    barrier = mpi.COMM_WORLD.Ibarrier()
    if poll(barrier.Test, time.monotonic() + patience):
        mpi.Finalize()
        return
    sys.stderr.write(f"halocline: other ranks have not ended within {patience:g} s of this one; the run ends here\n")
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(1)  # with status 0 mpiexec would end the others and report success
