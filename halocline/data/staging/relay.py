"""Passes files on between nodes: read from local storage, sent along chains block by block, written by threads.

An error here never stops a round, because the other nodes wait for this node's messages. It is recorded in the
progress, and all nodes act on it at their next agreement.
"""

from __future__ import annotations

import queue
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from io import FileIO

import torch
from torch import Tensor

from ...background import in_background
from ...world import Label, Receive, Send, World
from .consensus import reason
from .node_store import FULL, NodeStore, PartialFile
from .plan import TRAILER, Block, Itinerary, Segment, itinerary
from .reading import ReadLimits, StagingProgress

LABEL = Label("stage", "blocks")
BYTES = torch.empty(0, dtype=torch.uint8)
WAITING = 2  # blocks that a writing thread may be behind
IN_FLIGHT = 256 << 20  # bytes of all givers' blocks together, that a node may have to hold at once
SMALLEST, LARGEST = 64 << 10, 2 << 20  # bytes of a block


def block_bytes(nodes: int) -> int:
    """Size of a block, such that the blocks of all nodes fit in memory."""
    return min(LARGEST, max(SMALLEST, IN_FLIGHT // nodes))


def data_bytes(segment: Segment) -> int:
    """Without what belongs to the trailer."""
    return max(0, min(segment.stop, segment.job.length - TRAILER) - segment.start)


class FileSender:
    """Reads files that lie here, from beginning to end, one at a time."""

    def __init__(self, store: NodeStore, progress: StagingProgress) -> None:
        self.store, self.progress = store, progress
        self._source: FileIO | None = None
        self._crc = 0

    def fill(self, segment: Segment, room: memoryview) -> None:
        """Bytes of the file and, behind its last, its checksum: that of the source as it was read, if it is known."""
        file, count = self.progress.files[segment.job.file], data_bytes(segment)
        try:
            if segment.start == 0:
                self._open(segment.job.file)
            if self._read(room[:count]) < count:
                raise OSError("it is shorter than it was")
        except OSError as error:
            self.progress.give_up(f"its copy of {file} under {self.store.root} cannot be passed on: {reason(error)}")
        # Without a known checksum of the source, the one that was just computed.
        crc = self.store.checksums.get(file.path, self._crc)
        begin = max(0, segment.start - file.size)
        room[count:] = crc.to_bytes(TRAILER, "little")[begin : begin + segment.length - count]

    def _open(self, number: int) -> None:
        self.close()
        self._source = self.store.path(self.progress.files[number]).open("rb", buffering=0)
        self._crc = 0

    def _read(self, room: memoryview) -> int:
        """Fill ``room`` and add the bytes to the checksum; how many there were."""
        filled = 0
        while self._source is not None and (count := self._source.readinto(room[filled:])):
            filled += count
        self._crc = zlib.crc32(room[:filled], self._crc)
        return filled

    def close(self) -> None:
        """Close the file that was read last."""
        if self._source is not None:
            self._source.close()
            self._source = None


class IncomingFile:
    """A file on its way in."""

    def __init__(self, part: PartialFile) -> None:
        self.part, self.trailer = part, b""

    def take(self, segment: Segment, data: memoryview) -> bool:
        """Is it whole now?"""
        count = data_bytes(segment)
        self.part.write(data[:count])
        self.trailer += bytes(data[count:])
        if len(self.trailer) < TRAILER:
            return False
        self.part.finish(int.from_bytes(self.trailer, "little"))
        return True


class FileReceiver:
    """Threads that write what came. All of a file goes to one of them, in the order in which it came."""

    def __init__(self, store: NodeStore, progress: StagingProgress, limits: ReadLimits) -> None:
        self.store, self.progress, self.limits = store, progress, limits
        self._open: dict[int, IncomingFile] = {}
        self._attempts: Counter[int] = Counter()
        self._queues: list[queue.Queue[tuple[Segment, memoryview] | None]] = [
            queue.Queue(WAITING) for _ in range(limits.threads)
        ]
        self._threads = [in_background(partial(self._work, each), "halocline staging writer") for each in self._queues]

    def put(self, segment: Segment, data: memoryview) -> None:
        """Waits while too much is waiting already: memory is bounded."""
        try:
            self._queues[segment.job.file % len(self._queues)].put((segment, data), timeout=self.limits.patience)
        except queue.Full:
            self.progress.give_up(f"nothing could be written to {self.store.root} for {self.limits.patience:g} s")

    def join(self) -> None:
        """End the threads, and remove files that are not complete."""
        for thread, each in zip(self._threads, self._queues, strict=True):
            try:
                each.put(None, timeout=1.0)
                wait([thread], 1.0)
            except queue.Full:
                pass  # it hangs in a write, and is left behind
        for arrival in self._open.values():
            arrival.part.discard()

    def _work(self, mine: queue.Queue[tuple[Segment, memoryview] | None]) -> None:
        """One writing thread: segments of its own files, in order of arrival."""
        while (item := mine.get()) is not None:
            segment, data = item
            try:
                self._take(segment, data)
            except OSError as error:
                self._fail(segment, error)
            except Exception as error:  # noqa: BLE001 - a thread that died in silence would leave all waiting
                self.progress.give_up(reason(error))

    def _take(self, segment: Segment, data: memoryview) -> None:
        """Write a segment; the last one of a file gives the file its name."""
        number = segment.job.file
        if segment.start == 0:
            self._open[number] = IncomingFile(self.store.part(self.progress.files[number]))
        arrival = self._open.get(number)  # none after a failure: the rest of that attempt is of no use
        if arrival is not None and arrival.take(segment, data):
            del self._open[number]
            self.progress.land(number, "received")

    def _fail(self, segment: Segment, error: OSError) -> None:
        """Discard what was written, and ask for the file once more or give up."""
        number, giver = segment.job.file, segment.job.chain[0]
        file, arrival = self.progress.files[number], self._open.pop(number, None)
        if arrival is not None:
            arrival.part.discard()
        self._attempts[number] += 1
        if error.errno in FULL:
            self.progress.full(self.store, file, error)
        elif self._attempts[number] <= self.limits.retries:
            self.progress.stray(number)
        else:
            self.progress.give_up(
                f"{file} did not arrive from node {giver} in {self._attempts[number]} attempts: {reason(error)}; if "
                f"the copy on node {giver} is damaged, staging with verify brings it anew"
            )


class Relay:
    """One node's part in the rounds of exchanges."""

    def __init__(
        self, world: World, workers: tuple[int, ...], store: NodeStore, progress: StagingProgress, limits: ReadLimits
    ) -> None:
        self.world, self.workers, self.progress = world, workers, progress
        self.giver, self.arrivals = FileSender(store, progress), FileReceiver(store, progress, limits)
        self._carried: dict[tuple[int, int], Tensor] = {}  # to be sent on at the next step

    def close(self) -> None:
        """End the threads and close all files."""
        self.giver.close()
        self.arrivals.join()

    def round(self, blocks: list[Block]) -> None:
        """A step begins before the last has ended: what it sends on came at the one before that."""
        route, before = itinerary(blocks, self.progress.node), None
        for step in range(route.steps):
            now = self._begin(route, step)
            if before is not None:
                before()
            before = now
        if before is not None:
            before()

    def _begin(self, route: Itinerary, step: int) -> Callable[[], None]:
        """Begin to exchange; what comes back waits for the end of it."""
        sends = [Send(self.workers[peer], self._message(segments)) for peer, segments in route.sends[step].items()]
        expected = list(route.receives[step].items())
        receives = [Receive(self.workers[peer], sum(each.length for each in segments)) for peer, segments in expected]
        exchange = self.world.begin(sends, receives, BYTES, self.workers, LABEL)

        def finish() -> None:
            for (_, segments), message in zip(expected, exchange.wait(), strict=True):
                self._receive(segments, message)

        return finish

    def _message(self, segments: list[Segment]) -> Tensor:
        """The segments for one peer as one message."""
        pieces = []
        for segment in segments:
            self.progress.tally("passed_bytes", data_bytes(segment))
            self.progress.tally("passed_files", int(segment.stop == segment.job.length))
            pieces.append(self._piece(segment))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _piece(self, segment: Segment) -> Tensor:
        """A segment's bytes: from a file of this node's, or as they arrived two steps ago."""
        if segment.job.chain[0] != self.progress.node:
            return self._carried.pop((segment.job.file, segment.start))
        piece = torch.empty(segment.length, dtype=torch.uint8)
        self.giver.fill(segment, _memory(piece))
        return piece

    def _receive(self, segments: list[Segment], message: Tensor) -> None:
        """Write what arrived, and keep what has to be sent on."""
        for segment, piece in zip(segments, message.split([segment.length for segment in segments]), strict=True):
            if segment.job.chain[-1] != self.progress.node:
                # Sent on two steps later; the writing thread reads the same memory, and neither changes it.
                self._carried[segment.job.file, segment.start] = piece
            self.arrivals.put(segment, _memory(piece))


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # numpy arrays are buffers
