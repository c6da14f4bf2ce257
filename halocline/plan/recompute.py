"""Which modules recompute their activations: the least work that makes a step fit, by dynamic programming."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

CELLS = 400  # of the grid of bytes, at least; ten for each block


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


def least_work(costs: Mapping[str, tuple[float, int]], wanted: int) -> tuple[str, ...] | None:
    """The blocks whose recomputation frees ``wanted`` bytes in the least seconds; None if all of them do not suffice.

    ``costs`` holds forward seconds and kept bytes by block. While one block is recomputed its activations are there
    again, so the largest of those chosen is added to what must be freed.
    """
    wanted += max((kept for _, kept in costs.values()), default=0)
    if sum(kept for _, kept in costs.values()) < wanted:
        return None
    cells = max(CELLS, 10 * len(costs))
    unit = max(1, wanted // cells)
    least = np.full(cells + 1, np.inf)  # seconds in which so many units are freed
    least[0] = 0.0
    taken: list[tuple[str, int, np.ndarray[Any, np.dtype[np.bool_]]]] = []
    for path, (seconds, kept) in costs.items():
        step = kept // unit  # rounded down: what is promised is freed
        if step:
            with_it = (
                np.concatenate([np.full(min(step, cells + 1), least[0]), least[: max(0, cells + 1 - step)]]) + seconds
            )
            with_it[0] = np.inf
            taken.append((path, step, with_it < least))
            least = np.minimum(least, with_it)
    if not np.isfinite(least[cells]):
        return tuple(costs)
    cell, chosen = cells, list[str]()
    for path, step, better in reversed(taken):
        if better[cell]:
            chosen.append(path)
            cell = max(0, cell - step)
    return tuple(reversed(chosen))
