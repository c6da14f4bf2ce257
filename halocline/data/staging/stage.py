"""Staging: files of a shared file system copied to the storage of every node, each read from the source once in all.

    report = hc.data.stage("/shared/run7.zarr", "/local/run7.zarr")  # on every rank

One node reads a file, with a few threads; from there it is passed on between nodes over the network, in blocks, while
further files are read. A file appears under its name only when it is whole, on storage, and of the checksum that its
reader computed. Staged again, after a kill or for other nodes, whatever some node holds is passed on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...world import Mesh, World, this_world
from .consensus import Consensus, Table, find_nodes
from .listing import Listing, StageError, Tick, list_source
from .node_store import NodeStore
from .plan import Marks, StagingPlan, Streams, make_plan, wanted_files
from .reading import LONGEST, ReadLimits, SourceReaders, StagingProgress
from .relay import Relay, block_bytes

__all__ = ["NodeReport", "StageError", "StageReport", "stage"]

ProgressCallback = Callable[
    [int, int], None
]  # bytes that lie where they are wanted, and how many it will be, on all nodes

PAUSE = 0.05  # seconds until ranks ask each other again, when there was nothing to pass on
READY, LEFT, ASTRAY, MISSING = range(4)  # columns of what nodes tell each other between rounds


@dataclass(frozen=True)
class NodeReport:
    """What one node did. What it passed on includes what only went through it."""

    read_files: int
    read_bytes: int
    opens: int  # of source files, further attempts included
    passed_files: int
    passed_bytes: int
    received_files: int
    received_bytes: int
    present_files: int  # already there
    present_bytes: int
    retried: int  # reads and arrivals that failed at first


@dataclass(frozen=True)
class StageReport:
    """What staging did, the same on every rank but for ``destination``: this rank's node's own."""

    destination: Path
    files: int  # of the source
    bytes: int
    seconds: float
    nodes: tuple[NodeReport, ...]

    def total(self, what: str) -> int:
        """Over all nodes."""
        return sum(getattr(node, what) for node in self.nodes)

    @property
    def opens(self) -> int:
        """How often a file of the source was opened, by all nodes together."""
        return self.total("opens")

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes that came to rest on some node, each second."""
        return (self.total("read_bytes") + self.total("received_bytes")) / max(self.seconds, 1e-9) / 1e9

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it: all fields, and totals over the nodes."""
        totals = {field.name: self.total(field.name) for field in fields(NodeReport)}
        return {
            **asdict(self),
            "destination": str(self.destination),
            **totals,
            "gigabytes_per_second": self.gigabytes_per_second,
            "nodes": [asdict(node) for node in self.nodes],
        }


def stage(
    source: str | Path,
    destination: str | Path,
    mesh: Mesh | World | None = None,
    *,
    pattern: str = "**/*",
    readers: int = 4,
    count: int | None = None,
    seed: int = 0,
    retries: int = 3,
    verify: bool = False,
    timeout: float = 120.0,
    progress: ProgressCallback | None = None,
) -> StageReport:
    """Copy the files under ``source`` that match ``pattern`` to ``destination`` on every node; called by all ranks.

    On each node the rank with ``LOCAL_RANK`` 0 does the work. ``{node}`` in the destination becomes the node's number.
    ``count`` gives every node that many files, chosen at random by ``seed`` and node, in place of all. Each node reads
    with ``readers`` threads; what fails, or moves nothing for ``timeout`` seconds, is tried ``retries`` times more.
    A file that lies there with the right size is kept; ``verify`` reads it and compares its checksum too.

    A failure raises :class:`StageError` on every rank, a node that dies ``RankFailure``. Either way, finished files
    stay, and staging again goes on from there.
    """
    _check(readers, count, retries, timeout)
    begun = time.monotonic()
    world = mesh.world if isinstance(mesh, Mesh) else mesh or this_world()
    # Staging may run beside a training step of the same ranks.
    own = world.duplicate()
    try:
        staging = Staging(Consensus(own, timeout), Path(destination), ReadLimits(readers, retries, timeout))
        staging.list_files(Path(source), pattern, count, seed)
        with ExitStack() as cleaning:
            counts = staging.run(verify, progress or (lambda done, total: None), cleaning)
        report = staging.report(counts, begun)
    except StageError:  # which all ranks raise
        own.close()
        raise
    except BaseException:
        own.leave()
        raise
    own.close()
    return report


def _check(readers: int, count: int | None, retries: int, timeout: float) -> None:
    """Raise for arguments out of range."""
    least = {"readers": (readers, 1), "count": (1 if count is None else count, 1), "retries": (retries, 0)}
    for name, (value, minimum) in least.items():
        if value < minimum:
            raise StageError(f"{name}={value}: give {minimum} or more")
    if timeout <= 0:
        raise StageError(f"timeout={timeout:g}: give a positive number of seconds")


class Staging:
    """One call of :func:`stage`, as one rank sees it."""

    def __init__(self, consensus: Consensus, destination: Path, limits: ReadLimits) -> None:
        self.consensus, self.destination, self.limits = consensus, destination, limits
        self.workers, self.node = find_nodes(consensus)
        self.works = consensus.world.rank in self.workers
        self.name = f"node {self.node}"
        self.store = NodeStore(destination, self.node)

    def list_files(self, source: Path, pattern: str, count: int | None, seed: int) -> None:
        """Rank 0 walks over the source once, and tells the others."""
        self.source = source
        first = self.consensus.world.rank == 0
        listing = self.consensus.run(partial(list_source, source, pattern) if first else None, "listing the source")
        self.listing = Listing.decoded(self.consensus.broadcast(listing.encoded() if listing else None))
        files = self.listing.files
        if count is not None and count > len(files):
            raise StageError(f"count={count}: there are {len(files)} files under {source} that match {pattern!r}")
        self.sizes = [file.size for file in files]
        self.wanted = wanted_files(len(files), len(self.workers), count, seed)
        self.total_bytes = int((self.wanted @ np.array(self.sizes, dtype=np.int64)).sum())

    def run(self, verify: bool, progress: ProgressCallback, cleaning: ExitStack) -> Table:
        """Bring all wanted files to all nodes; returns what each node counted. Called by all ranks."""
        self.consensus.seats = self.workers  # from here on, the others listen
        cleaning.callback(self.store.close)
        held = self._take_stock(verify)
        if not self.works:
            return self._listen(progress)
        worker = Worker(self, held, make_plan(self.sizes, self.wanted, held))
        cleaning.callback(worker.close)
        return worker.run(progress)

    # ---- what is there ----

    def _take_stock(self, verify: bool) -> Marks:
        """Which node holds which files; leftovers are removed, and there is room for the rest."""
        own = self.consensus.run(partial(self._look, verify) if self.works else None, self.name)
        # One bit a file: a million files are 125 kB a node.
        row = np.packbits(own if own is not None else np.zeros(len(self.sizes), dtype=np.bool_))
        table = self.consensus.gathered(torch.from_numpy(row)).numpy()
        return np.unpackbits(table, axis=1, count=len(self.sizes)).astype(np.bool_)

    def _look(self, verify: bool, tick: Tick) -> Marks:
        """Open this node's storage and see what it holds.

        Raises where the destination lies in the source or is too small.
        """
        here = self.store.root.resolve()
        if self.source.resolve() in (here, *here.parents, *(here / file.path for file in self.listing.files[:1])):
            raise StageError(f"the destination {here} lies inside the source {self.source}; stage to another place")
        self.store.open()
        held = self.store.holdings(self.listing.files, verify, self.limits.threads, tick)
        self.store.check_space(int(np.array(self.sizes, dtype=np.int64)[self.wanted[self.node] & ~held].sum()))
        self.store.make_folders(self.listing)
        return held

    # ---- the end ----

    def _listen(self, progress: ProgressCallback) -> Table:
        """A rank that does not work hears when the others have done it."""
        while True:
            table = self.consensus.exchange_rows([0] * 4)
            self.tell(progress, table)
            if not table[:, LEFT].any():
                return self.consensus.exchange_rows([0] * len(fields(NodeReport)))

    def tell(self, progress: ProgressCallback, table: Table) -> None:
        """Call the user's progress function with bytes done and bytes wanted."""
        progress(self.total_bytes - int(table[:, MISSING].sum()), self.total_bytes)

    def report(self, counts: Table, begun: float) -> StageReport:
        """The report, with the time of the slowest rank."""
        nodes = tuple(NodeReport(*map(int, row)) for row in counts)
        # The slowest rank's time, in microseconds as tables hold whole numbers.
        self.consensus.seats = self.consensus.ranks
        seconds = self.consensus.exchange_rows([int((time.monotonic() - begun) * 1e6)]).max() / 1e6
        return StageReport(self.store.root, len(self.sizes), self.listing.total_bytes, float(seconds), nodes)


class Worker:
    """A node at work: threads read and write files, while rounds of blocks travel between nodes.

    The main thread agrees with the other nodes before each round; whatever the threads report goes through the
    progress.
    """

    def __init__(self, staging: Staging, held: Marks, plan: StagingPlan) -> None:
        self.consensus, self.staging, node = staging.consensus, staging, staging.node
        wanted = staging.wanted[node]
        self.progress = StagingProgress(
            node, staging.listing.files, np.flatnonzero(wanted).tolist(), np.flatnonzero(held[node]).tolist()
        )
        for file in np.flatnonzero(wanted & held[node]).tolist():
            self.progress.count("present", staging.sizes[file])
        self.streams = Streams(plan, block_bytes(len(staging.workers)))
        parts = staging.store, self.progress
        self.passing = Relay(staging.consensus.world, staging.workers, *parts, staging.limits)
        self.readers = SourceReaders(staging.listing, *parts, plan.reads[node], staging.limits)
        self._ready = 0
        self._last: tuple[bytes, float] = (b"", time.monotonic())

    def close(self) -> None:
        """Stop all threads of this node."""
        self.progress.stopping.set()
        self.readers.join()
        self.passing.close()

    def run(self, progress: ProgressCallback) -> Table:
        """Rounds of blocks until no node lacks a file; returns what each node counted."""
        while True:
            table = self.consensus.exchange_rows(self._row(), self.progress.error)
            self.staging.tell(progress, table)
            if not table[:, LEFT].any():
                return self.consensus.exchange_rows([self.progress.counts[field.name] for field in fields(NodeReport)])
            self._send_again(table[:, ASTRAY])
            blocks = self.streams.take(table[:, READY].tolist())
            self._watch(table, bool(blocks))
            if blocks:
                self.passing.round(blocks)
            else:
                self.progress.news.wait(PAUSE)
                self.progress.news.clear()

    def _row(self) -> list[int]:
        """What this node tells the others before a round: jobs that can go, files it
        lacks, a file to resend, bytes it lacks.
        """
        progress, jobs = self.progress, self.streams.jobs[self.staging.node]
        while self._ready < len(jobs) and jobs[self._ready].file in progress.landed:
            self._ready += 1
        astray = 1 + progress.astray.popleft() if progress.astray else 0
        return [self._ready, len(progress.lacking), astray, progress.lacking_bytes]

    def _send_again(self, astray: Table) -> None:
        """A file that some node did not get whole; every node hears of it and queues it alike."""
        for node, number in enumerate(astray.tolist()):
            if number:
                self.streams.again(number - 1, self.staging.sizes[number - 1], node)
        if astray.any():
            time.sleep(self.staging.limits.backoff(0))

    def _watch(self, table: Table, moving: bool) -> None:
        """Give up when nothing has moved for longer than all inner deadlines together: a last resort."""
        now, seen = time.monotonic(), table.tobytes()
        if moving or seen != self._last[0]:
            self._last = seen, now
        limits = self.staging.limits
        if now - self._last[1] > (limits.patience + LONGEST) * (limits.retries + 2):
            self.progress.give_up(f"staging stands still; files that each node still lacks: {table[:, LEFT].tolist()}")
