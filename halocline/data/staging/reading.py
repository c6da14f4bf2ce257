"""Threads that read a node's share of the source, and the progress that all threads of a node record."""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...background import in_background
from .consensus import reason
from .listing import File, Listing, Tick
from .node_store import FULL, PIECE, Damaged, NodeStore, PartialFile, free_bytes
from .watch import Abandoned, Watched

BACKOFF, LONGEST = 0.1, 5.0  # seconds before the second attempt, doubled for each further one


@dataclass(frozen=True)
class ReadLimits:
    """Threads, attempts and waits: the arguments of ``stage`` that every reader and writer needs."""

    threads: int
    retries: int
    patience: float  # seconds without a byte after which a read has failed

    def backoff(self, attempt: int) -> float:
        """Seconds to wait before the next attempt."""
        return min(LONGEST, BACKOFF * 2.0**attempt)


class StagingProgress:
    """What a node has and lacks. Several threads write it; the thread that agrees with other nodes reads it."""

    def __init__(self, node: int, files: Sequence[File], wanted: Iterable[int], held: Iterable[int]) -> None:
        self.node, self.files = node, files
        self.landed = set(held)
        self.lacking = set(wanted) - self.landed
        self.lacking_bytes = sum(files[file].size for file in self.lacking)
        self.counts: Counter[str] = Counter()
        self.error: str | None = None
        self.astray: deque[int] = deque()  # files that did not arrive whole, and should come once more
        self.news = threading.Event()
        self.stopping = threading.Event()
        self._lock = threading.Lock()

    def land(self, file: int, how: str) -> None:
        """It lies here, whole; ``how`` it came is counted."""
        with self._lock:
            self.landed.add(file)
            if file in self.lacking:
                self.lacking.remove(file)
                self.lacking_bytes -= self.files[file].size
        self.count(how, self.files[file].size)
        self.news.set()

    def count(self, what: str, size: int) -> None:
        """Count a file and its bytes."""
        with self._lock:
            self.counts[f"{what}_files"] += 1
            self.counts[f"{what}_bytes"] += size

    def tally(self, what: str, amount: int = 1) -> None:
        """Add to one counter."""
        with self._lock:
            self.counts[what] += amount

    def stray(self, file: int) -> None:
        """A file did not arrive whole: ask for it once more."""
        self.tally("retried")
        self.astray.append(file)
        self.news.set()

    def give_up(self, text: str) -> None:
        """The first word counts."""
        with self._lock:
            self.error = self.error or f"node {self.node}: {text}"
        self.news.set()

    def full(self, store: NodeStore, file: File, error: OSError) -> None:
        """Give up, since the node's storage is full."""
        self.give_up(
            f"{store.root} is full: {reason(error)} while writing {file}; {self.lacking_bytes:,} bytes are still to "
            f"come and {free_bytes(store.root):,} are free; make room and stage again: what is finished stays"
        )


class SourceReaders:
    """Threads that read files one after the other from the source, each with a few attempts."""

    def __init__(
        self, listing: Listing, store: NodeStore, progress: StagingProgress, files: Iterable[int], limits: ReadLimits
    ) -> None:
        self.listing, self.store, self.progress, self.limits = listing, store, progress, limits
        self._waiting = deque(files)
        self._threads = [in_background(self._work, "halocline staging reader") for _ in range(limits.threads)]

    def join(self) -> None:
        """Wait a second for each thread to end."""
        for thread in self._threads:
            wait([thread], 1.0)  # one that hangs in a read is left behind

    def _work(self) -> None:
        """One thread: files from the common queue until it is empty or staging stops."""
        while not self.progress.stopping.is_set():
            try:
                file = self._waiting.popleft()
            except IndexError:
                return
            try:
                self._bring(file)
            except Exception as error:  # noqa: BLE001 - a thread that died in silence would leave all waiting
                self.progress.give_up(reason(error))

    def _bring(self, number: int) -> None:
        """Attempts, until one succeeds."""
        file, progress = self.listing.files[number], self.progress
        for attempt in range(1 + self.limits.retries):
            try:
                Watched(partial(self._copy, file), self.limits.patience).result()
                return progress.land(number, "read")
            except Abandoned:
                return None
            except OSError as error:
                if error.errno in FULL:
                    return progress.full(self.store, file, error)
                last = error
            if attempt < self.limits.retries:
                progress.tally("retried")
                progress.stopping.wait(self.limits.backoff(attempt))
        return progress.give_up(
            f"{file} could not be brought from {self.listing.root} in {1 + self.limits.retries} attempts: "
            f"{reason(last)}; set it right and stage again: what is finished stays"
        )

    def _copy(self, file: File, tick: Tick) -> None:
        """One attempt: to a temporary name, then under the file's own."""
        part = self.store.part(file)
        try:
            self._read(file, part, tick)
            part.finish(part.crc)
        finally:
            part.discard()

    def _read(self, file: File, part: PartialFile, tick: Tick) -> None:
        """Copy the bytes in pieces; raises where the source has changed since it was listed."""
        room = memoryview(bytearray(min(PIECE, file.size + 1)))
        self.progress.tally("opens")
        with Path(self.listing.root, file.path).open("rb", buffering=0) as source:
            _check_unchanged(file, os.fstat(source.fileno()))
            while part.written <= file.size and (count := source.readinto(room)):
                if self.progress.stopping.is_set():
                    raise Abandoned
                part.write(room[:count])
                tick()
            _check_unchanged(file, os.fstat(source.fileno()))


def _check_unchanged(file: File, now: os.stat_result) -> None:
    """Raise where size or time differ from those in the listing."""
    if now.st_size != file.size:
        raise Damaged(f"the source changed while it was staged: {file.size:,} bytes when listed, {now.st_size:,} now")
    if now.st_mtime_ns != file.modified:
        raise Damaged("the source changed while it was staged: it was written to after it was listed")
