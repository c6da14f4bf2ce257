"""Cut points for unequal devices: each rank gets what it finishes in the same time, solved, not guessed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ..arrangement import DATA
from ..errors import PlanError


def axis_speeds(sizes: Mapping[str, int], speeds: Sequence[float]) -> dict[str, list[float]]:
    """For each mesh axis the speed of every place on it: that of the slowest rank there."""
    if len(speeds) != math.prod(sizes.values()) or not all(0 < speed < math.inf for speed in speeds):
        raise PlanError(
            f"{len(speeds)} speeds for {math.prod(sizes.values())} devices: give one positive number for each rank, "
            "such as 2,1 for two"
        )
    found = {axis: [math.inf] * size for axis, size in sizes.items()}
    for rank, speed in enumerate(speeds):
        rest = rank
        for axis in reversed(list(sizes)):
            rest, place = divmod(rest, sizes[axis])
            found[axis][place] = min(found[axis][place], speed)
    return found


def balanced_points(
    size: int, speeds: Sequence[float], seconds: Callable[[float], float], multiple: int = 1
) -> tuple[int, ...]:
    """Cut points of a dim of ``size`` that minimise the time of the slowest rank.

    ``seconds(share)`` is what a device of speed 1 takes for a share of the dim. The time within which all can be done
    is found by bisection; leftover elements go to the rank that finishes first.
    """
    blocks = -(-size // multiple)
    if len(speeds) > blocks:
        raise PlanError(f"{size} elements at multiples of {multiple} cannot be cut over {len(speeds)} devices")

    def within(limit: float) -> list[int]:
        return [_most(blocks, lambda n, speed=speed: seconds(n / blocks) / speed <= limit) for speed in speeds]  # type: ignore[misc]

    low, high = 0.0, seconds(1.0) / min(speeds)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(within(middle)) >= blocks else (middle, high)
    parts = [max(1, part) for part in within(high)]
    while sum(parts) > blocks:
        slowest = max(
            (n for n, part in enumerate(parts) if part > 1), key=lambda n: seconds(parts[n] / blocks) / speeds[n]
        )
        parts[slowest] -= 1
    while sum(parts) < blocks:
        fastest = min(range(len(parts)), key=lambda n: seconds((parts[n] + 1) / blocks) / speeds[n])
        parts[fastest] += 1
    points = [0]
    for part in parts:
        points.append(min(size, points[-1] + part * multiple))
    return tuple(points)


def _most(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` for which a monotone condition holds; 0 if none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def uneven_points(
    sizes: Mapping[str, int],
    volume: Mapping[str, int],
    speeds: Sequence[float],
    seconds: Callable[[str, float], float],
    multiple: int = 1,
) -> dict[str, tuple[int, ...]]:
    """Cut points by mesh axis, where the ranks along it differ in speed. The data axis stays even.

    ``seconds(axis, share)`` is what a device of speed 1 takes for a share of that axis.
    """
    by_axis = axis_speeds(sizes, speeds)
    return {
        axis: balanced_points(volume[axis], along, partial(seconds, axis), multiple)
        for axis, along in by_axis.items()
        if axis != DATA and sizes[axis] > 1 and len(set(along)) > 1
    }
