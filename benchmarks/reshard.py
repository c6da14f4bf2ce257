"""``bench reshard``: a tensor from one mesh to another against gather-and-scatter, on an emulated cluster.

Half of the nodes hold a tensor, cut or whole, and the other half get it, cut or whole. *wire* is the time that the
busiest link needs for the bytes which any algorithm must send over it: the largest tile that a receiver gets, or the
senders' equal shares of what crosses. The link's rate is that of a plain stream between two nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from . import reshard_ranks as ranks
from .cluster import Cluster
from .halo import LINK_SECONDS
from .halo_ranks import BLOCK
from .halo_ranks import measure_link as stream
from .machine import Others, describe
from .reshard_ranks import ReshardCase
from .topology import bits_per_second

DEADLINE = 300.0
TARGETS = {"over_wire": 1.15, "speedup": 2.0}
WAYS = ("move", "gather", "adjoint")
CASES = {
    "rows to columns": ({0: "a"}, {1: "a"}),
    "rows to whole": ({0: "a"}, {}),
    "whole to rows": ({}, {0: "a"}),
    "whole to whole": ({}, {}),
}

Say = Callable[[str], None]


@dataclass(frozen=True)
class ReshardTimes:
    """Medians over rounds of the slowest rank's seconds."""

    case: str
    rate: str
    move_s: float
    gather_s: float
    adjoint_s: float
    wire_s: float
    error: float
    crossed_bytes: int
    link_mbit_s: float

    def as_json(self) -> dict[str, Any]:
        ratios = {"over_wire": self.move_s / self.wire_s, "speedup": self.gather_s / self.move_s,
                  "adjoint_over_wire": self.adjoint_s / self.wire_s}  # fmt: skip
        return {**asdict(self), **ratios}


def measure_reshard(
    pairs: int, rates: Sequence[str], megabytes: float, rounds: int, say: Say = lambda text: None
) -> dict[str, Any]:
    """From ``pairs`` nodes to as many others, every case at every rate; turns alternate."""
    for rate in rates:
        bits_per_second(rate)
    cases = [ReshardCase(name, before, after, megabytes) for name, (before, after) in CASES.items()]
    times = []
    with Cluster(nodes=2 * pairs, rate=rates[0], collective_timeout=DEADLINE) as cluster:
        others = Others(cluster.run)
        for rate in rates:
            cluster.set_rate(rate)
            link = link_rate(cluster, rate)
            for case in cases:
                say(f"{rate}: {case.name}")
                times.append(measure_case(cluster, case, rate, link, rounds))
        share = others.share()
    return {**summary(times), "megabytes": megabytes, "senders": pairs, "receivers": pairs, "rounds": rounds,
            "oversubscribed": 2 * pairs > (os.cpu_count() or 1), "machine": describe(share)}  # fmt: skip


def summary(times: Sequence[ReshardTimes]) -> dict[str, Any]:
    """The worst of all cases."""
    cases = [one.as_json() for one in times]
    return {
        "over_wire": max(case["over_wire"] for case in cases),
        "speedup": min(case["speedup"] for case in cases),
        "exact": not any(case["error"] for case in cases),
        "targets": TARGETS,
        "cases": cases,
    }


def link_rate(cluster: Cluster, rate: str) -> float:
    """Payload bytes a second of a plain stream."""
    size = max(BLOCK, int(bits_per_second(rate) / 8 * LINK_SECONDS) // BLOCK * BLOCK)
    link = cluster.run(stream, cluster.topology.address(0), size, deadline=DEADLINE)[0]
    assert link is not None  # rank 0 holds the watch
    return float(size / link.seconds)


def measure_case(cluster: Cluster, case: ReshardCase, rate: str, link: float, rounds: int) -> ReshardTimes:
    """One round more than counted: connections and memory are made in the first."""
    least, crossed = cluster.run(ranks.bound, case, deadline=DEADLINE)[0]
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    error = 0.0
    for turn in range(rounds + 1):
        for way in WAYS:
            figures = cluster.run(ranks.move, case, way, deadline=DEADLINE)
            error = max(error, *(one.error for one in figures))
            seconds[way] += [max(one.seconds for one in figures)] if turn else []
    middle = {way: median(each) for way, each in seconds.items()}
    return ReshardTimes(case.name, rate, middle["move"], middle["gather"], middle["adjoint"],
                        least / link, error, crossed, link * 8 / 1e6)  # fmt: skip
