"""A process that has imported torch and the training loop, and of which ranks are forked.

Importing takes seconds of processor time, which every rank would spend, at every restart. The template runs nothing and
has one thread, so that a fork of it is what a new interpreter would be after its imports. A rank is forked twice: its
parent ends, and the system hands it to the launcher, which then watches it as any child of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from .heartbeat import SET_DEATH_SIGNAL, die_with_parent

_SET_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_MODULE = "halocline.cli.rank_template"
_START = 120.0  # seconds for the imports, on a machine however busy, and for a fork
_LONGEST = 1 << 20  # bytes of a request: an environment and a command line
_DESCRIPTORS = 16
_ADOPTION = 10.0  # seconds until the system has handed a rank to the launcher
_POLL = 0.02


class ForkedRank:
    """A rank that was forked of a template, with what the launcher uses of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = 1  # another caller has reaped the process
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, once it has ended. TimeoutExpired if that takes longer."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(_POLL)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class RankTemplate:
    """The launcher's side: starts the template and asks it for ranks. A context; ranks outlive it."""

    def __init__(self, serve: Callable[[socket.socket, int], object], module: str = _MODULE) -> None:
        """``serve`` imports what ranks need and calls :func:`serve_ranks`. It is called where this process is forked;
        else ``module`` is executed, which calls it."""
        ctypes.CDLL(None).prctl(_SET_SUBREAPER, 1, 0, 0, 0)
        self._module = module
        self._has_served = False  # has this template forked a rank?
        # This process has imported torch by now. Its fork has what a new interpreter would spend seconds on, unless
        # threads stand in the way; those of OpenBLAS are there where the number is not limited.
        may_fork = threads() == 1 and "OMP_NUM_THREADS" in os.environ
        self._open(serve if may_fork else None)

    def _open(self, serve: Callable[[socket.socket, int], object] | None) -> None:
        """Start the template: a fork of this process that calls ``serve``, or an interpreter of its own."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self._socket, theirs):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LONGEST)
        with theirs:
            self._process = self._executed(theirs, self._module) if serve is None else self._forked(theirs, serve)

    def _forked(self, theirs: socket.socket, serve: Callable[[socket.socket, int], object]) -> ForkedRank:
        launcher, pid = os.getpid(), os.fork()
        if pid:
            return ForkedRank(pid)
        try:
            ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._socket.close()
            if os.getppid() == launcher:
                serve(theirs, launcher)
        except OSError:  # the launcher has gone
            pass
        finally:
            os._exit(0)

    def _executed(self, theirs: socket.socket, module: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with deaf_to_interrupts():
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                preexec_fn=die_with_parent(),
            )  # fmt: skip

    @staticmethod
    def possible() -> bool:
        """Can ranks be forked here? Not where there may be GPUs, whose driver a process must open after its fork."""
        return sys.platform == "linux" and not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists()

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], standard: Sequence[int], kept: Sequence[int]
    ) -> ForkedRank | None:
        """Fork a rank with these three standard descriptors; ``kept`` keep their numbers. None if it cannot.

        A template that was killed after it had forked ranks is replaced, since each rank would import by itself.
        """
        told = {"arguments": list(arguments), "environment": dict(environment), "kept": list(kept)}
        request, descriptors = json.dumps(told).encode(), [*standard, *kept]
        answer = self._asked(request, descriptors)
        if not answer and self._has_served:
            self._has_served = False
            self.__exit__()
            self._open(None)  # a fork would share what this process has opened since
            answer = self._asked(request, descriptors)
        if not answer.isdigit():  # it died while it imported, and an own interpreter says why; or it has threads
            return None
        self._has_served = True
        return ForkedRank(int(answer))

    def _asked(self, request: bytes, descriptors: Sequence[int]) -> bytes:
        """The answer to a request; empty if the template has died."""
        try:
            self._socket.settimeout(_START)
            socket.send_fds(self._socket, [request], descriptors)
            return self._socket.recv(64)
        except OSError:
            return b""

    def __enter__(self) -> RankTemplate:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.kill()  # it holds nothing
        self._process.wait()


# ---- the template's side ----


def serve_ranks(channel: socket.socket, launcher: int, main: Callable[[], object]) -> None:
    """Fork ranks for the launcher until it has gone; each runs ``main`` with its arguments and environment."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, _LONGEST, _DESCRIPTORS)
        if not data:
            return
        if threads() > 1:  # a fork would hold locks that no thread releases
            channel.send(b"threads")
        elif (parent := os.fork()) == 0:
            if os.fork() == 0:
                _be_rank(channel, launcher, json.loads(data), descriptors, main)
            os._exit(0)
        else:
            os.waitpid(parent, 0)
        for each in descriptors:
            os.close(each)


def threads() -> int:
    """The threads of this process, those of libraries included."""
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def _be_rank(
    channel: socket.socket, launcher: int, request: dict[str, list[str]], descriptors: list[int],
    main: Callable[[], object],
) -> NoReturn:  # fmt: skip
    """In the fork: wait until the launcher is the parent, take over its descriptors and variables, and run."""
    end = time.monotonic() + _ADOPTION
    while os.getppid() != launcher:
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(0.001)
    # Now, since the system forgets it when the parent changes; a launcher that ended meanwhile is noticed by its pipe.
    ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    channel.send(str(os.getpid()).encode())
    wanted = [0, 1, 2, *map(int, request["kept"])]
    spare = max(*wanted, *descriptors, channel.fileno()) + 1
    held = [os.dup2(each, spare + index) for index, each in enumerate(descriptors)]
    os.closerange(3, spare)
    for number, each in zip(wanted, held, strict=True):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[arg-type]
    sys.argv = request["arguments"]
    random.seed()  # else all ranks would draw the template's numbers
    status = 0
    try:
        _limit_threads()
        main()
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    _leave(status)


def _limit_threads() -> None:
    """The variable is read when torch is imported, which the launcher may have done with another value."""
    import torch

    if (told := os.environ.get("OMP_NUM_THREADS", "")).isdigit() and int(told) > 0:
        torch.set_num_threads(int(told))


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C, which a terminal sends to all of them: the launcher decides."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(status: int) -> NoReturn:
    """End as an interpreter ends: with the exit handlers of modules."""
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(status)
