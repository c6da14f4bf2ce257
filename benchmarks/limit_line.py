"""``bench limit-line``: does METG predict where strong scaling ends?

U-Nets of three sizes run on 1 to 16 nodes of an emulated cluster; their compute is slept, their exchanges are real. The
limit line is METG x exchanges of a step, with METG of a stencil whose faces have as many bytes as the step's messages
have on average. Where it crosses ideal scaling, half of a step is predicted to be work. The measured end is where half
of it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from halocline.taskbench.metg import curve

from . import limit_line_ranks as ranks
from .cluster import Cluster
from .limit_line_ranks import UNetCase
from .machine import describe

COUNTS = (1, 2, 4, 8, 16)
DEPTH = 128
SIZES = tuple(25 * 2**n for n in range(10, -1, -1))  # microseconds that a task sleeps
STEPS = 20  # rows of the stencil
DEADLINE = 300.0
TARGET = 2.0  # ratio of predicted and measured ranks, at most

Say = Callable[[str], None]
Points = Sequence[tuple[int, float]]  # ranks and seconds


def measure_limit_line(
    sides: Sequence[int], width: int, gigaflops: float, rate: str, rounds: int, say: Say = lambda text: None
) -> dict[str, Any]:
    """Every size on every number of nodes, then the two ends of each."""
    cases = [UNetCase(DEPTH, side, width, gigaflops * 1e9) for side in sides]
    found: dict[UNetCase, list[dict[str, float]]] = {case: [] for case in cases}
    for count in COUNTS:
        with Cluster(nodes=count, rate=rate, collective_timeout=DEADLINE) as cluster:
            for case in cases:
                say(f"{count} nodes: U-Net on {case.depth} x {case.side} x {case.side}")
                found[case].append({"ranks": count, **measure_case(cluster, case, rounds)})
    both = {case: ends(points) for case, points in found.items()}
    ratios = [each["predicted_over_measured"] for each in both.values()]
    worst = max((max(each, 1 / each) for each in ratios if each), default=None)
    return {
        "worst_factor": worst if all(ratios) else None,
        "targets": {"worst_factor": TARGET},
        "cases": [
            {"side": case.side, "depth": case.depth, **both[case], "points": points} for case, points in found.items()
        ],
        "rate": rate,
        "width": width,
        "gigaflops": gigaflops,
        "machine": describe(None),
    }


def measure_case(cluster: Cluster, case: UNetCase, rounds: int) -> dict[str, float]:
    """Seconds of a step, and METG where there is somebody to send to."""
    steps = cluster.run(ranks.replay, case, rounds, deadline=DEADLINE)
    entry = {
        "step_s": median(max(of_ranks) for of_ranks in zip(*(one.seconds for one in steps), strict=True)),
        "compute_s": max(one.compute for one in steps),
        "exchanges": float(max(one.exchanges for one in steps)),
        "message_bytes": max(one.message_bytes for one in steps),
    }
    if cluster.size > 1:
        walls = []
        for _ in range(rounds):
            turns = cluster.run(
                ranks.granularity_seconds, entry["message_bytes"], STEPS, list(SIZES), deadline=DEADLINE
            )
            walls.append([max(seconds) for seconds in zip(*turns, strict=True)])
        drawn = curve("stencil_1d", "world", cluster.size, STEPS * cluster.size, walls, SIZES, 1e6)
        if drawn.metg is not None:  # else even the shortest tasks keep half the rate
            entry["metg_s"] = drawn.metg
    return entry


def ends(points: Sequence[dict[str, float]]) -> dict[str, float | None]:
    """Where scaling ends, in ranks: efficiency crosses one half, and the limit line crosses ideal scaling."""
    one = points[0]["step_s"]
    efficiency = [(int(point["ranks"]), one / point["ranks"] / point["step_s"]) for point in points]
    # The limit line over ideal scaling: METG x exchanges over one / ranks.
    limit = [
        (int(point["ranks"]), point["metg_s"] * point["exchanges"] * point["ranks"] / one)
        for point in points
        if "metg_s" in point
    ]
    measured, predicted = crossing(efficiency, 0.5), crossing(limit, 1.0)
    ratio = predicted / measured if measured and predicted else None
    fastest = min(points, key=lambda point: point["step_s"])["ranks"]
    return {
        "one_rank_s": one,
        "fastest_ranks": fastest,
        "measured_end": measured,
        "predicted_end": predicted,
        "predicted_over_measured": ratio,
    }


def crossing(points: Points, level: float) -> float | None:
    """Ranks at which a curve first crosses ``level``, in logarithms. Before the first point and after the last, the
    nearest two are extended, by a factor of two at most.

    >>> crossing([(1, 1.0), (2, 0.8), (4, 0.4)], 0.8), crossing([(2, 1.5), (4, 3.0)], 1.0)
    (2.0, 1.33)
    """
    if len(points) < 2:
        return None
    for (left, low), (right, high) in pairwise(points):
        if min(low, high) <= level <= max(low, high):
            return _between(left, low, right, high, level)
    first, last = _between(*points[0], *points[1], level), _between(*points[-2], *points[-1], level)
    if points[0][0] / 2 <= first <= points[0][0]:
        return first
    return last if points[-1][0] <= last <= 2 * points[-1][0] else None


def _between(left: float, low: float, right: float, high: float, level: float) -> float:
    if low == high:
        return math.inf
    return round(left * (right / left) ** (math.log(level / low) / math.log(high / low)), 2)
