"""Task graphs: rows of tasks, each of which needs outputs of the row before. The patterns are those of Task Bench.

Slaughter et al., "Task Bench: A Parameterized Benchmark for Evaluating Parallel Runtime Performance", SC20.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import HaloclineError, did_you_mean

KERNELS = ("empty", "busy_wait", "compute_bound", "memory_bound", "load_imbalance", "sleep")
PAIR = 16  # bytes of a row and a column, the least that an output holds
_PERIOD = 3  # rows after which the edges of ``spread`` and ``random_nearest`` repeat
_FRACTION = 0.25  # of its window that a task of ``random_nearest`` keeps


class TaskBenchError(HaloclineError):
    """A graph or a runtime that cannot be measured as asked, or a task whose inputs are wrong."""


@dataclass(frozen=True)
class TaskGraph:
    """``steps`` rows of ``width`` tasks; every edge carries ``output_bytes``.

    ``radix`` is the number of inputs in patterns that let one choose. ``number`` tells graphs that run at once apart.
    ``imbalance`` spreads the work of ``load_imbalance`` over 1 +- imbalance / 2.

    >>> TaskGraph("stencil_1d", steps=4, width=8).dependencies(1, 0)
    (0, 1)
    """

    pattern: str
    steps: int = 100
    width: int = 8
    radix: int = 5
    output_bytes: int = PAIR
    kernel: str = "compute_bound"
    imbalance: float = 1.0
    number: int = 0

    def __post_init__(self) -> None:
        for name, value, known in (("pattern", self.pattern, PATTERNS), ("kernel", self.kernel, KERNELS)):
            if value not in known:
                raise TaskBenchError(f"no {name} {value!r}{did_you_mean(value, known)}; it is {', '.join(known)}")
        if self.steps < 2 or self.width < 1 or self.radix < 1:
            raise TaskBenchError(f"a graph has 2 steps or more, and width and radix from 1; got {self}")
        if self.output_bytes < PAIR or self.output_bytes % PAIR:
            raise TaskBenchError(f"an output holds pairs of {PAIR} bytes; {self.output_bytes} bytes do not fit")

    @property
    def grid(self) -> tuple[int, int, int]:
        """Depth, height and width of ``stencil_3d``: factors of the width of the graph, as equal as they can be."""
        return min(
            ((a, b, self.width // a // b) for a in _divisors(self.width) for b in _divisors(self.width // a)),
            key=lambda sides: (max(sides) - min(sides), *(-side for side in sides)),
        )

    def columns(self, step: int) -> range:
        """The tasks of a row. Only ``tree`` grows and ``dom`` grows and shrinks."""
        if self.pattern == "tree":
            return range(min(self.width, 1 << min(step, 62)))
        if self.pattern == "dom":
            first = max(0, step + self.width - self.steps)
            return range(first, first + min(self.width, step + 1, self.steps - step))
        return range(self.width)

    def phase(self, step: int) -> int:
        """Rows of the same phase, with the same columns before and at them, have the same edges."""
        if self.pattern == "fft":
            stages = self.stages
            return (step + stages - 1) % stages
        return step % _PERIOD if self.pattern in ("spread", "random_nearest") else 0

    @property
    def stages(self) -> int:
        """Rows of ``fft`` until a task depends on all of the first."""
        return max(1, (self.width - 1).bit_length())

    def dependencies(self, step: int, column: int) -> tuple[int, ...]:
        """Columns of the row before that a task needs, in order; none for those of the first row."""
        if step == 0:
            return ()
        before = self.columns(step - 1)
        return tuple(
            sorted({each for each in PATTERNS[self.pattern](self, self.phase(step), column) if each in before})
        )

    def tasks(self) -> int:
        """Of all rows."""
        return sum(len(self.columns(step)) for step in range(self.steps))

    def share(self, step: int, column: int) -> float:
        """Of the iterations asked for that a task does: 1 unless the load is imbalanced."""
        if self.kernel != "load_imbalance":
            return 1.0
        return 1.0 + (_uniform(self.number, step, column) - 0.5) * self.imbalance


def _window(graph: TaskGraph, phase: int, column: int) -> range:
    """``radix`` columns around the task's own; those outside the row are dropped later."""
    return range(column - graph.radix // 2, column + (graph.radix - 1) // 2 + 1)


def _spread(graph: TaskGraph, phase: int, column: int) -> list[int]:
    """``radix`` columns at equal distances, which shift from row to row."""
    width, radix = graph.width, graph.radix
    return [(column + k * width // radix + (phase if k else 0)) % width for k in range(radix)]


def _some_of_window(graph: TaskGraph, phase: int, column: int) -> list[int]:
    """A random part of the window, the same on every rank: drawn by graph, phase and columns alone."""
    return [
        each
        for each in _window(graph, phase, column)
        if each == column or _uniform(graph.number, graph.radix, phase, column, each) < _FRACTION
    ]


def _faces(graph: TaskGraph, phase: int, column: int) -> list[int]:
    """The task itself and its six neighbours on the grid."""
    depth, height, width = graph.grid
    plane, place = divmod(column, height * width)
    line, cell = divmod(place, width)
    found = [column]
    for shift in (-1, 1):
        found += [column + shift * height * width] if 0 <= plane + shift < depth else []
        found += [column + shift * width] if 0 <= line + shift < height else []
        found += [column + shift] if 0 <= cell + shift < width else []
    return found


Edges = Callable[[TaskGraph, int, int], "list[int] | tuple[int, ...] | range"]
PATTERNS: dict[str, Edges] = {
    "trivial": lambda graph, phase, i: (),
    "no_comm": lambda graph, phase, i: (i,),
    "stencil_1d": lambda graph, phase, i: (i - 1, i, i + 1),
    "stencil_1d_periodic": lambda graph, phase, i: ((i - 1) % graph.width, i, (i + 1) % graph.width),
    "dom": lambda graph, phase, i: (i - 1, i),
    "tree": lambda graph, phase, i: (i // 2,),
    "fft": lambda graph, phase, i: (i - (1 << phase), i, i + (1 << phase)),
    "all_to_all": lambda graph, phase, i: range(graph.width),
    "nearest": _window,
    "spread": _spread,
    "random_nearest": _some_of_window,
    "stencil_3d": _faces,
}


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _uniform(*key: int) -> float:
    """A number in [0, 1) that depends on ``key`` alone, and on every bit of it."""
    value = zlib.crc32(repr(key).encode())
    return (value * 2654435761 & 0xFFFFFFFF) / 2**32
