"""Decides who reads which file, who passes it on to whom, and when. Pure functions: every node computes the same
plan.

A file goes from its giver along a chain of all nodes that lack it. The chain follows a ring of nodes that begins at the
giver, and the file travels in blocks. Every node sends and receives each byte at most once. With many givers this is as
fast as everyone sending to everyone; with a single giver it is faster by the number of nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Marks = NDArray[np.bool_]  # by node and file

TRAILER = 8  # bytes behind each file on its way: its checksum
HOP = 2  # steps from one hop to the next: two exchanges can be under way, and links do not fall idle between them
ROUND = 4  # blocks of a round that go over each link at each of those two places, for each node


class RelayJob(NamedTuple):
    """A file to be passed along ``chain``: its giver first, then those that lack it."""

    file: int
    length: int  # the trailer included
    chain: tuple[int, ...]


class Segment(NamedTuple):
    """Bytes of a job that travel together."""

    job: RelayJob
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Bytes of the segment."""
        return self.stop - self.start


class Block(NamedTuple):
    """What a giver sends at once; its hops are at the steps ``begin``, ``begin + HOP``, ... of its round."""

    segments: tuple[Segment, ...]
    begin: int


@dataclass(frozen=True)
class StagingPlan:
    """For each node: the files that it reads from the source, and the jobs that it
    gives, files that it holds already first.
    """

    reads: list[list[int]]
    jobs: list[list[RelayJob]]


def wanted_files(files: int, nodes: int, count: int | None, seed: int) -> Marks:
    """All files on every node, or for each node a random choice of its own."""
    if count is None:
        return np.ones((nodes, files), dtype=np.bool_)
    wanted = np.zeros((nodes, files), dtype=np.bool_)
    for node in range(nodes):
        wanted[node, np.random.default_rng([seed, node]).permutation(files)[:count]] = True
    return wanted


def make_plan(sizes: Sequence[int], wanted: Marks, held: Marks) -> StagingPlan:
    """A file that some node holds is given by such a node; any other is read by one node of those that want it.

    Bytes read and bytes given are balanced, the largest files first.
    """
    nodes = len(wanted)
    lacking = wanted & ~held
    reading, giving = np.zeros(nodes), np.zeros(nodes)
    giver = np.full(len(sizes), -1)
    for file in sorted(np.flatnonzero(lacking.any(0)).tolist(), key=lambda file: -sizes[file]):
        # Reading from the source and sending from memory are balanced separately.
        load, able = (giving, held[:, file]) if held[:, file].any() else (reading, wanted[:, file])
        candidates = np.flatnonzero(able)
        giver[file] = candidates[np.argmin(load[candidates])]
        load[giver[file]] += sizes[file] + 1  # so that empty files are shared out too
    plan = StagingPlan([[] for _ in range(nodes)], [[] for _ in range(nodes)])
    # Held files first: they can go while others are read. Otherwise by path, as they lie in their folders.
    for file in sorted(np.flatnonzero(giver >= 0).tolist(), key=lambda file: (not held[giver[file], file], file)):
        node = int(giver[file])
        if not held[node, file]:
            plan.reads[node].append(file)
        receivers = [other for other in np.flatnonzero(lacking[:, file]).tolist() if other != node]
        if receivers:
            plan.jobs[node].append(job_of(file, sizes[file], node, receivers, nodes))
    return plan


def job_of(file: int, size: int, giver: int, receivers: Sequence[int], nodes: int) -> RelayJob:
    """The job that passes a file along the ring of nodes, beginning at the giver."""
    return RelayJob(file, size + TRAILER, (giver, *sorted(receivers, key=lambda node: (node - giver) % nodes)))


class Streams:
    """The jobs of all givers, and how far each has come; the same on every node."""

    def __init__(self, plan: StagingPlan, block_bytes: int) -> None:
        self.jobs = plan.jobs
        self.block_bytes = block_bytes
        self._places = [(0, 0) for _ in plan.jobs]  # job, bytes of it that have gone

    def again(self, file: int, size: int, receiver: int) -> None:
        """One more job for the same giver, since the file did not arrive as it should."""
        giver = next(node for node, jobs in enumerate(self.jobs) if any(job.file == file for job in jobs))
        self.jobs[giver].append(job_of(file, size, giver, [receiver], len(self.jobs)))

    def take(self, ready: Sequence[int]) -> list[Block]:
        """The blocks of a round, where the first ``ready`` jobs of each giver can go.

        A lone giver sends a block at each step, many take turns, so that each link carries about one block a step.
        """
        active = [giver for giver, count in enumerate(ready) if self._places[giver][0] < count]
        if not active:
            return []
        stride = max(1, min(len(active), len(self.jobs) - 1))
        blocks = []
        for turn in range(HOP * -(-ROUND * len(self.jobs) // len(active))):
            begin = HOP * stride * (turn // HOP) + turn % HOP
            for giver in active:
                if segments := self._segments(giver, ready[giver]):
                    blocks.append(Block(segments, begin))
        return blocks

    def _segments(self, giver: int, ready: int) -> tuple[Segment, ...]:
        """The next bytes of a giver's jobs that fill one block; small files share a block."""
        segments, room = [], self.block_bytes
        number, start = self._places[giver]
        while number < ready and room:
            job = self.jobs[giver][number]
            stop = min(job.length, start + room)
            segments.append(Segment(job, start, stop))
            room -= stop - start
            number, start = (number + 1, 0) if stop == job.length else (number, stop)
        self._places[giver] = number, start
        return tuple(segments)


Stops = dict[int, dict[int, list[Segment]]]  # by step and peer


@dataclass
class Itinerary:
    """What one node sends and receives in a round."""

    steps: int = 0
    sends: Stops = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    receives: Stops = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))


def itinerary(blocks: Sequence[Block], node: int) -> Itinerary:
    """Where the k-th of a chain receives a block, and when it sends it on."""
    route = Itinerary()
    for block in blocks:
        for segment in block.segments:
            chain = segment.job.chain
            route.steps = max(route.steps, block.begin + HOP * (len(chain) - 2) + 1)
            place = chain.index(node) if node in chain else -1
            if place > 0:
                route.receives[block.begin + HOP * (place - 1)][chain[place - 1]].append(segment)
            if 0 <= place < len(chain) - 1:
                route.sends[block.begin + HOP * place][chain[place + 1]].append(segment)
    return route
