"""Sums under way: one thread drives the chunks of all of them, each through its own rounds, several at a time.

As soon as an exchange is done, its elements are added and its chunk's next round is posted, while other chunks travel.
So links of different levels work at once, and none is idle while a chunk waits for it.
"""

from __future__ import annotations

import heapq
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import RankFailure
from ...world import CommThread, Label, PendingExchange, World
from .algorithms import Round

_SERIAL, _ROUND, _SIGNATURE = 14, 8, 9  # bits of a tag; the serial is lowest, and picks the network card by chunk
_SERIALLY = 32_000  # elements: torch adds fewer than 32,768 in the calling thread and wakes no others
_CHECK = 1.0  # seconds after which a wait for a sum checks that the thread is alive
_SPARE = 12  # buffers kept for reuse, per dtype


class Chunk(NamedTuple):
    """Elements with the rounds that they go through. All ranks make the same chunks in the same order.

    With ``result`` the rounds carry partial sums from rank to rank, and this rank's sum is written there.
    """

    elements: Tensor
    rounds: Sequence[Round]
    result: Tensor | None = None


class ChunkedSum:
    """A sum under way, done when all its chunks are; the thread calls ``told`` when it is done or has failed."""

    def __init__(self, thread: CommThread, chunks: int, label: Label, told: Callable[[], None] | None = None) -> None:
        self._thread, self.left, self.label, self._told = thread, chunks, label, told
        self.error: BaseException | None = None
        self.done = threading.Event()
        if not chunks:
            self.end()

    def wait(self) -> None:
        """Block until the sum is done. Raises what went wrong; the thread itself keeps the world's deadline."""
        while not self.done.wait(_CHECK):
            if not self._thread.alive:
                raise RankFailure(f"{self.label}: the thread that sums has ended; start the run again")
        if self.error is not None:
            raise self.error

    def one_less(self) -> None:
        """A chunk is done."""
        self.left -= 1
        if not self.left:
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Release everyone who waits."""
        self.error = error
        self.done.set()
        if self._told is not None:
            self._told()


class ChunkScheduler:
    """Drives the chunks of sums in a world of its own, ``depth`` of them at a time, the most urgent first.

    Ranks may prioritise different chunks. Always running the oldest prevents deadlock: the oldest chunk that is not
    done is the oldest on every rank that has begun it. On a world that moves no data, chunks run in the caller's
    thread.
    """

    def __init__(self, world: World, depth: int) -> None:
        self.world, self._depth = world, depth
        self._dry = not world.capabilities.moves_data
        self.thread = CommThread("halocline rings", self, world.wake if world.capabilities.priorities else None)
        self._lock = threading.Lock()
        self._queue: list[tuple[float, int, ChunkTransfer]] = []  # a heap: by urgency, then by age
        self._under_way: list[ChunkTransfer] = []
        self._serial = 0
        self._spare: dict[torch.dtype, list[Tensor]] = {}
        self._error: BaseException | None = None
        self._progress = 0.0  # when something last arrived

    def begin(self, chunks: Sequence[Chunk], label: Label, told: Callable[[], None] | None = None) -> ChunkedSum:
        """Start a sum, from any thread. All ranks begin in one order, since tags count the chunks."""
        signature = _signature(label, chunks)
        chunked = ChunkedSum(self.thread, len(chunks), label, told)
        with self._lock:
            if self._error is not None:
                raise self._error
            first, self._serial = self._serial, self._serial + len(chunks)
            transfers = [ChunkTransfer(self, chunk, chunked, first + at, signature) for at, chunk in enumerate(chunks)]
            if not self._dry:
                self.thread.submit(partial(self._enqueue, transfers))
        for transfer in transfers if self._dry else ():
            transfer.run_dry()
        return chunked

    # In the thread ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Are chunks under way?"""
        return bool(self._under_way)

    def advance(self) -> bool:
        """Wait for any exchange, and post the next round of its chunk; False if :meth:`World.wake` came before."""
        exchanges = [transfer.exchange for transfer in self._under_way if transfer.exchange is not None]
        try:
            number = self.world.wait_any(exchanges, self._progress + self.world.deadline)
            if number is not None:
                self._progress = time.monotonic()
                self._step(self._under_way[number])
                self._admit()
        except BaseException as error:  # noqa: BLE001  raised where a sum is waited for
            self._fail(error)
            return False
        return number is not None

    def _enqueue(self, transfers: Sequence[ChunkTransfer]) -> None:
        for transfer in transfers:
            heapq.heappush(self._queue, (transfer.chunked.label.urgency, transfer.serial, transfer))
        try:
            if self._error is not None:
                raise self._error
            self._admit()
        except BaseException as error:  # noqa: BLE001
            self._fail(error)

    def _admit(self) -> None:
        """Post the first round of as many chunks as there is room for."""
        while self._queue:
            new = self._next()
            if not new:
                return
            if not self._under_way:
                self._progress = time.monotonic()
            self._under_way += new
            for transfer in new:
                self._step(transfer)

    def _next(self) -> list[ChunkTransfer]:
        """Take chunks off the queue: as many as there is room for, and the oldest in any case."""
        room = min(self._depth - len(self._under_way), len(self._queue))
        new = [heapq.heappop(self._queue)[2] for _ in range(room)]
        oldest = min(self._queue, key=lambda entry: entry[1], default=None)
        if oldest is not None and all(oldest[1] < transfer.serial for transfer in (*self._under_way, *new)):
            self._queue.remove(oldest)
            heapq.heapify(self._queue)
            new.append(oldest[2])
        return new

    def _step(self, transfer: ChunkTransfer) -> None:
        """Post the next round of a chunk, or end it."""
        transfer.exchange = next(transfer.course, None)
        if transfer.exchange is None:
            self._under_way.remove(transfer)
            transfer.chunked.one_less()

    def _fail(self, error: BaseException) -> None:
        if self._error is None and not isinstance(error, RankFailure):
            self.world.leave()  # tells the other ranks; after a RankFailure the world has done so itself
        with self._lock:
            self._error = self._error or error
        unfinished = [*self._under_way, *(transfer for _, _, transfer in self._queue)]
        self._under_way.clear()
        self._queue.clear()
        for chunked in {id(transfer.chunked): transfer.chunked for transfer in unfinished}.values():
            chunked.end(self._error)

    # Memory -----------------------------------------------------------------------------------------------------------

    def borrow(self, elements: int, like: Tensor) -> Tensor:
        """A buffer of at least so many elements, to be given back."""
        spare = self._spare.setdefault(like.dtype, [])
        for number, memory in enumerate(spare):
            if memory.numel() >= elements:
                return spare.pop(number)
        return torch.empty(elements, dtype=like.dtype, device=like.device)

    def give_back(self, memory: Tensor) -> None:
        """Keep a borrowed buffer for the next round; the oldest goes if there are many."""
        spare = self._spare[memory.dtype]
        spare.append(memory)
        if len(spare) > _SPARE:
            spare.pop(0)


class ChunkTransfer:
    """A chunk on its way. Its course is a generator that yields each round's exchange and resumes when it is done.

    Sent elements may be overwritten as soon as their exchange is done.
    """

    def __init__(
        self, scheduler: ChunkScheduler, chunk: Chunk, chunked: ChunkedSum, serial: int, signature: int
    ) -> None:
        self._scheduler, self.elements, self._rounds = scheduler, chunk.elements, chunk.rounds
        self.chunked, self.serial, self._signature = chunked, serial, signature
        self.exchange: PendingExchange | None = None
        self.course = self._course() if chunk.result is None else self._carrying_course(chunk.result)

    def _post(self, number: int, each: Round, into: Tensor, carried: Tensor | None = None) -> PendingExchange:
        """Begin the exchange of one round: sends ``carried`` or the chunk's own span, receives ``into``."""
        tag = self.tag(number)
        out = self.elements[each.sent.start : each.sent.stop] if carried is None else carried
        sends = [] if each.to is None else [(each.to, out, tag)]
        receives = [] if each.source is None else [(each.source, into, tag)]
        return self._scheduler.world.begin_tagged(sends, receives, self.chunked.label)

    def tag(self, number: int) -> int:
        """Of a round's messages: unique among those under way, and different where ranks sum different things."""
        return (self._signature << _ROUND | number & (1 << _ROUND) - 1) << _SERIAL | self.serial & (1 << _SERIAL) - 1

    def _course(self) -> Iterator[PendingExchange]:
        """Rounds that copy or add in place."""
        scheduler = self._scheduler
        for number, each in enumerate(self._rounds):
            if each.idle:
                continue
            own = self.elements[each.received.start : each.received.stop]
            memory = None if each.taking == "copy" else scheduler.borrow(own.numel(), own)
            into = own if memory is None else memory[: own.numel()]
            exchange = self._post(number, each, into)
            yield exchange
            exchange.wait()
            if memory is not None:
                add(own, into, to_it=each.taking == "add to it")
                scheduler.give_back(memory)

    def _carrying_course(self, result: Tensor) -> Iterator[PendingExchange]:
        """Rounds of a reduce-scatter, which carry partial sums on and leave the chunk's own elements unchanged."""
        scheduler, carried, memory = self._scheduler, None, None
        for number, each in enumerate(self._rounds):
            own = self.elements[each.received.start : each.received.stop]
            arriving = scheduler.borrow(own.numel(), own) if own.numel() else None
            into = own if arriving is None else arriving[: own.numel()]
            if not each.idle:
                exchange = self._post(number, each, into, carried)
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
        """Record all rounds in order, in a world that moves no data."""
        for number, each in enumerate(self._rounds):
            if not each.idle:
                into = self.elements[each.received.start : each.received.stop]
                self._post(number, each, into).wait()
        self.chunked.one_less()


def add(own: Tensor, arrived: Tensor, to_it: bool) -> None:
    """``own += arrived``, or with ``to_it`` the operands swapped. torch adds 16-bit floats in float32 and rounds."""
    if own.device.type == "cpu" and own.numel() > _SERIALLY and torch.get_num_threads() > 1:
        for mine, theirs in zip(own.split(_SERIALLY), arrived.split(_SERIALLY), strict=True):
            add(mine, theirs, to_it)
    elif to_it:
        torch.add(arrived, own, out=own)
    else:
        own.add_(arrived)


def _signature(label: Label, chunks: Sequence[Chunk]) -> int:
    """A few bits of a tag by which ranks that sum different things wait for different messages, and fail."""
    elements = sum(chunk.elements.numel() for chunk in chunks)
    kind = f"{label}|{elements}|{len(chunks)}|{chunks[0].elements.dtype}"
    return zlib.crc32(kind.encode()) & (1 << _SIGNATURE) - 1
