"""How the space of a call is cut: as its operands are, or otherwise where a dim must be whole."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from ..choices import Choices
from ..geometry import DimMove, Interval, Partition, whole
from ..tensor import Cut, Fetch, Sharding
from ..world import Mesh
from .recipe import Read, Recipe, RingSteps, Slot
from .remedy import choose_round, cost, lost_axes, put_back, ring_axis, shuffled


class SpaceCut:
    """One way to cut the space: what it makes each operand bring, and how the results lie, at first and in the end."""

    def __init__(self, mesh: Mesh, recipe: Recipe, shardings: list[Sharding], cuts: dict[int, Cut]) -> None:
        self.shardings, self.cuts, self.in_ring = shardings, cuts, False
        work_axes = frozenset(cut.axis for cut in cuts.values())
        self.fetches: list[Fetch | None] = [None] * len(shardings)
        self.slots: list[tuple[Slot, ...]] = [()] * len(shardings)
        for read in recipe.reads:
            index = read.operand.index
            self.fetches[index], self.slots[index] = _plan_read(mesh, read, shardings[index], cuts, work_axes)
        self.results = tuple(out_sharding(mesh, output.shape, output.dims, cuts) for output in recipe.outputs)
        self.goals = self.results

    def put_back(self, recipe: Recipe, lost: dict[str, tuple[int, Cut]]) -> SpaceCut:
        """The same, whose results are handed out with each of the ``lost`` axes on the dim that it had cut."""
        goals = zip(recipe.outputs, self.results, strict=True)
        self.goals = tuple(put_back(output, result, lost) for output, result in goals)
        return self

    def cost(self, mesh: Mesh) -> int:
        """Elements that the first rank receives and computes, to compare ways by."""
        return cost(mesh, [fetch for fetch in self.fetches if fetch], self.results, self.goals)

    def cost_with_sums(self, mesh: Mesh, recipe: Recipe) -> int:
        """The same, with what a sum of the results over ranks sends and receives."""
        kept = {dim for output in recipe.outputs for dim in output.dims}
        parts = mesh.count(cut.axis for dim, cut in self.cuts.items() if dim not in kept)
        summed = sum(prod(result.shape) // mesh.count(result.axes) for result in self.results)
        return self.cost(mesh) + 2 * summed * (parts - 1) // parts


def choose_cut(mesh: Mesh, recipe: Recipe, shardings: list[Sharding], choices: Choices) -> SpaceCut:
    """Cut the space as the operands are; where a dim must be whole, choose between the remedies."""
    # Always possible: dims that must be whole are simply fetched whole.
    gather = _first_cut(mesh, recipe, shardings)
    if recipe.ring is not None and (axis := ring_axis(recipe, shardings, gather.cuts, gather.fetches)):
        return _choose_round(mesh, recipe, recipe.ring, shardings, gather, axis, choices)
    if recipe.keeps_cut:
        gather.goals = (shardings[recipe.reads[0].operand.index],)
    lost = lost_axes(recipe, shardings, gather.cuts)
    # In place, the target must stay where it lies.
    if not lost or recipe.inplace or choices.remedy == "gather":
        return gather
    shuffle = SpaceCut(mesh, recipe, shardings, shuffled(mesh, recipe, gather.cuts, lost)).put_back(recipe, lost)
    return shuffle if choices.remedy == "shuffle" or shuffle.cost(mesh) < gather.cost(mesh) else gather


def _first_cut(mesh: Mesh, recipe: Recipe, shardings: list[Sharding]) -> SpaceCut:
    """Cut as the first operand is or, in a product whose operands claim an axis for different dims, as the others are.

    The cheaper is taken: to move the weight and sum the result, or to gather the input of a weight that is cut.
    """
    first = SpaceCut(mesh, recipe, shardings, assigned_cuts(mesh, recipe, shardings))
    if recipe.combine != "sum" or recipe.inplace or len(recipe.reads) < 2:
        return first
    cuts = assigned_cuts(mesh, recipe, shardings, (*recipe.reads[1:], recipe.reads[0]))
    if cuts == first.cuts:
        return first
    other = SpaceCut(mesh, recipe, shardings, cuts)
    return other if other.cost_with_sums(mesh, recipe) < first.cost_with_sums(mesh, recipe) else first


def _choose_round(
    mesh: Mesh,
    recipe: Recipe,
    steps: RingSteps,
    shardings: list[Sharding],
    gather: SpaceCut,
    axis: str,
    choices: Choices,
) -> SpaceCut:
    """Between a gather, a shuffle to the dim ``instead``, and a ring, for operands that one axis cuts."""
    name = choose_round(mesh, recipe, gather.cuts, axis, choices)
    if name == "shuffle":
        own = gather.cuts[steps.along]
        cuts = {dim: cut for dim, cut in gather.cuts.items() if dim != steps.along}
        cuts[steps.instead] = Cut(axis, Partition.even(recipe.space[steps.instead], mesh.sizes[axis]))
        return SpaceCut(mesh, recipe, shardings, cuts).put_back(recipe, {axis: (steps.along, own)})
    gather.in_ring = name == "ring"
    return gather


def assigned_cuts(
    mesh: Mesh, recipe: Recipe, shardings: list[Sharding], reads: Sequence[Read] | None = None
) -> dict[int, Cut]:
    """Cut the space as its operands are cut.

    The first operand that speaks for an axis or a dim decides (in place, only the target speaks). ``reads`` gives
    another order of the operands.
    """
    cuts: dict[int, Cut] = {}
    taken: set[str] = set()
    for read in recipe.reads[:1] if recipe.inplace else reads or recipe.reads:
        for link, cut in zip(read.links, shardings[read.operand.index].cuts, strict=True):
            if cut is None or link.dim is None or link.dim in cuts or link.dim in recipe.uncut or cut.axis in taken:
                continue
            # Where the operand's tiles come to lie in the output.
            points = link.access.propagate_cut(cut.partition.points, recipe.space[link.dim])
            cuts[link.dim] = Cut(cut.axis, Partition(points))
            taken.add(cut.axis)
    return cuts


def _plan_read(
    mesh: Mesh, read: Read, sharding: Sharding, cuts: dict[int, Cut], work_axes: frozenset[str]
) -> tuple[Fetch, tuple[Slot, ...]]:
    """What one operand must bring to this rank, and how each of its dims arrives."""
    dims, slots, fill = [], [], 0.0
    for dim, link in enumerate(read.links):
        own = sharding.cuts[dim]
        cut = cuts.get(link.dim) if link.dim is not None else None
        size = sharding.shape[dim]
        # One tuple of intervals for each rank along the axis; a single one where all need the same.
        needs: tuple[tuple[Interval, ...], ...] = ((whole(size),),)  # not cut: all of it, and torch pads it itself
        if link.dim is None:
            needs = (link.access.need(whole(size)),)
        elif cut is not None:
            needs = tuple(link.access.need(piece) for piece in cut.partition.pieces())
        fill = link.fill if link.fill is not None else fill
        move = DimMove(
            size=size,
            owner_axis=own.axis if own else None,
            owned=own.partition.pieces() if own else (whole(size),),
            need_axis=cut.axis if cut else None,
            needs=needs,
            filled=link.fill is not None,
        )
        dims.append(move)
        slots.append(Slot(move.wanted(mesh.coordinates[cut.axis] if cut else 0), cut is None))
    return Fetch(mesh, tuple(dims), work_axes, fill), tuple(slots)


def out_sharding(mesh: Mesh, shape: tuple[int, ...], dims: tuple[int | None, ...], cuts: dict[int, Cut]) -> Sharding:
    """How a result lies whose dims are these dims of the space."""
    return Sharding(mesh, shape, [None if dim is None else cuts.get(dim) for dim in dims])
