"""Rank processes that stay alive from one call to the next, so that a rank test costs milliseconds.

    with RankPool(4) as pool:
        totals = pool.run(train_one_epoch, "config.json")  # one result per rank

The parent owns the store the ranks met at and one pipe per rank; a rank that dies takes neither with it.
No wait is without a deadline. After a failure it is unknown which messages are still under way between the
ranks, so the processes are killed, and the next call starts fresh ones. To expect an error cheaply, catch it
inside the function and return it.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import takewhile
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from halocline.errors import HaloclineError

from .place import START_DEADLINE, RankPlace

T = TypeVar("T")

GRACE = 1.0  # between the first failure and the killing: time for the other ranks to say what they saw
SHARED_POOLS = 2  # a rank holds some 200 MB
WORN = 100  # threads of a rank: gloo keeps three for each process group, and each wakes a hundred times a second


@dataclass(frozen=True)
class Outcome:
    """What one rank made of a call. `text` is the traceback, how the process ended, or where the rank was stuck.

    `kind` is value (it returned), error (it raised), died, or hung (no answer by the deadline).
    """

    rank: int
    kind: Literal["value", "error", "died", "hung"]
    value: Any = None
    error: Exception | None = None
    text: str = ""
    when: int = 0  # monotonic nanoseconds, comparable between the processes of one machine

    def __str__(self) -> str:
        what = {"value": "returned", "error": f"raised {type(self.error).__name__}: {self.error}"}
        return f"rank {self.rank} {what.get(self.kind, self.text)}"


class RankError(HaloclineError):
    """A call failed on some rank. `rank` is the one to look at first, `outcomes` what every rank did.

    The text has the traceback of that rank, and one line for each of the others.
    """

    def __init__(self, outcomes: list[Outcome]) -> None:
        super().__init__(outcomes)
        self.outcomes = outcomes
        self.rank = _culprit(outcomes).rank

    def __str__(self) -> str:
        culprit = _culprit(self.outcomes)
        trace = [culprit.text.rstrip()] if culprit.kind == "error" else []
        others = [str(outcome) for outcome in self.outcomes if outcome.rank != culprit.rank]
        return "\n".join([str(culprit), *trace, *others])


def _failed(outcomes: list[Outcome]) -> bool:
    """Did any rank do other than return a value?"""
    return any(outcome.kind != "value" for outcome in outcomes)


def _culprit(outcomes: list[Outcome]) -> Outcome:
    """The outcome to look at first."""
    # A death makes its neighbours raise, and a raise makes its neighbours wait: look for the cause in that order.
    severity = {"died": 0, "error": 1, "hung": 2, "value": 3}
    return min(outcomes, key=lambda outcome: (severity[outcome.kind], outcome.when))


class RankPool:
    """`size` ranks joined by gloo over loopback, one thread each. They start at once; the first call waits for them.

    One call at a time. `collective_timeout` is that of the ranks' default process group; a `place` other than the
    default has the ranks run elsewhere than on loopback.
    """

    def __init__(self, size: int, *, collective_timeout: float = 60.0, place: RankPlace | None = None) -> None:
        if size < 1:
            raise HaloclineError(f"RankPool({size}): a pool needs at least one rank")
        self.size, self.collective_timeout = size, collective_timeout
        self.place = place or RankPlace()
        self._ranks: _Ranks | None = _Ranks(size, collective_timeout, self.place)

    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        deadline: float = 60.0,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        **kwargs: Any,
    ) -> list[T]:
        """Every rank's `fn(*args, *per_rank[rank], **kwargs)`, or RankError. `fn` is found by its import name.

        Torch's random stream starts from the same seed at each call, so no test depends on the ones before it.
        """
        outcomes = self.outcomes(fn, *args, deadline=deadline, per_rank=per_rank, grace=GRACE, **kwargs)
        if _failed(outcomes):
            raise RankError(outcomes) from _culprit(outcomes).error
        return [cast(T, outcome.value) for outcome in outcomes]

    def outcomes(
        self,
        fn: Callable[..., Any],
        *args: Any,
        deadline: float = 60.0,
        grace: float | None = None,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        **kwargs: Any,
    ) -> list[Outcome]:
        """The outcome of the call on each rank, errors included; `grace` shortens the wait after the first failure."""
        own = per_rank if per_rank is not None else [()] * self.size
        if len(own) != self.size:
            raise HaloclineError(f"per_rank has {len(own)} entries for {self.size} ranks; give one tuple per rank")
        call = pickle.dumps((fn, args, kwargs))  # once, for args may be large
        jobs = [pickle.dumps((sys.path, call, mine)) for mine in own]
        return self._exchange(jobs, deadline, deadline if grace is None else grace)

    def close(self) -> None:
        """End the processes; a later call starts new ones."""
        if self._ranks is not None:
            self._ranks.kill()
        self._ranks = None

    def renew(self) -> None:
        """End processes in which process groups have piled up: their threads take the machine's time, idle or not."""
        if self._ranks is not None and self._ranks.threads() > WORN:
            self.close()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self, deadline: float) -> _Ranks:
        """Processes that are alive and have joined; started anew where some have died."""
        if self._ranks is not None and not self._ranks.all_alive():
            self.close()  # one died between two calls, or before it joined
        ranks = self._ranks = self._ranks or _Ranks(self.size, self.collective_timeout, self.place)
        if _failed(joined := ranks.join(max(START_DEADLINE, deadline))):
            raise RankError(joined) from _culprit(joined).error
        return ranks

    def _exchange(self, jobs: list[bytes], deadline: float, grace: float) -> list[Outcome]:
        """Send a job to each rank and gather what came of it. Any failure ends all processes."""
        outcomes: list[Outcome] = []
        try:
            ranks = self._started(deadline)
            with ranks.killed_after(deadline + GRACE):
                ranks.send(jobs)
                outcomes = ranks.gather(deadline, grace)
        finally:  # a Ctrl-C, too, leaves replies in the pipes that the next call would take for its own
            if not outcomes or _failed(outcomes):
                self.close()
        return outcomes


class _Ranks:
    """One generation of processes. It is used until something goes wrong, then killed; it is never repaired."""

    def __init__(self, size: int, timeout: float, place: RankPlace) -> None:
        self.place = place
        self.stacks = tempfile.TemporaryDirectory(prefix="halocline-ranks-")
        self.store = place.serve_store()
        start = partial(_rank_main, size=size, port=self.store.port, timeout=timeout, place=place)
        self.processes, self.pipes = place.start(start, [self._stack(rank) for rank in range(size)], self.store.port)
        # Runs once: when killed, when collected, or at exit, whichever is first.
        self.kill = weakref.finalize(self, _end, self.processes, self.pipes, self.stacks)
        self.joined: list[Outcome] = []

    def all_alive(self) -> bool:
        """Does every process still run?"""
        return all(process.is_alive() for process in self.processes)

    def threads(self) -> int:
        """The most that a rank has; 0 where the system does not tell."""
        folders = [Path(f"/proc/{process.pid}/task") for process in self.processes]
        return max(len(list(folder.iterdir())) if folder.is_dir() else 0 for folder in folders)

    def join(self, deadline: float) -> list[Outcome]:
        """What each rank made of joining the others; waits for the slowest import of torch."""
        self.joined = self.joined or self.gather(deadline, GRACE)
        return self.joined

    @contextmanager
    def killed_after(self, seconds: float) -> Iterator[None]:
        """Ends the one wait that has no deadline of its own: half a message in a pipe whose rank has stopped."""
        timer = threading.Timer(seconds, _kill, [self.processes])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def send(self, jobs: list[bytes]) -> None:
        """A job to each rank."""
        for pipe, job in zip(self.pipes, jobs, strict=True):
            with suppress(OSError):  # that rank is dead, which gather() finds and reports
                pipe.send_bytes(job)

    def gather(self, deadline: float, grace: float) -> list[Outcome]:
        """One outcome per rank, in rank order, at the latest after `deadline` or `grace` after the first failure."""
        outcomes: dict[int, Outcome] = {}
        started, until = time.monotonic(), time.monotonic() + deadline
        while len(outcomes) < len(self.pipes) and (left := until - time.monotonic()) > 0:
            for rank in self._ready(outcomes, left):
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].kind != "value":
                    until = min(until, time.monotonic() + grace)
        late = [rank for rank in range(len(self.pipes)) if rank not in outcomes]
        outcomes |= {outcome.rank: outcome for outcome in self._hung(late, time.monotonic() - started)}
        return [outcomes[rank] for rank in range(len(self.pipes))]

    def _ready(self, outcomes: dict[int, Outcome], timeout: float) -> set[int]:
        """Ranks that have answered or ended; waits for the first of them."""
        waiting: dict[Any, int] = {}
        for rank in range(len(self.pipes)):
            if rank not in outcomes:
                waiting[self.pipes[rank]] = waiting[self.processes[rank].sentinel] = rank
        return {waiting[one] for one in wait(list(waiting), timeout)}

    def _receive(self, rank: int) -> Outcome:
        """One rank's answer, or how its process ended."""
        try:
            if self.pipes[rank].poll():
                return _decoded(rank, self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            pass
        self.processes[rank].join(1.0)  # the pipe closes a moment before the exit status is known
        return Outcome(rank, "died", text=self.place.manner_of_death(self.processes[rank]), when=time.monotonic_ns())

    def _hung(self, late: list[int], waited: float) -> list[Outcome]:
        """Outcomes of the ranks that did not answer, each with its stack."""
        for process in (self.processes[rank] for rank in late):
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGUSR2)  # on which it writes its stack to its file
        if late:
            time.sleep(0.1)  # for the signal to be handled
        text = f"was still running after {waited:.1f} s{{}}"
        return [Outcome(rank, "hung", text=text.format(self._stack_text(rank))) for rank in late]

    def _stack(self, rank: int) -> str:
        return str(Path(self.stacks.name) / f"rank{rank}.txt")

    def _stack_text(self, rank: int) -> str:
        path = Path(self._stack(rank))
        lines = path.read_text().splitlines()[1:] if path.exists() else []  # the first says "most recent call first"
        stack = "\n".join(takewhile(lambda line: not line.endswith("in _call"), lines))
        return f", at\n{stack}" if stack else ""  # it has none before it has imported torch


def _end(processes: list[BaseProcess], pipes: list[Connection], stacks: tempfile.TemporaryDirectory[str]) -> None:
    """Kill the processes and free what the parent holds for them."""
    _kill(processes)
    for pipe in pipes:
        pipe.close()
    stacks.cleanup()


def _kill(processes: list[BaseProcess]) -> None:
    """Kill all processes first, then wait for each."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join(5.0)


def _decoded(rank: int, reply: bytes) -> Outcome:
    """A rank's answer; an error of its own where a result cannot be unpickled here."""
    try:
        return cast(Outcome, pickle.loads(reply))
    except Exception as error:  # noqa: BLE001 - whatever a result's own unpickling raises
        return _failure(rank, error)


# ---- in the rank processes ----


def _rank_main(
    rank: int, pipe: Connection, stack: str, *, size: int, port: int, timeout: float, place: RankPlace
) -> None:
    """A rank's whole life: join the others, then run jobs until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the parent decides
    threading.Thread(target=_die_with_parent, args=(Path(stack), place), daemon=True).start()
    with Path(stack).open("w") as stacks:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=False)
        pipe.send_bytes(_reply(rank, partial(_join, rank, size, port, timeout, place)))
        while job := _next_job(pipe):
            pipe.send_bytes(_reply(rank, partial(_call, job)))
    _die_with_parent(Path(stack), place)


def _die_with_parent(stack: Path, place: RankPlace) -> None:
    """In a thread too, for a rank that is stuck in a call would never read the end of its pipe."""
    place.wait_for_parent()
    stack.unlink(missing_ok=True)
    with suppress(OSError):  # the last rank finds the folder empty
        stack.parent.rmdir()
    os._exit(1)


def _next_job(pipe: Connection) -> bytes:
    """The next job; empty at the end of the pipe."""
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):
        return b""


def _join(rank: int, size: int, port: int, timeout: float, place: RankPlace) -> None:
    """Meet the other ranks at the parent's store and make the default process group."""
    torch.set_num_threads(1)
    place.enter(rank)
    store, limit = place.store(port), timedelta(seconds=timeout)
    store.set(f"rank {rank}", "here")  # ranks start seconds apart, which `timeout` should not have to allow for
    store.wait([f"rank {other}" for other in range(size)], timedelta(hours=1))  # the parent gives up before
    dist.init_process_group("gloo", rank=rank, world_size=size, store=store, timeout=limit)


def _call(job: bytes) -> Any:
    """Run one job, with torch's random stream at its beginning."""
    sys.path[:], call, own = pickle.loads(job)  # the path first: it may be what makes the function importable
    fn, args, kwargs = pickle.loads(call)
    torch.manual_seed(0)
    return fn(*args, *own, **kwargs)


def _reply(rank: int, call: Callable[[], Any]) -> bytes:
    """The outcome of a call, pickled."""
    try:
        return pickle.dumps(Outcome(rank, "value", call()))
    except Exception as error:  # noqa: BLE001 - every error of the function is the rank's answer
        return pickle.dumps(_failure(rank, error))


def _failure(rank: int, error: Exception) -> Outcome:
    """The outcome of a call that has raised."""
    when, text = time.monotonic_ns(), "".join(traceback.format_exception(error))
    return Outcome(rank, "error", error=_portable(error), text=text, when=when)


def _portable(error: Exception) -> Exception:
    """The error itself if it survives a pickle both ways (many with an __init__ of their own do not)."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an error's own pickling may raise anything
        return HaloclineError(f"{type(error).__name__}: {error}")
    return error


# ---- pools shared by a whole test session ----

_shared: OrderedDict[int, RankPool] = OrderedDict()


def shared_pool(size: int) -> RankPool:
    """The session's pool of `size` ranks. The least recently asked for loses its processes to a new size."""
    renew_shared_pools()
    pool = _shared.pop(size, None) or RankPool(size)
    _shared[size] = pool
    while len(_shared) > SHARED_POOLS:
        _shared.popitem(last=False)[1].close()
    return pool


def renew_shared_pools() -> None:
    """After a module of tests, so that idle ranks leave the machine to the next."""
    for pool in _shared.values():
        pool.renew()
