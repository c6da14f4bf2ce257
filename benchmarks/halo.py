"""``bench halo``: how much of the exchanges of a training step shows in its time, on an emulated cluster.

For each number of nodes and each link speed the same step of a 3D U-Net is timed in turn: untouched on the plain tile,
cut with the exchanges switched off (*compute*), cut (*step*), and cut with every exchange waited for at once. What is
*exposed* is the step less its compute. *wire* is the time that the bytes of the busiest link take on that link, and the
messages their latency; no program is faster than the larger of compute and wire.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from . import halo_ranks as ranks
from .cluster import Cluster
from .machine import Others, describe
from .topology import ClusterError, bits_per_second

DEADLINE = 300.0  # seconds for a step
TARGET = 0.10  # of exposed_share where the wire takes less than half the compute
LINK_SECONDS = 0.5  # of stream to measure a link with
MULTIPLE = 8  # the network halves a volume three times

Say = Callable[[str], None]


@dataclass(frozen=True)
class LinkDemand:
    """What a link gives and what a step asks of it."""

    bytes_per_second: float
    latency: float
    bytes: int  # of the busiest link in its busier direction, headers included, in one step
    messages: int  # sent by the rank that sends most

    @property
    def seconds(self) -> float:
        return self.bytes / self.bytes_per_second + self.messages * self.latency


@dataclass(frozen=True)
class HaloCase:
    """One number of nodes at one link speed; medians over rounds of the slowest rank's seconds."""

    nodes: int
    rate: str
    plain_s: float
    compute_s: float
    step_s: float
    step_without_overlap_s: float | None
    wire_s: float
    bytes: int
    messages: int
    link_mbit_s: float
    latency_us: float
    oversubscribed: bool
    others_share: float | None  # of the cores' time, taken by other programs

    @property
    def bound_s(self) -> float:
        return max(self.compute_s, self.wire_s)

    @property
    def exposed_share(self) -> float:
        return (self.step_s - self.compute_s) / self.step_s

    @property
    def hideable(self) -> bool:
        """Is there compute enough to hide the wire behind?"""
        return self.wire_s < self.compute_s / 2

    def as_json(self) -> dict[str, Any]:
        without = self.step_without_overlap_s
        return {
            **asdict(self),
            "bound_s": self.bound_s,
            "exposed_share": self.exposed_share,
            "exposed_share_without_overlap": (without - self.compute_s) / without if without else None,
            "over_bound": self.step_s / self.bound_s,
            "over_plain": self.step_s / self.plain_s,
            "hideable": self.hideable,
        }


def measure_halo(
    nodes: Sequence[int], rates: Sequence[str], size: int, width: int, rounds: int, say: Say = lambda text: None
) -> dict[str, Any]:
    """Every number of nodes at every rate."""
    check_sizes(nodes, rates, size)
    cases = [case for count in nodes for case in measure_nodes(count, rates, size, width, rounds, say)]
    facts = describe(max((case.others_share for case in cases if case.others_share is not None), default=None))
    return {**summary(cases), "size": size, "width": width, "rounds": rounds, "machine": facts}


def summary(cases: Sequence[HaloCase]) -> dict[str, Any]:
    """The worst case among those whose wire could be hidden; None if there is none."""
    shares = [case.exposed_share for case in cases if case.hideable]
    return {
        "exposed_share": max(shares, default=None),
        "targets": {"exposed_share": TARGET},
        "cases": [case.as_json() for case in cases],
    }


def check_sizes(nodes: Sequence[int], rates: Sequence[str], size: int) -> None:
    for rate in rates:
        bits_per_second(rate)
    for count in nodes:
        if count < 2:
            raise ClusterError(f"{count} nodes exchange nothing; give two or more")
        if size % MULTIPLE or size // MULTIPLE < count:
            raise ClusterError(f"a volume of {size} does not cut over {count} nodes in multiples of {MULTIPLE}")


def measure_nodes(count: int, rates: Sequence[str], size: int, width: int, rounds: int, say: Say) -> list[HaloCase]:
    cases = []
    with Cluster(nodes=count, rate=rates[0], collective_timeout=DEADLINE) as cluster:
        say(f"{count} nodes: starting")
        ways = cluster.run(ranks.prepare, size, width, deadline=DEADLINE)[0]
        for rate in rates:
            cluster.set_rate(rate)
            cases.append(measure_rate(cluster, rate, ways, rounds, say))
    return cases


def measure_rate(cluster: Cluster, rate: str, ways: Sequence[str], rounds: int, say: Say) -> HaloCase:
    """Turn by turn, so that noise hits all ways alike."""
    nodes = cluster.topology.nodes
    link = measure_link(cluster, rate)
    wire = measure_wire(cluster, *link)
    others = Others(cluster.run)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        say(f"{nodes} nodes, {rate}: round {number + 1} of {rounds}")
        for way in ways:
            times[way].append(max(one.seconds for one in cluster.run(ranks.step, way, deadline=DEADLINE)))
    medians: dict[str, float | None] = {way: median(seconds) for way, seconds in times.items()}
    return HaloCase(
        nodes=nodes,
        rate=rate,
        plain_s=median(times["plain"]),
        compute_s=median(times["compute"]),
        step_s=median(times["step"]),
        step_without_overlap_s=medians.get("without overlap"),
        wire_s=wire.seconds,
        bytes=wire.bytes,
        messages=wire.messages,
        link_mbit_s=wire.bytes_per_second * 8 / 1e6,
        latency_us=wire.latency * 1e6,
        oversubscribed=cluster.size > (os.cpu_count() or 1),
        others_share=others.share(),
    )


def measure_link(cluster: Cluster, rate: str) -> tuple[float, float]:
    """Bytes a second, headers included as in the counters, and seconds of latency."""
    size = max(ranks.BLOCK, int(bits_per_second(rate) / 8 * LINK_SECONDS) // ranks.BLOCK * ranks.BLOCK)
    before = cluster.sent_bytes()[1][0]
    link = cluster.run(ranks.measure_link, cluster.topology.address(0), size, deadline=DEADLINE)[0]
    assert link is not None  # rank 0 holds the watch
    sent = (cluster.sent_bytes()[1][0] - before) / 2  # twice the size was sent, and the second half timed
    return sent / link.seconds, link.latency


def measure_wire(cluster: Cluster, rate: float, latency: float) -> LinkDemand:
    """Bytes and messages of a step, as the network cards count them."""
    before = _counters(cluster)
    steps = cluster.run(ranks.step, "step", deadline=DEADLINE)
    busiest = max(after - then for after, then in zip(_counters(cluster), before, strict=True))
    return LinkDemand(rate, latency, busiest, max(one.messages for one in steps))


def _counters(cluster: Cluster) -> list[int]:
    """Each card's bytes out, then each card's bytes in."""
    return [count for ways in (cluster.sent_bytes(), cluster.received_bytes()) for node in ways for count in node]
