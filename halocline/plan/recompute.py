"""Which modules recompute their activations: the least work that makes a step fit, by dynamic programming."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import nn

CELLS = 400  # of the grid of bytes, at least; ten for each kind of block


def blocks(model: nn.Module) -> list[str]:
    """Paths of the parts that a network is made of: children with parts of their own; lists by their entries."""
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            below = f"{path}.{name}" if path else name
            parts = list(child.children())
            of_lists = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if of_lists or (isinstance(child, nn.Sequential) and sum(bool(list(p.children())) for p in parts) > 1):
                visit(child, below)
            elif parts:
                found.append(below)

    visit(model, "")
    return found


class BlockKind(NamedTuple):
    """Blocks that cost the same: seconds of forward and bytes kept for backward of each, and their paths."""

    seconds: float
    kept: int
    paths: tuple[str, ...]


class Recomputation(NamedTuple):
    """Blocks that recompute, the seconds that this takes, and the bytes that it frees at the peak."""

    paths: tuple[str, ...]
    seconds: float
    freed: int


def least_work(kinds: Sequence[BlockKind], wanted: int) -> Recomputation | None:
    """The blocks whose recomputation frees ``wanted`` bytes in the least seconds; None if all of them do not suffice.

    While one block is recomputed its activations are there again, so the largest of those chosen is added to what must
    be freed. Of equal blocks only the number matters: they enter the dynamic program in packs of 1, 2, 4, ....
    """
    wanted += max((kind.kept for kind in kinds), default=0)
    if sum(kind.kept * len(kind.paths) for kind in kinds) < wanted:
        return None
    cells = max(CELLS, 10 * len(kinds))
    unit = -(-wanted // cells)
    least = np.full(cells + 1, np.inf)  # seconds in which so many units are freed
    least[0] = 0.0
    taken: list[tuple[int, int, int, np.ndarray[Any, np.dtype[np.bool_]]]] = []
    for number, kind in enumerate(kinds):
        for count in packs(len(kind.paths)):
            step = count * kind.kept // unit  # rounded down: what is promised is freed
            if step:
                head = np.full(min(step, cells + 1), least[0])
                with_it = np.concatenate([head, least[: max(0, cells + 1 - step)]]) + count * kind.seconds
                with_it[0] = np.inf
                taken.append((number, count, step, with_it < least))
                least = np.minimum(least, with_it)
    if not np.isfinite(least[cells]):
        return _recomputed([(kind, len(kind.paths)) for kind in kinds])
    cell, counts = cells, Counter[int]()
    for number, count, step, better in reversed(taken):
        if better[cell]:
            counts[number] += count
            cell = max(0, cell - step)
    return _recomputed([(kind, counts[number]) for number, kind in enumerate(kinds) if counts[number]])


def packs(count: int) -> Iterator[int]:
    """Numbers 1, 2, 4, ... and a rest: sums of some of them give every number up to ``count``, and no larger one."""
    size = 1
    while count > 0:
        yield min(size, count)
        count, size = count - size, 2 * size


def _recomputed(chosen: Sequence[tuple[BlockKind, int]]) -> Recomputation:
    freed = sum(kind.kept * count for kind, count in chosen) - max(kind.kept for kind, _ in chosen)
    paths = tuple(path for kind, count in chosen for path in kind.paths[:count])
    return Recomputation(paths, sum(kind.seconds * count for kind, count in chosen), freed)
