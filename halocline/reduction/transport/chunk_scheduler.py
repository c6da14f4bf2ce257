"""Sums under way: one thread drives the chunks of all of them, each through its own rounds, several at a time.

Whichever exchange is done first has its numbers added and its next round posted, while the others travel: links of
different levels work at once, and none is idle while something waits for it.
"""

from __future__ import annotations

import atexit
import heapq
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import RankFailure
from ...world import DryWorld, Label, PendingExchange, World
from .algorithms import Round

_SERIAL, _ROUND, _SIGNATURE = 14, 8, 9  # bits of a tag; the lowest say which network card, and alternate by chunk
_SERIALLY = 32_000  # elements: torch adds fewer than 32,768 in the thread that asks, and wakes no others
_LOOK = 1.0  # seconds after which an idle thread looks whether it is still wanted
_AT_EXIT = 2.0
_SPARE = 12  # pieces of memory that are kept


class Chunk(NamedTuple):
    """A run of elements with the rounds that it goes through. All ranks make the same ones, in the same order.

    What is carried from round to round ends in ``result``.
    """

    elements: Tensor
    rounds: Sequence[Round]
    result: Tensor | None = None


class ChunkedSum:
    """A sum under way; ``tell`` is called when it is done, or has failed, by the thread that sums."""

    def __init__(
        self, scheduler: ChunkScheduler, chunks: int, label: Label, tell: Callable[[], None] | None = None
    ) -> None:
        self._scheduler, self.left, self.label, self._tell = scheduler, chunks, label, tell
        self.error: BaseException | None = None
        self.done = threading.Event()
        if not chunks:
            self._end()

    def wait(self) -> None:
        while not self.done.wait(_LOOK):
            if not self._scheduler.alive:
                raise RankFailure(f"{self.label}: the thread that sums has ended; start the run again")
        if self.error is not None:
            raise self.error

    def one_less(self) -> None:
        self.left -= 1
        if not self.left:
            self._end()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._end()

    def _end(self) -> None:
        self.done.set()
        if self._tell is not None:
            self._tell()


class ChunkScheduler:
    """Of one engine, in a world of its own. ``depth`` chunks are under way at a time, the most urgent first.

    Ranks may hurry with different ones. So that each has one which all others carry too, the oldest is always under
    way: of all that are not done, it is the oldest on every rank that has begun it.
    """

    def __init__(self, world: World, depth: int) -> None:
        self._world, self.depth = world, depth
        self._dry = isinstance(world, DryWorld)
        self._changed = threading.Condition()
        self._queue: list[tuple[float, int, ChunkTransfer]] = []  # a heap: by urgency, then by age
        self._under_way: list[ChunkTransfer] = []
        self._serial = 0
        self._spare: dict[torch.dtype, list[Tensor]] = {}
        self._error: BaseException | None = None
        self._ended = False
        self._progress = 0.0  # when something last arrived
        self._thread: threading.Thread | None = None
        # Now, and not when the thread starts: who begins sums is made later, and ends earlier.
        atexit.register(self._at_exit)

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self, chunks: Sequence[Chunk], label: Label, tell: Callable[[], None] | None = None) -> ChunkedSum:
        """All ranks begin in one order."""
        signature = _signature(label, chunks)
        carried = ChunkedSum(self, len(chunks), label, tell)
        with self._changed:
            if self._error is not None:
                raise self._error
            first, self._serial = self._serial, self._serial + len(chunks)
            travels = [ChunkTransfer(self, chunk, carried, first + at, signature) for at, chunk in enumerate(chunks)]
            if not self._dry:
                for travel in travels:
                    heapq.heappush(self._queue, (label.urgency, travel.serial, travel))
                self._start()
                self._changed.notify()
        if self._dry:
            for travel in travels:
                travel.run_dry()
        else:
            self._world.interrupt()
        return carried

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="halocline rings")
            self._thread.start()

    def end(self) -> None:
        """Nobody begins anything any more. Safe in finalizers: it takes no lock, and the thread looks every second."""
        self._ended = True
        atexit.unregister(self._at_exit)

    def stop(self) -> None:
        """End, when what was begun is done."""
        self.end()
        with self._changed:
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._world.deadline + 5)

    def _at_exit(self) -> None:
        """A thread that is in torch's code when the program ends would abort it."""
        self._ended = True
        with self._changed:
            self._queue.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_AT_EXIT)

    # In the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._admit():
                self._advance()
        except BaseException as error:  # noqa: BLE001  raised where a sum is waited for
            if not isinstance(error, RankFailure):
                self._world.leave()  # which a failure of the world's own has done
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            queued = [travel for _, _, travel in self._queue]
            waiting = {id(travel.carried): travel.carried for travel in (*self._under_way, *queued)}
            self._under_way.clear()
            self._queue.clear()
        for carried in waiting.values():
            carried.fail(error)

    def _admit(self) -> bool:
        """Begin to carry what there is room for; False when there will be nothing more."""
        while True:
            with self._changed:
                while not self._queue and not self._under_way:
                    if self._ended:
                        return False
                    self._changed.wait(_LOOK)
                if not self._under_way:
                    self._progress = time.monotonic()
                new = self._next()
                self._under_way += new
            for travel in new:
                self._step(travel)
            if self._under_way:
                return True

    def _next(self) -> list[ChunkTransfer]:
        """Off the queue: what there is room for, and the oldest in any case."""
        room = min(self.depth - len(self._under_way), len(self._queue))
        new = [heapq.heappop(self._queue)[2] for _ in range(room)]
        oldest = min(self._queue, key=lambda entry: entry[1], default=None)
        if oldest is not None and all(oldest[1] < travel.serial for travel in (*self._under_way, *new)):
            self._queue.remove(oldest)
            heapq.heapify(self._queue)
            new.append(oldest[2])
        return new

    def _advance(self) -> None:
        exchanges = [travel.exchange for travel in self._under_way if travel.exchange is not None]
        number = self._world.first(exchanges, self._progress + self._world.deadline)
        if number is not None:
            self._progress = time.monotonic()
            self._step(self._under_way[number])

    def _step(self, travel: ChunkTransfer) -> None:
        travel.exchange = next(travel.course, None)
        if travel.exchange is None:
            self._under_way.remove(travel)
            travel.carried.one_less()

    # Memory -----------------------------------------------------------------------------------------------------------

    def borrow(self, elements: int, like: Tensor) -> Tensor:
        spare = self._spare.setdefault(like.dtype, [])
        for number, memory in enumerate(spare):
            if memory.numel() >= elements:
                return spare.pop(number)
        return torch.empty(elements, dtype=like.dtype, device=like.device)

    def give_back(self, memory: Tensor) -> None:
        spare = self._spare[memory.dtype]
        spare.append(memory)
        if len(spare) > _SPARE:
            spare.pop(0)

    def post(
        self, travel: ChunkTransfer, number: int, each: Round, into: Tensor, carried: Tensor | None = None
    ) -> PendingExchange:
        tag = travel.tag(number)
        out = travel.elements[each.sent.start : each.sent.stop] if carried is None else carried
        sends = [] if each.to is None else [(each.to, out, tag)]
        receives = [] if each.source is None else [(each.source, into, tag)]
        return self._world.begin_tagged(sends, receives, travel.carried.label)


class ChunkTransfer:
    """A chunk on its way. What was sent may be written over as soon as the exchange is done."""

    def __init__(
        self, scheduler: ChunkScheduler, chunk: Chunk, carried: ChunkedSum, serial: int, signature: int
    ) -> None:
        self._scheduler, self.elements, self._rounds = scheduler, chunk.elements, chunk.rounds
        self.carried, self.serial, self._signature = carried, serial, signature
        self.exchange: PendingExchange | None = None
        self.course = self._course() if chunk.result is None else self._carrying_course(chunk.result)

    def tag(self, number: int) -> int:
        return (self._signature << _ROUND | number & (1 << _ROUND) - 1) << _SERIAL | self.serial & (1 << _SERIAL) - 1

    def _course(self) -> Iterator[PendingExchange]:
        scheduler = self._scheduler
        for number, each in enumerate(self._rounds):
            if each.idle:
                continue
            own = self.elements[each.received.start : each.received.stop]
            if each.taking == "copy":
                exchange = scheduler.post(self, number, each, own)
                yield exchange
                exchange.wait()
                continue
            memory = scheduler.borrow(own.numel(), own)
            arrived = memory[: own.numel()]
            exchange = scheduler.post(self, number, each, arrived)
            yield exchange
            exchange.wait()
            add(own, arrived, to_it=each.taking == "add to it")
            scheduler.give_back(memory)

    def _carrying_course(self, result: Tensor) -> Iterator[PendingExchange]:
        scheduler, carried, memory = self._scheduler, None, None
        for number, each in enumerate(self._rounds):
            own = self.elements[each.received.start : each.received.stop]
            arriving = scheduler.borrow(own.numel(), own) if own.numel() else None
            into = own if arriving is None else arriving[: own.numel()]
            if not each.idle:
                exchange = scheduler.post(self, number, each, into, carried)
                yield exchange
                exchange.wait()
                add(into, own, to_it=False)
            if memory is not None:
                scheduler.give_back(memory)
            memory, carried = arriving, None if arriving is None else into
        if memory is not None and carried is not None:
            result.copy_(carried)
            scheduler.give_back(memory)

    def run_dry(self) -> None:
        for number, each in enumerate(self._rounds):
            if not each.idle:
                into = self.elements[each.received.start : each.received.stop]
                self._scheduler.post(self, number, each, into).wait()
        self.carried.one_less()


def add(own: Tensor, arrived: Tensor, to_it: bool) -> None:
    """In place. Of 16-bit floats torch adds in float32 and rounds the sum."""
    if own.device.type == "cpu" and own.numel() > _SERIALLY and torch.get_num_threads() > 1:
        for mine, theirs in zip(own.split(_SERIALLY), arrived.split(_SERIALLY), strict=True):
            add(mine, theirs, to_it)
    elif to_it:
        torch.add(arrived, own, out=own)
    else:
        own.add_(arrived)


def _signature(label: Label, chunks: Sequence[Chunk]) -> int:
    """Ranks that sum different things ask for tags that nobody sends."""
    elements = sum(chunk.elements.numel() for chunk in chunks)
    kind = f"{label}|{elements}|{len(chunks)}|{chunks[0].elements.dtype}"
    return zlib.crc32(kind.encode()) & (1 << _SIGNATURE) - 1
