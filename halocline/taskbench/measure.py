"""Every runtime on every pattern, in turns, so that noise hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

from ..testing.mpi_place import MpiPlace
from ..testing.pool import RankPool
from . import ranks
from .central import WORKERS, seconds_of
from .execute import Fault
from .graph import TaskBenchError, TaskGraph
from .metg import Curve, curve
from .runtimes import RUNTIMES, TaskRuntime
from .sharded import unfit_for_rule

DEADLINE = 300.0  # seconds for one runtime's turn
SIZES = tuple(2**n for n in range(12, -1, -1))  # iterations
CENTRAL_SIZES = tuple(2**n for n in range(15, 5, -1))
CENTRAL_STEPS = 10  # a central runtime has at most so many rows
PEAK_CALLS = 20  # of the kernel alone, of the largest size
#: Tells what is measured: the pattern, the runtime, and the share that is done.
Tell = Callable[[str, str, float], None]


@dataclass(frozen=True)
class TaskBenchSettings:
    """What is asked for: ``graphs`` graphs at once of each pattern, on so many ranks, in so many rounds."""

    patterns: tuple[str, ...]
    runtimes: tuple[TaskRuntime, ...]
    ranks: int = 2
    steps: int = 100
    width: int = 0  # 0: one task a rank
    radix: int = 5
    output_bytes: int = 16
    kernel: str = "compute_bound"
    imbalance: float = 1.0
    graphs: int = 1
    rounds: int = 5
    fault: Fault | None = None

    def graphs_of(self, runtime: TaskRuntime, pattern: str) -> list[TaskGraph]:
        """The graphs that run at once; those of a central runtime have fewer rows."""
        made = TaskGraph(
            pattern,
            min(self.steps, CENTRAL_STEPS) if runtime.place in WORKERS else self.steps,
            self.width or self.ranks,
            self.radix,
            self.output_bytes,
            self.kernel,
            self.imbalance,
        )
        return [replace(made, number=number) for number in range(self.graphs)]

    def tasks(self, runtime: TaskRuntime, pattern: str) -> int:
        """Of all graphs."""
        return sum(graph.tasks() for graph in self.graphs_of(runtime, pattern))


@dataclass(frozen=True)
class TaskBenchResult:
    """The curves, why some runtimes have none on some patterns, and the best rate of a core."""

    curves: tuple[Curve, ...]
    skipped: tuple[tuple[str, str, str], ...]  # pattern, runtime, reason
    best: float  # iterations a second

    def metg(self, pattern: str, runtime: str) -> float | None:
        """Seconds; None where there is none."""
        return next((c.metg for c in self.curves if (c.pattern, c.runtime) == (pattern, runtime)), None)


Turn = Callable[[str, str], list[float]]  # one round of a pattern on a runtime: seconds by size
Walls = dict[tuple[str, str], list[list[float]]]  # by pattern and runtime: those of each round


def measure(settings: TaskBenchSettings, tell: Tell = lambda pattern, runtime, share: None) -> TaskBenchResult:
    """Run every runtime on every pattern ``rounds`` times, and find METG. Raises where a task has a wrong input."""
    reasons = {
        (pattern, runtime.name): runtime.absent() or _unfit(settings, runtime, pattern)
        for pattern in settings.patterns
        for runtime in settings.runtimes
    }
    walls: Walls = {key: [] for key, reason in reasons.items() if not reason}
    best, done = 0.0, 0
    for place in dict.fromkeys(RUNTIMES[name].place for _, name in walls):
        here = [key for key in walls if RUNTIMES[key[1]].place == place]
        with _started(settings, place) as (turn, rate_alone):
            best = max(best, rate_alone)
            for pattern in settings.patterns:
                for _ in range(settings.rounds):
                    for key in [key for key in here if key[0] == pattern]:
                        tell(*key, done / (len(walls) * settings.rounds))
                        walls[key].append(turn(*key))
                        done += 1
    best = max([best, *(_best_rate(settings, *key, rounds) for key, rounds in walls.items())])
    curves = tuple(_curve(settings, *key, rounds, best) for key, rounds in walls.items())
    return TaskBenchResult(curves, tuple((*key, reason) for key, reason in reasons.items() if reason), best)


def _unfit(settings: TaskBenchSettings, runtime: TaskRuntime, pattern: str) -> str:
    """Why a runtime cannot run a pattern; empty if it can. Raises TaskBenchError for a graph that cannot be."""
    graph = settings.graphs_of(runtime, pattern)[0]
    if graph.width < settings.ranks:
        raise TaskBenchError(f"--width {graph.width} leaves some of {settings.ranks} ranks without a task")
    return unfit_for_rule(graph, settings.ranks) if runtime.name.startswith("tensor") else ""


@contextmanager
def _started(settings: TaskBenchSettings, place: str) -> Iterator[tuple[Turn, float]]:
    """The processes of a place, and the iterations a second that each core reaches there with all at work."""
    if place in WORKERS:
        with WORKERS[place](settings.ranks) as (submit, wait):

            def central_turn(pattern: str, runtime: str) -> list[float]:
                graphs = settings.graphs_of(RUNTIMES[runtime], pattern)
                return [seconds_of(submit, wait, graphs, size) for size in CENTRAL_SIZES]

            central_turn(settings.patterns[0], place)
            yield central_turn, 0.0
        return
    with RankPool(settings.ranks, place=MpiPlace() if place == "mpi" else None) as pool:

        def turn(pattern: str, runtime: str) -> list[float]:
            graphs = settings.graphs_of(RUNTIMES[runtime], pattern)
            of_ranks = pool.run(ranks.seconds_of, runtime, graphs, SIZES, settings.fault, deadline=DEADLINE)
            return [max(seconds) for seconds in zip(*of_ranks, strict=True)]

        alone = [
            max(pool.run(ranks.kernel_seconds, settings.kernel, SIZES[0], PEAK_CALLS, deadline=DEADLINE))
            for _ in range(settings.rounds)
        ]
        yield turn, SIZES[0] * PEAK_CALLS / median(alone)


def _sizes(runtime: str) -> tuple[int, ...]:
    """Iterations of a task, from many to few; central schedulers cannot reach the smallest in reasonable time."""
    return CENTRAL_SIZES if RUNTIMES[runtime].place in WORKERS else SIZES


def _best_rate(settings: TaskBenchSettings, pattern: str, runtime: str, rounds: Sequence[Sequence[float]]) -> float:
    """Iterations a second and rank in the best size, by the median of its rounds."""
    tasks = settings.tasks(RUNTIMES[runtime], pattern)
    usual = [median(column) for column in zip(*rounds, strict=True)]
    return max(size * tasks / settings.ranks / wall for size, wall in zip(_sizes(runtime), usual, strict=True))


def _curve(
    settings: TaskBenchSettings, pattern: str, runtime: str, rounds: Sequence[Sequence[float]], best: float
) -> Curve:
    tasks = settings.tasks(RUNTIMES[runtime], pattern)
    return curve(pattern, runtime, settings.ranks, tasks, rounds, _sizes(runtime), best)
