"""Which modules recompute their activations: the least work that makes a step fit, by dynamic programming."""

from __future__ import annotations

from collections.abc import Mapping

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
    """The blocks whose recomputation frees ``wanted`` bytes in the least seconds; None where all do not free enough.

    ``costs`` holds forward seconds and kept bytes by block. While one block is recomputed its activations are there
    again, so the largest of those chosen is added to what must be freed.
    """
    wanted += max((kept for _, kept in costs.values()), default=0)
    if sum(kept for _, kept in costs.values()) < wanted:
        return None
    cells = max(CELLS, 10 * len(costs))
    unit = max(1, wanted // cells)
    never: tuple[float, tuple[str, ...]] = (float("inf"), ())
    best = [(0.0, never[1]), *[never] * cells]
    for path, (seconds, kept) in costs.items():
        step = kept // unit  # rounded down: what is promised is freed
        for cell in range(cells, 0, -1):
            before = best[max(0, cell - step)]
            if step and before[0] + seconds < best[cell][0]:
                best[cell] = before[0] + seconds, (*before[1], path)
    return best[cells][1] if best[cells][0] < float("inf") else tuple(costs)
