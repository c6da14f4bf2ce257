"""Turns a rule's recipe into a plan: how the space is cut, what each operand must bring, and how the results lie.

A :class:`CallPlan` holds everything about a call that does not depend on values. The executor caches plans, so nothing
here is on the hot path; properties that the executor reads on each call are cached on the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn

from ..choices import Choices
from ..errors import MeshError
from ..geometry import whole
from ..sizes import size_text
from ..tensor import Cut, Fetch, ShardedTensor, Sharding, here, plain
from ..world import Label, Mesh, Route, scaled
from .boxes import Boxes, plan_boxes
from .halo import Halo, plan_halo
from .idle import IdleWork, idle_work
from .product import TiledProduct
from .recipe import Local, Operand, Recipe, Work
from .remedy import choices_here
from .ring import Ring
from .space_cut import SpaceCut, assigned_cuts, choose_cut, out_sharding
from .table import name_of, refuse

_log = logging.getLogger("halocline")
_WORTH_SAYING = 1 << 20  # bytes of a whole operand that are worth a line in the log


def substitute(value: Any, replacements: Iterator[Any]) -> Any:
    """The arguments again, with each tensor replaced by the next of ``replacements``."""
    if isinstance(value, Tensor):
        return next(replacements)
    if isinstance(value, (tuple, list)):
        items = [substitute(item, replacements) for item in value]
        return type(value)(items) if type(value) in (tuple, list) else tuple(items)
    if isinstance(value, dict):
        return {name: substitute(item, replacements) for name, item in value.items()}
    return value


@dataclass
class CallPlan:
    """Everything about a call that does not depend on values."""

    name: str
    mesh: Mesh
    choices: Choices
    recipe: Recipe
    fetches: tuple[Fetch | None, ...]
    work: Work
    shardings: tuple[Sharding, ...]  # of the results as they are computed
    goals: tuple[Sharding, ...]  # and as they are handed out
    sum_axes: frozenset[str]
    reduce_axes: frozenset[str]  # over which the statistics of Recipe.reduces run
    track_axes: frozenset[str]
    some_empty: bool  # has any rank nothing to compute?
    overlapped: Halo | Boxes | Ring | None  # work that exchanges while it computes, on tiles as they lie
    places: tuple[int, ...] | None  # of the tensors among the arguments, where none is nested or given by name
    fitting: Sharding | None  # of a large plain target of in-place work: how it would lie if it were cut as the rest is
    product: TiledProduct | None  # work whose sums travel in tiles
    _idle_work: tuple[IdleWork | None] | None = None
    answers: dict[Any, Any] = field(default_factory=dict)  # of torch about aliasing, by the operand's strides

    @cached_property
    def by_place(self) -> bool:
        """Has the mesh choices for parts of a model, so that a plan holds for one place only?"""
        return bool(self.mesh.choices.at)

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The local work of this rank, to be called as the torch function was."""
        return bound(self.recipe, self.work)

    @cached_property
    def leading(self) -> bool:
        """Do the tensors come before all other arguments?"""
        return self.places == tuple(range(len(self.fetches)))

    @cached_property
    def idle(self) -> bool:
        """Has this rank nothing to compute?"""
        return not self.recipe.runs_empty and any(interval.empty for interval in self.work.box)

    def route(self, axes: frozenset[str], label: Label) -> Route | None:
        """Among this rank's peers along ``axes``; None where there are none."""
        return Route(self.mesh.world, self.mesh.ranks_along(axes), label) if axes else None

    def idle_work(self, brought: list[tuple[int, ...]]) -> IdleWork | None:
        """What a rank with nothing to compute computes instead, for operands of these shapes."""
        if self._idle_work is None:
            self._idle_work = (idle_work(self.recipe, self.work, brought),)
        return self._idle_work[0]

    @cached_property
    def touched(self) -> tuple[int, ...]:
        """Operands that are not used where they lie."""
        return tuple(i for i, fetch in enumerate(self.fetches) if fetch is not None and not fetch.untouched)

    @cached_property
    def joined(self) -> tuple[int, ...]:
        """Two or more operands that travel among the same ranks."""
        # Operands that travel among the same ranks can share their messages.
        moving = {i: f.ranks for i, f in enumerate(self.fetches) if f is not None and f.communicates}
        alike = tuple(i for i in moving if list(moving.values()).count(moving[i]) > 1)
        return tuple(i for i in alike if moving[i] == moving[alike[0]])

    @cached_property
    def shuffles(self) -> bool:
        """Is a cut moved to another dim for the call, and back?"""
        return self.goals != self.shardings

    @cached_property
    def to_plain(self) -> bool:
        """Are all results plain?"""
        return not any(goal.axes for goal in self.goals)

    @cached_property
    def defers(self) -> bool:
        """Is the result handed out as parts, whose sum waits?"""
        recipe = self.recipe
        asked = self.choices.defer_sums and bool(self.sum_axes) and recipe.combine == "sum" and len(recipe.reads) > 1
        return asked and len(self.goals) == 1 and self.goals == self.shardings and not recipe.inplace

    @cached_property
    def gathers(self) -> bool:
        """Do all ranks of some axis end with the same operand?"""
        return any(fetch is not None and fetch.gathers for fetch in self.fetches)

    @cached_property
    def steady(self) -> bool:
        """Every operand is used where it lies, and the one result is new and cut: nothing to do but compute."""
        recipe = self.recipe
        return (
            all(fetch is None or fetch.untouched for fetch in self.fetches)
            and self.goals == self.shardings
            and self.product is None
            and not (recipe.inplace or recipe.view or recipe.fresh or self.sum_axes or self.some_empty)
            and len(self.shardings) == 1
            and bool(self.shardings[0].axes)
        )

    @cached_property
    def factors(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        """Law 3: each factor but 1 of operands that are used where they lie, and which they are."""
        still = {i: f.adjoint_scale for i, f in enumerate(self.fetches) if f and f.untouched and f.adjoint_scale != 1}
        return tuple((factor, tuple(i for i in still if still[i] == factor)) for factor in sorted(set(still.values())))

    @cached_property
    def hooked(self) -> bool:
        """May law 3 be a hook on the one node of the call? All operands but the first have the one factor."""
        if self.recipe.single_node is None or len(self.factors) != 1:
            return False
        return set(self.factors[0][1]) == {read.operand.index for read in self.recipe.reads[1:]}

    def hook(self, result: Tensor, tiles: list[Tensor]) -> None:
        """Put law 3 on the node that the call has made."""
        node, single_node = result.grad_fn, self.recipe.single_node
        if node is None or single_node is None or not isinstance(node, single_node.node):
            raise AssertionError(f"{self.name} was to make one {single_node}, and made {node}")
        others = [tiles[read.operand.index] for read in self.recipe.reads[1:]]
        node.register_hook(partial(_scale_gradients, self, others))


def _scale_gradients(plan: CallPlan, others: list[Tensor], gradients: Any, arriving: Any) -> Any:
    """The hook that puts law 3's factor on the gradients of the whole operands of a node."""
    factor, first, single_node = plan.factors[0][0], gradients[0], plan.recipe.single_node
    if first is not None and first.requires_grad:  # a second derivative is to come
        entered = [scaled((1.0, factor), tensor) if tensor.requires_grad else tensor for tensor in others]
        first = single_node.again(plan.work, arriving[0], first.detach(), *entered)  # type: ignore[union-attr]
    # Differentiated again, it is R with the identity as its adjoint: not a plain product.
    times = partial(scaled, (factor, 1.0)) if torch.is_grad_enabled() else partial(mul, factor)
    return first, *(None if gradient is None else times(gradient) for gradient in gradients[1:])


class PlanCache(dict[Any, CallPlan]):
    """Plans by function, global shapes, cuts and arguments. A plan takes some kilobytes for each operand.

    Begins anew when it is full, because a program whose shapes never repeat would fill it without end.
    """

    MOST_OPERANDS = 1 << 14

    def __init__(self) -> None:
        super().__init__()
        self._operands = 0

    def keep(self, key: Any, plan: CallPlan, operands: int) -> None:
        """Add the plan of a call with so many operands."""
        if self._operands + operands > self.MOST_OPERANDS:
            self.clear()
        self._operands += max(1, operands)
        self[key] = plan

    def clear(self) -> None:
        """Forget all plans."""
        super().clear()
        self._operands = 0


def make_plan(
    function: Any, describe: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> CallPlan:
    """Ask the rule for a recipe and work out everything that follows from shapes, cuts and choices."""
    mesh = _common_mesh(function, tensors)
    if mesh.world.capabilities.moves_data and len({plain(tensor).is_meta for tensor in tensors}) > 1:
        # Kernels of torch take some such mixtures, and compute with whatever lies in memory.
        raise refuse(
            function,
            "one of its operands is on the device meta and has no values, and another has",
            "make both on one device; a table that the model keeps may have been made while the model was planned",
        )
    recipe = recipe_of(describe, args, kwargs, tensors)
    shardings = [
        t.sharding if isinstance(t, ShardedTensor) else Sharding(mesh, tuple(t.shape), (None,) * t.ndim)
        for t in tensors
    ]
    choices = choices_here(mesh)
    space_cut = choose_cut(mesh, recipe, shardings, choices)
    cuts, fetches = space_cut.cuts, space_cut.fetches
    target = fetches[0] if recipe.inplace else None
    if recipe.inplace and (target is None or not target.untouched or target.adjoint_scale != 1):
        raise refuse(function, "in place, the result must be cut as the target is", "write it out of place")
    _say_if_whole_and_large(function, mesh, tensors, fetches)
    mine = {dim: cut.partition.piece(mesh.coordinates[cut.axis]) for dim, cut in cuts.items()}
    box = tuple(mine.get(dim, whole(size)) for dim, size in enumerate(recipe.space))
    work = Work(box, tuple(space_cut.slots))
    places = tuple(place for place, value in enumerate(args) if isinstance(value, Tensor))
    return CallPlan(
        name=name_of(function),
        mesh=mesh,
        choices=choices,
        recipe=recipe,
        fetches=tuple(fetches),
        work=work,
        shardings=space_cut.results,
        goals=space_cut.goals,
        sum_axes=_sum_axes(function, recipe, cuts),
        reduce_axes=frozenset(cut.axis for dim, cut in cuts.items() if dim in (recipe.reduces or ())),
        track_axes=frozenset(cut.axis for dim, cut in cuts.items() if dim in recipe.tracks),
        some_empty=not recipe.runs_empty and any(p.empty for cut in cuts.values() for p in cut.partition.pieces()),
        overlapped=_overlapped(mesh, recipe, work, space_cut, choices),
        places=places if len(places) == len(tensors) else None,
        fitting=_fitting(mesh, recipe, tensors, shardings, choices),
        product=_product(mesh, recipe, work, space_cut, choices),
    )


def recipe_of(describe: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Recipe:
    """What a rule says about a call. It sees operands in place of tensors: global shapes and dtypes, never values."""
    operands = iter(_operand(index, tensor) for index, tensor in enumerate(tensors))
    described: list[Any] = [substitute(a, operands) for a in args]
    recipe: Recipe = describe(*described, **substitute(kwargs, operands))
    return recipe


def _fitting(
    mesh: Mesh, recipe: Recipe, tensors: list[Tensor], shardings: list[Sharding], choices: Choices
) -> Sharding | None:
    """How a large plain target of in-place work would be cut, if it were cut as the values written into it are."""
    if not recipe.inplace or isinstance(tensors[0], ShardedTensor):
        return None
    largest = max(tensor.numel() for tensor in tensors if isinstance(tensor, ShardedTensor))
    if tensors[0].numel() < max(largest, choices.cut_target):
        return None
    (output,), cuts = recipe.outputs, assigned_cuts(mesh, replace(recipe, inplace=False), shardings)
    fitting = out_sharding(mesh, output.shape, output.dims, cuts)
    return fitting if fitting.axes else None


def _overlapped(
    mesh: Mesh, recipe: Recipe, work: Work, space_cut: SpaceCut, choices: Choices
) -> Halo | Boxes | Ring | None:
    """Work that can exchange while it computes, where that spares a copy of the tile or a gather."""
    if space_cut.in_ring:
        return _ring(mesh, recipe, work, space_cut)
    return _halo(mesh, recipe, work, space_cut, choices.halo_beside)


def _product(mesh: Mesh, recipe: Recipe, work: Work, space_cut: SpaceCut, choices: Choices) -> TiledProduct | None:
    """A product whose result, or the gradient of whose plain input, is summed over ranks and large enough."""
    if recipe.row_product is None or not choices.product_tile or 0 in recipe.space:
        return None
    cuts, operand = space_cut.cuts, recipe.reads[0].operand
    if operand.dtype.is_complex or any(piece.empty for cut in cuts.values() for piece in cut.partition.pieces()):
        return None
    kept = set(recipe.outputs[0].dims)
    summed = frozenset(cut.axis for dim, cut in cuts.items() if dim not in kept)
    work_axes = frozenset(cut.axis for cut in cuts.values())
    plain_input = not space_cut.shardings[operand.index].axes
    if summed and choices.defer_sums:
        return None
    axes = summed or (work_axes if plain_input else frozenset())
    elements = prod(space_cut.results[0].tile_shape) if summed else operand.numel()
    if mesh.count(axes) == 1 or elements * operand.dtype.itemsize < choices.product_tile * (1 + bool(summed)):
        return None
    to_plain = not space_cut.goals[0].axes
    return TiledProduct(axes, bool(summed), recipe.row_product(work), to_plain, choices.product_tile)


def _ring(mesh: Mesh, recipe: Recipe, work: Work, space_cut: SpaceCut) -> Ring:
    """This rank's part in a ring over the axis that cuts the travelling operands."""
    steps = recipe.ring
    fetches = [fetch for read in recipe.reads if (fetch := space_cut.fetches[read.operand.index])]
    assert steps is not None
    cut = space_cut.shardings[recipe.reads[-1].operand.index].cuts[steps.dim]
    assert cut is not None
    return Ring(
        work=steps.bound(work),
        resident=steps.resident,
        dim=steps.dim,
        axis=cut.axis,
        place=mesh.coordinates[cut.axis],
        partition=cut.partition,
        fetches=tuple(fetches),
        gathered=bound(recipe, work),
    )


def _halo(mesh: Mesh, recipe: Recipe, work: Work, space_cut: SpaceCut, least: int) -> Halo | Boxes | None:
    """Only the first operand moves; the others are whole, and used as they are. ``least``: elements of a tile."""
    cuts = space_cut.cuts
    # The first operand is the one with a halo; weights come after it.
    first, *others = (space_cut.fetches[read.operand.index] for read in recipe.reads) if recipe.reads else (None,)
    if recipe.box_local and not others:
        return plan_boxes(recipe, work, first, cuts, partial(bound, recipe), least)
    if recipe.linear_part is None:
        return None
    # Every whole operand enters work that is cut along all these axes: one factor for all of them.
    factor = float(mesh.count(cut.axis for cut in cuts.values()))
    if any(fetch is None or not fetch.untouched or fetch.adjoint_scale != factor for fetch in others):
        return None
    # An idle rank computes a made-up element, which the overlapped form does not know.
    if 0 in recipe.space or any(piece.empty for cut in cuts.values() for piece in cut.partition.pieces()):
        return None
    return plan_halo(recipe, work, first, factor, bound(recipe, work), least)


def bound(recipe: Recipe, work: Work) -> Callable[..., Any]:
    """The local work, to be called as the torch function itself was."""
    local = recipe.local
    return local.bound(work) if isinstance(local, Local) else partial(local, work)


def _say_if_whole_and_large(function: Any, mesh: Mesh, tensors: list[Tensor], fetches: list[Fetch | None]) -> None:
    """A plain tensor of the size of what is cut is right, and takes on every rank the memory that the cut saves."""
    largest = max(tensor.numel() for tensor in tensors if isinstance(tensor, ShardedTensor))
    for tensor, fetch in zip(tensors, fetches, strict=True):
        if isinstance(tensor, ShardedTensor) or fetch is None or fetch.untouched or mesh.rank:
            continue
        if isinstance(tensor, nn.Parameter):  # weights are whole on every rank
            continue
        size = plain(tensor).untyped_storage().nbytes()  # an expanded tensor takes little
        if size >= largest * tensor.element_size() and size >= _WORTH_SAYING:
            label = Label(name_of(function), here())
            _log.warning(
                "%s: an operand of %s lies whole on every rank, as large as the cut one beside it; the result is "
                "exact. To save its memory make it from a cut tensor (torch.zeros_like(x), x.new_zeros(shape)) or "
                "cut it (hc.shard)",
                label,
                size_text(size),
            )


def _operand(index: int, tensor: Tensor) -> Operand:
    """What a rule gets to see of a tensor."""
    if isinstance(tensor, ShardedTensor):
        cut = frozenset(tensor.sharding.dims_by_axis())
        return Operand(index, tensor.sharding.shape, tensor._tile.dtype, cut)
    return Operand(index, tuple(tensor.shape), tensor.dtype, frozenset())


def _common_mesh(function: Any, tensors: list[Tensor]) -> Mesh:
    """The one mesh of all sharded operands, or an error."""
    meshes = {t.sharding.mesh for t in tensors if isinstance(t, ShardedTensor)}
    if len(meshes) != 1:
        raise MeshError(f"{name_of(function)} in {here()}: its operands lie on different meshes {meshes}; use one mesh")
    return meshes.pop()


def _sum_axes(function: Any, recipe: Recipe, cuts: dict[int, Cut]) -> frozenset[str]:
    """Axes that cut a dim which no output has: the local results are parts of a sum."""
    # A dim that no output has was summed over; where it is cut, each rank has summed its own part.
    kept = {dim for output in recipe.outputs for dim in output.dims}
    axes = frozenset(cut.axis for dim, cut in cuts.items() if dim not in kept)
    if axes and recipe.combine is None:
        raise refuse(function, "its rule reduces a cut dim and does not say how to combine the parts", "mend the rule")
    return axes
