"""Where a dim is cut: rank ``i`` of an axis owns ``[points[i], points[i + 1])``, which may be empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ShardingError
from .interval import Interval


@dataclass(frozen=True)
class Partition:
    """Where a dim is cut: ``parts`` pieces between ``points``, in order, some possibly empty."""

    points: tuple[int, ...]

    def __post_init__(self) -> None:
        ordered = all(a <= b for a, b in zip(self.points, self.points[1:], strict=False))
        if len(self.points) < 2 or self.points[0] != 0 or not ordered:
            raise ShardingError(f"cut points {self.points} must start at 0 and never fall; give one more than ranks")

    @property
    def size(self) -> int:
        """Of the whole dim."""
        return self.points[-1]

    @property
    def parts(self) -> int:
        """How many pieces."""
        return len(self.points) - 1

    def piece(self, index: int) -> Interval:
        """One of them, by its number along the axis."""
        return Interval(self.points[index], self.points[index + 1])

    def pieces(self) -> tuple[Interval, ...]:
        """All of them."""
        return tuple(self.piece(i) for i in range(self.parts))

    @classmethod
    def even(cls, size: int, parts: int, multiple: int = 1) -> Partition:
        """As equal as can be, every cut a multiple of ``multiple`` (the total stride of a network makes joins free).

        >>> Partition.even(40, 3).points, Partition.even(40, 3, multiple=8).points
        ((0, 14, 27, 40), (0, 16, 32, 40))
        """
        blocks = -(-size // multiple)
        quotient, rest = divmod(blocks, parts)
        cuts = (min(size, multiple * (i * quotient + min(i, rest))) for i in range(parts + 1))
        return cls(tuple(cuts))

    @classmethod
    def weighted(cls, size: int, weights: Sequence[float], multiple: int = 1) -> Partition:
        """Pieces in proportion to ``weights``: the share of work each rank can bear."""
        total, passed, points = float(sum(weights)), 0.0, [0]
        for weight in weights[:-1]:
            passed += weight
            points.append(min(size, multiple * round(size * passed / total / multiple)))
        return cls((*points, size))

    @classmethod
    def from_sizes(cls, sizes: Sequence[int]) -> Partition:
        """Pieces of these sizes, side by side."""
        points = [0]
        for size in sizes:
            points.append(points[-1] + size)
        return cls(tuple(points))
