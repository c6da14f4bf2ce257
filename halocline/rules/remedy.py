"""What to do where a dim must be whole and is cut: gather it, or shuffle the cut to another dim while the call runs.

A gather leaves every rank with the whole dim, and with the same work. A shuffle (an all-to-all there and back) leaves
the tensor as large as it was on each rank, and the work divided. The cheaper is taken, counted in elements moved and
computed, unless :func:`remedy` says which.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod

from ..choices import Choices
from ..geometry import Partition, plan_transfer
from ..tensor import Cut, Fetch, Sharding, here, recut
from ..world import Mesh
from .recipe import Output, Recipe

_now = threading.local()
forcing: list[str] = []  # empty while no thread forces anything: the quick question


def forced() -> str | None:
    """The remedy asked for in this thread, if any."""
    return getattr(_now, "name", None)


def choices_here(mesh: Mesh) -> Choices:
    """Those of the mesh for the module that runs, with the remedy asked for in this thread."""
    choices = mesh.choices.inside(here()) if mesh.choices.at else mesh.choices
    return replace(choices, remedy=forced()) if forced() else choices


@contextmanager
def remedy(name: str) -> Iterator[None]:
    """Inside, operations that need a cut dim whole go this way where they can: "gather", "shuffle" or "ring".

    "ring" is for attention over cut tokens, where keys and values go round; elsewhere it leaves the choice as it is.
    """
    Choices(remedy=name)  # or says that there is none of that name
    before, _now.name = forced(), name
    forcing.append(name)
    try:
        yield
    finally:
        forcing.pop()
        _now.name = before


def lost_axes(recipe: Recipe, shardings: Sequence[Sharding], cuts: dict[int, Cut]) -> dict[str, tuple[int, Cut]]:
    """Axes that cut a dim which must be whole, and no other dim of the work: where, and how."""
    kept = {cut.axis for cut in cuts.values()}
    return {
        cut.axis: (link.dim, cut)
        for read in recipe.reads
        for link, cut in zip(read.links, shardings[read.operand.index].cuts, strict=True)
        if cut is not None and cut.axis not in kept and link.dim in recipe.uncut
        if link.dim is not None
    }


def shuffled(mesh: Mesh, recipe: Recipe, cuts: dict[int, Cut], lost: dict[str, tuple[int, Cut]]) -> dict[int, Cut]:
    """The cuts with each lost axis on another dim that every result has; without those for which there is none."""
    moved = dict(cuts)
    for axis in lost:
        ranks = mesh.sizes[axis]
        free = [
            dim
            for dim, size in enumerate(recipe.space)
            if size >= ranks and dim not in moved and dim not in recipe.uncut
            if all(dim in output.dims for output in recipe.outputs)
        ]
        if free:
            dim = min(free, key=lambda d: (recipe.space[d] % ranks != 0, d))  # evenly, and in few large strips
            moved[dim] = Cut(axis, Partition.even(recipe.space[dim], ranks))
    return moved


def ring_axis(
    recipe: Recipe, shardings: Sequence[Sharding], cuts: dict[int, Cut], fetches: Sequence[Fetch | None]
) -> str | None:
    """The axis that cuts all travelling operands alike, and the work; None where there is none, or more has to move."""
    steps = recipe.ring
    if steps is None or steps.along not in cuts:
        return None
    of_reads = [shardings[read.operand.index].cuts for read in recipe.reads]
    cut, axis = of_reads[-1][steps.dim], cuts[steps.along].axis
    if cut is None or cut.axis != axis or any(each[steps.dim] != cut for each in of_reads[steps.resident :]):
        return None
    for place, read in enumerate(recipe.reads):
        fetch = fetches[read.operand.index]
        ringed = steps.dim if place >= steps.resident else None
        if fetch is None or not all(move.untouched for dim, move in enumerate(fetch.dims) if dim != ringed):
            return None
    return axis


def choose_round(mesh: Mesh, recipe: Recipe, cuts: dict[int, Cut], axis: str, choices: Choices) -> str:
    """A shuffle where each rank gets as many of the dim ``instead``, else a ring for much, else a gather."""
    steps = recipe.ring
    assert steps is not None
    ranks, others = mesh.sizes[axis], recipe.space[steps.instead]
    can = {"gather": True, "ring": True, "shuffle": steps.instead not in cuts and others >= ranks}
    if choices.remedy is not None and can[choices.remedy]:
        return choices.remedy
    # Whole heads on each rank: the least data, and torch's own kernel.
    if can["shuffle"] and others % ranks == 0:
        return "shuffle"
    travelling = sum(read.operand.numel() for read in recipe.reads[steps.resident :])
    return "ring" if travelling >= choices.ring_from else "gather"


def put_back(output: Output, moved: Sharding, lost: dict[str, tuple[int, Cut]]) -> Sharding:
    """A result with each shuffled axis on the dim it came from, if it still has that dim; cut there as before."""
    cuts = list(moved.cuts)
    for axis, (dim, before) in lost.items():
        at = next((place for place, cut in enumerate(cuts) if cut and cut.axis == axis), None)
        if at is None or dim not in output.dims:
            continue
        place = output.dims.index(dim)
        # A dim that the call has resized is cut evenly.
        same = before.partition.size == output.shape[place]
        cuts[at] = None
        cuts[place] = before if same else Cut(axis, Partition.even(output.shape[place], before.partition.parts))
    return Sharding(moved.mesh, output.shape, cuts)


def cost(mesh: Mesh, fetches: Sequence[Fetch], results: Sequence[Sharding], goals: Sequence[Sharding]) -> int:
    """Elements that the first rank receives and computes. Every rank finds the same number."""
    moves = [*fetches, *(recut(a, b) for a, b in zip(results, goals, strict=True) if a is not b)]
    # The rank at the origin stands for all: ranks must not choose by their own costs.
    first = dict.fromkeys(mesh.names, 0)
    received = sum(plan_transfer(move.dims, first, mesh.rank_at).received_elements for move in moves)
    return received + sum(prod(sharding.shape) // mesh.count(sharding.axes) for sharding in results)
