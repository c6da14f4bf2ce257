"""``bench collectives``: the same sum over ranks by several ways, side by side. On an emulated cluster and on loopback.

In every round each way has its turn, another one first each time, so that noise hits all alike. A figure is the median
over rounds of the slowest rank's seconds; a speed-up is over what torch does with gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from statistics import median
from typing import Any

from halocline.errors import HaloclineError
from halocline.testing.pool import RankPool

from . import collectives_ranks as ranks
from .cluster import Cluster, check_possible
from .collectives_ranks import FLAT, OWN_SCATTER, TORCH_SCATTER, WORLD
from .machine import Others, describe
from .topology import Placement

DEADLINE = 120.0  # seconds for one call on the ranks
SMALL = 1 << 10
SIZES = (SMALL, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
WAYS = (FLAT, "levels", "leaders:1", "leaders:2", "doubling", "auto")
DOUBLING_UP_TO = 1 << 20  # bytes: beyond, it only shows how slow it is
PARTS = ("block", "cyclic", "rails", "scatter", "loopback")
MPI = "mpi"  # the world over MPI, where mpi4py is installed

Say = Callable[[str], None]


@dataclass(frozen=True)
class SpeedupTarget:
    """The speed-up that a way is to have over torch's."""

    part: str
    size: int
    ways: tuple[str, ...]  # the best of them counts
    least: float
    ranks: int = 0  # of those parts that have several numbers of them


TARGETS = (
    SpeedupTarget("block", 1 << 24, ("levels", "auto"), 1.08),
    SpeedupTarget("block", 1 << 26, ("levels", "auto"), 1.1),
    SpeedupTarget("cyclic", 1 << 24, ("levels", "auto"), 2.0),
    SpeedupTarget("cyclic", 1 << 26, ("levels", "auto"), 2.0),
    SpeedupTarget("rails", 1 << 24, ("levels", "auto"), 1.9),
    SpeedupTarget("rails", 1 << 26, ("levels", "auto"), 1.9),
    SpeedupTarget("scatter", 1 << 24, (OWN_SCATTER,), 1.8),
    SpeedupTarget("scatter", 1 << 26, (OWN_SCATTER,), 1.8),
    SpeedupTarget("loopback", SMALL, (WORLD, MPI), 5.0, 4),
    SpeedupTarget("loopback", SMALL, (WORLD, MPI), 10.0, 8),
)


@dataclass(frozen=True)
class CollectivesPlan:
    """What is measured, and how thoroughly."""

    parts: tuple[str, ...] = PARTS
    nodes: int = 4
    rounds: int = 7
    quick: bool = False

    def check(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise HaloclineError(f"there is no part {part!r}; give some of {', '.join(PARTS)}")
        if self.nodes < 2:
            raise HaloclineError(f"{self.nodes} nodes sum nothing over links; give two or more")
        if self.parts != ("loopback",):
            check_possible()

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for size in SIZES if not self.quick or size in (SMALL, 1 << 20, 1 << 24))

    @property
    def stream(self) -> int:
        """Small sums in a row, of which one's time is the mean."""
        return 40 if self.quick else 200


@dataclass
class CollectiveCase:
    """One way at one size; seconds by round."""

    part: str
    ranks: int
    size: int
    way: str
    rounds: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return median(self.rounds)


Run = Callable[..., list[Any]]


def measure_collectives(plan: CollectivesPlan, say: Say = lambda text: None) -> dict[str, Any]:
    plan.check()
    cases: list[CollectiveCase] = []
    shares: list[float | None] = []
    for part in plan.parts:
        measure = {"loopback": measure_loopback, "rails": measure_rails, "scatter": measure_scatter}.get(part)
        found, share = measure(plan, say) if measure is not None else measure_placement(plan, part, say)
        cases += found
        shares.append(share)
    others = max((share for share in shares if share is not None), default=None)
    facts = {"nodes": plan.nodes, "rounds": plan.rounds, "quick": plan.quick, "machine": describe(others)}
    return {**summary(cases), **facts}


# ---- parts ----

Found = tuple[list[CollectiveCase], float | None]  # and what others took of the cores


def measure_placement(plan: CollectivesPlan, placement: Any, say: Say) -> Found:
    """Two ranks on each node."""
    chosen: Placement = placement
    with Cluster(plan.nodes, 2, "1gbit", chosen, collective_timeout=DEADLINE) as cluster:
        return _measured(plan, cluster.run, chosen, WAYS, plan.sizes, say)


def measure_rails(plan: CollectivesPlan, say: Say) -> Found:
    """Two network cards a node, of half the rate each."""
    sizes = [size for size in plan.sizes if size >= 1 << 20]
    with Cluster(plan.nodes, 1, "500mbit", rails=2, collective_timeout=DEADLINE) as cluster:
        return _measured(plan, cluster.run, "rails", (FLAT, "levels", "auto"), sizes, say)


def measure_scatter(plan: CollectivesPlan, say: Say) -> Found:
    sizes = [size for size in plan.sizes if size >= 1 << 20]
    with Cluster(plan.nodes, 1, "1gbit", collective_timeout=DEADLINE) as cluster:
        return _measured(plan, cluster.run, "scatter", (TORCH_SCATTER, OWN_SCATTER), sizes, say)


def _measured(plan: CollectivesPlan, run: Run, part: str, ways: Sequence[str], sizes: Sequence[int], say: Say) -> Found:
    say(f"{part}: starting")
    run(ranks.prepare, list(ways), deadline=DEADLINE)
    for way in ways:
        if not all(run(ranks.check, way, 4 * 105_000, deadline=DEADLINE)):
            raise HaloclineError(f"{part}: {way} does not give the sum; that is a mistake of the library")
    others, cases = Others(run), list[CollectiveCase]()
    for size in sizes:
        taking_part = [way for way in ways if way != "doubling" or size <= DOUBLING_UP_TO]
        count = len(run(ranks.measure, ways[0], size, 1, deadline=DEADLINE))
        by_way = {way: CollectiveCase(part, count, size, way) for way in taking_part}
        for number in range(plan.rounds):
            say(f"{part}, {size_words(size)}: round {number + 1} of {plan.rounds}")
            at = number % len(taking_part)
            for way in taking_part[at:] + taking_part[:at]:
                by_rank = run(ranks.measure, way, size, _repeat(size), deadline=DEADLINE)
                by_way[way].rounds.append(median(max(taken) for taken in zip(*by_rank, strict=True)))
        cases += by_way.values()
    share = others.share()
    run(ranks.drop, deadline=DEADLINE)
    return cases, share


def _repeat(size: int) -> int:
    """Small ones are over soon, and vary more."""
    return 1 if size >= 1 << 24 else 5


def measure_loopback(plan: CollectivesPlan, say: Say) -> Found:
    """Small sums in a row on this machine alone: what agreements among ranks cost."""
    cases: list[CollectiveCase] = []
    shares = []
    for count in (4, 8):
        by_way = {way: CollectiveCase("loopback", count, SMALL, way) for way in (FLAT, WORLD)}
        with RankPool(count, collective_timeout=DEADLINE) as pool:
            pool.run(ranks.prepare, [FLAT, WORLD], deadline=DEADLINE)
            others = Others(pool.run)
            for number in range(plan.rounds):
                say(f"loopback, {count} ranks: round {number + 1} of {plan.rounds}")
                for way, case in by_way.items():
                    case.rounds.append(max(pool.run(ranks.stream, way, SMALL, plan.stream, deadline=DEADLINE)))
            shares.append(others.share())
        cases += [*by_way.values(), *_over_mpi(plan, count, say)]
    return cases, max((share for share in shares if share is not None), default=None)


def _over_mpi(plan: CollectivesPlan, count: int, say: Say) -> list[CollectiveCase]:
    """The same sums in the world over MPI, if there is one here."""
    if find_spec("mpi4py") is None:
        return []
    from halocline.testing.mpi_place import MpiPlace

    say(f"loopback, {count} ranks over MPI")
    case = CollectiveCase("loopback", count, SMALL, MPI)
    with RankPool(count, collective_timeout=DEADLINE, place=MpiPlace()) as pool:
        for _ in range(plan.rounds):
            case.rounds.append(max(pool.run(ranks.stream, WORLD, SMALL, plan.stream, deadline=DEADLINE)))
    return [case]


# ---- what is made of it ----


def summary(cases: Sequence[CollectiveCase]) -> dict[str, Any]:
    """With every target that something was measured for."""
    base = {(case.part, case.ranks, case.size): case.seconds for case in cases if case.way in (FLAT, TORCH_SCATTER)}
    shown = [_as_json(case, base[case.part, case.ranks, case.size]) for case in cases]
    return {"cases": shown, "targets": [met for target in TARGETS if (met := judged(target, shown)) is not None]}


def _as_json(case: CollectiveCase, base: float) -> dict[str, Any]:
    return {
        "part": case.part,
        "ranks": case.ranks,
        "bytes": case.size,
        "way": case.way,
        "seconds": case.seconds,
        "least_s": min(case.rounds),
        "most_s": max(case.rounds),
        "speedup": base / case.seconds,
    }


def judged(target: SpeedupTarget, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    verdicts = [
        case["speedup"]
        for case in cases
        if (case["part"], case["bytes"]) == (target.part, target.size)
        and case["way"] in target.ways
        and target.ranks in (0, case["ranks"])
    ]
    if not verdicts:
        return None
    name = f"{target.part}{f', {target.ranks} ranks' if target.ranks else ''}, {size_words(target.size)}"
    return {"name": name, "speedup": max(verdicts), "least": target.least, "met": max(verdicts) >= target.least}


def size_words(size: int) -> str:
    """
    >>> size_words(1 << 24), size_words(1 << 10)
    ('16 MB', '1 KB')
    """
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"
