"""The executor: the one place that runs rules. Per call it plans, moves operands, computes locally, reduces and wraps.

Plans depend on shapes, cuts and arguments but never on values, so they are cached. Most calls are *steady*: nothing
moves, and :func:`_run_steady` does the local work only. Only this module knows the factors of law 3.
"""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from .._torch_private import storage_key, tracing, transforming, without_autograd
from ..errors import Refused
from ..reduction import DeferredParameter, settle
from ..tensor import (
    CopyOf,
    ShardedTensor,
    Sharding,
    Strides,
    counting_writes,
    dispatched_by,
    enter,
    family_of,
    here,
    note_write,
    plain,
    refuse_write,
    simple_tiles,
    unwrap,
    whole_copy,
    wrap,
)
from ..world import AVERAGED, Label, Route, Sum, SumToPlain
from .aliasing import Settled, settled, worth_keeping
from .asking_torch import planned
from .boxes import Boxes, in_boxes
from .halo import Halo, with_halo
from .idle import nothing, thrown_away
from .operands import bring, enter_whole, preloaded, put_back_results, with_factors
from .partial import PartialTensor, keep_part, on_parts
from .plan import CallPlan, PlanCache, bound, make_plan, substitute
from .product import TiledProduct, with_tiles
from .recipe import Reduced
from .remedy import forced, forcing
from .ring import Ring, in_ring
from .statistics import reduce_statistics
from .table import entry_for, executed_by, name_of, refuse
from .whole_target import becomes_cut

_plans = PlanCache()
#: By thread: what is called in place of :func:`run_rule`, with the same arguments, while a program is recorded.
recorders: dict[int, Any] = {}


@dispatched_by
def dispatch(function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function at least one of whose arguments is a sharded tensor."""
    # A trace or a torch.func transform of one rank's tile would silently give that tile's answer.
    if tracing() is not None or transforming():
        raise _refuse_capture(function)
    if without_autograd() and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        raise refuse(
            function,
            "it is in a branch of torch.cond, or a torch.while_loop, which torch runs without autograd",
            "give torch.cond the cut tensors as operands, or write the branch or the loop in Python",
        )
    if DeferredParameter in types:  # a weight whose step is still to be made; rules would look past that
        settle((args, kwargs))
    if PartialTensor in types:
        return on_parts(function, args, kwargs)
    entry = entry_for(function)
    if kwargs and kwargs.get("out") is not None:
        return _into(kwargs["out"], function, args, kwargs)
    if entry.kind == "rule":
        return run_rule(function, entry.run, args, kwargs, entry.by_value)
    return entry.run(*args, **kwargs)


def _refuse_capture(function: Any) -> Refused:
    """The error for calls under ``torch.func`` transforms and tracers, which would see this rank's tile only."""
    if transforming():
        why = "a transform of torch.func sees this rank's tile alone, and movements have no rule in it"
        return refuse(function, why, "use torch.autograd.grad, or call the transform on hc.gather(x)")
    return refuse(function, "a trace would keep this rank's numbers as constants", "trace the untouched model")


def _into(out: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Compute without ``out``, and copy; refused where torch would change a shape or lose a gradient."""
    result = function(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    if not isinstance(out, Tensor) or not isinstance(result, Tensor):
        raise refuse(function, "with out= it fills several tensors", "assign the results instead")
    if out.shape != result.shape:
        raise refuse(function, "out= would change the shape of a tensor", "give one of the shape of the result")
    if torch.is_grad_enabled() and (result.requires_grad or out.requires_grad):
        raise RuntimeError(f"{name_of(function)}(): functions with out=... arguments don't support autograd")
    return out.copy_(result)


@executed_by
def run_rule(function: Any, describe: Any, args: tuple[Any, ...], kwargs: dict[str, Any], by_value: bool = True) -> Any:
    """Run one rule; its plan is kept by the global shapes and cuts of the tensors and all other arguments.

    Rules that hand numbers straight on to torch need not be planned anew for each of them (``by_value`` False).
    """
    if recorders and (recorder := recorders.get(get_ident())) is not None:
        return recorder(function, describe, args, kwargs, by_value)
    tensors: list[Tensor] = []
    picture = [_key(value, tensors, by_value) for value in args]
    if kwargs:
        picture += [(name, _key(value, tensors, by_value)) for name, value in kwargs.items()]
    key = (function, describe, *picture, ("remedy", forced())) if forcing else (function, describe, *picture)
    plan = _planned(function, describe, args, kwargs, tensors, key)
    # The first plan tells that this mesh has choices for single modules; the plan that holds is this module's own.
    if plan.by_place:
        plan = _planned(function, describe, args, kwargs, tensors, (*key, ("place", here())))
    if plan.steady:
        tiles = simple_tiles(tensors)
        if tiles is not None:
            return _run_steady(plan, tiles, args, kwargs)
    elif plan.fitting is not None and becomes_cut(tensors[0], plan.fitting):
        # The target is a sharded tensor now, so that the call has another key and another plan.
        return run_rule(function, describe, args, kwargs, by_value)
    return _run(plan, function, tensors, args, kwargs)


def _planned(function: Any, describe: Any, args: Any, kwargs: Any, tensors: list[Tensor], key: Any) -> CallPlan:
    """The plan of a call: from the cache, or made now. ``key`` is None where an argument cannot be hashed."""
    try:
        plan = _plans.get(key)
    except TypeError:  # an argument that cannot be hashed: plan anew
        plan, key = None, None
    if plan is None:
        with planned():
            plan = make_plan(function, describe, args, kwargs, tensors)
        if key is not None:
            _plans.keep(key, plan, len(tensors))
    return plan


def _key(value: Any, tensors: list[Tensor], by_value: bool) -> Any:
    """A hashable picture of an argument, and its tensors in order. 1, 1.0 and True are told apart, as 0.0 and -0.0."""
    kind = type(value)
    # This runs for every argument of every call: the most frequent kinds come first.
    if kind is ShardedTensor:
        tensors.append(value)
        return value.sharding, value._tile.dtype, value._tile.is_meta
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.dtype, value.is_meta
    if kind is int:
        return (int, value) if by_value else int
    if value is None or kind is bool:
        return kind, value
    if kind is tuple and by_value and _ONLY_INT.issuperset(map(type, value)):
        return tuple, int, value
    return _rare_key(value, tensors, by_value)


_ONLY_INT = frozenset((int,))


def _rare_key(value: Any, tensors: list[Tensor], by_value: bool) -> Any:
    """The picture of arguments that few calls have: nested lists, slices, dicts, floats."""
    if isinstance(value, (tuple, list)):
        return type(value), tuple([_key(item, tensors, by_value) for item in value])
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    if isinstance(value, dict):
        return dict, tuple([(name, _key(item, tensors, by_value)) for name, item in value.items()])
    if isinstance(value, (float, int)):
        return type(value), repr(value) if by_value else None
    return type(value), value


def _run_steady(plan: CallPlan, tiles: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nothing moves and nothing is shared: the short way that most calls go."""
    # Law 3 concerns gradients alone.
    entering = plan.factors and torch.is_grad_enabled()
    # One hook on the node of the call is cheaper than a Function before each operand.
    if entering and plan.hooked:
        enter_whole(plan, tiles)
    elif entering:
        with_factors(plan, tiles)
    result = _call(plan, plan.call, tiles, args, kwargs)
    if result is NotImplemented:  # an operator that torch declines; Python asks the other operand, or raises
        return NotImplemented
    if plan.recipe.reduces is not None:
        result = _reduced(plan, result, Label(plan.name, here()))
    if entering and plan.hooked and result.requires_grad:
        plan.hook(result, tiles)
    return wrap(result, plan.shardings[0])


def _call(plan: CallPlan, local: Any, tiles: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The local work, with the call's own arguments but for the tensors."""
    if plan.places is None:
        replacements = iter(tiles)
        return local(*[substitute(a, replacements) for a in args], **substitute(kwargs, replacements))
    # The usual call, f(x, y, 2): no list of arguments has to be built.
    if plan.leading:
        return local(*tiles, *args[len(tiles) :], **kwargs)
    arguments = list(args)
    for place, tile in zip(plan.places, tiles, strict=True):
        arguments[place] = tile
    return local(*arguments, **kwargs)


def _run(plan: CallPlan, function: Any, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Every call: operands are brought, the local work runs, its parts are combined, and results are wrapped."""
    label = Label(plan.name, here())
    target = _written_copy(plan, tensors[0])
    tiles = [unwrap(t) if isinstance(t, ShardedTensor) else plain(t) for t in tensors]
    # A batch that was read with its halo needs no exchange in the first layer.
    ready = preloaded(plan, tensors, tiles)
    if plan.overlapped is not None and not ready:
        results = [_overlapped(plan, plan.overlapped, tiles, label)]
    else:
        brought = bring(plan, tiles, label, ready)
        tiled = None if plan.product is None else _in_tiles(plan, plan.product, tiles, brought, label)
        results = _compute(plan, brought, args, kwargs, label) if tiled is None else [tiled]
    if results is NotImplemented:
        return NotImplemented
    if plan.recipe.inplace:
        # Views and copies of the target notice the write by this count.
        note_write(tiles[0])
        if target is not None:
            target.written() if target.unsure else target.write_back()
        return tensors[0]
    summed = plan.product is not None and plan.product.sums_result
    if plan.defers and results[0].is_floating_point():
        return keep_part(results[0], plan.goals[0], plan.route(plan.sum_axes, label))  # type: ignore[arg-type]
    if not summed and (route := plan.route(plan.sum_axes, label)) is not None:
        results = [_combined(plan, result, route) for result in results]
    return _wrapped(plan, settled(plan, function, args, kwargs, tensors, tiles, results), tensors, label)


def _written_copy(plan: CallPlan, target: Tensor) -> CopyOf | None:
    """The mark of a target in place that is a copy; refused where its base could not show the write."""
    mark: CopyOf | None = getattr(target, "_copy_of", None) if plan.recipe.inplace else None
    if mark is not None and not (mark.unsure or mark.can_write_back()):
        raise refuse_write(plan.name)
    return mark


def _combined(plan: CallPlan, part: Tensor, route: Route) -> Tensor:
    """The parts of all ranks of the route as one result: cut to whole, whose adjoint is the mean (law 3)."""
    if plan.recipe.combine == "max":
        return route.world.maximum(part.detach(), route.ranks, route.label)
    if plan.to_plain:
        return SumToPlain.apply(part, route)
    return Sum.apply(part, route, (1.0, 1.0 / len(route.ranks)))


def _remember_views(plan: CallPlan, tensors: list[Tensor], views: list[Tensor]) -> None:
    """Record that these results and their operand share memory, which matters once a layout has to be guessed."""
    operand = tensors[plan.recipe.reads[0].operand.index]
    if isinstance(operand, ShardedTensor) and plan.mesh.channels_last:
        memory = storage_key(operand._tile)
        for view in views:
            if isinstance(view, ShardedTensor) and storage_key(view._tile) == memory:
                view._family = family_of(operand)
                view._family.add(view)


def _overlapped(plan: CallPlan, work: Halo | Boxes | Ring, tiles: list[Tensor], label: Label) -> Tensor:
    """Work that exchanges while it computes.

    Operands come in the order of the rule's reads; the Function applies law 3.
    """
    operands = [tiles[read.operand.index] for read in plan.recipe.reads]
    if isinstance(work, Ring):
        route = Route(plan.mesh.world, plan.mesh.ranks_along([work.axis]), label)
        return in_ring(work, route, *operands)
    fetch = plan.fetches[plan.recipe.reads[0].operand.index]
    for place, operand in enumerate(operands[1:], 1):
        # The mark is on parameters whose gradients an engine averages.
        if not getattr(operand, AVERAGED, False):
            operands[place] = enter(operand, plan.mesh, fetch.work_axes, label)  # type: ignore[union-attr]
    route = Route(plan.mesh.world, fetch.ranks, label)  # type: ignore[union-attr]
    return in_boxes(work, route, *operands) if isinstance(work, Boxes) else with_halo(work, route, *operands)


def _in_tiles(
    plan: CallPlan, product: TiledProduct, tiles: list[Tensor], brought: list[Tensor], label: Label
) -> Tensor | None:
    """A product whose sums travel while it computes; None where it has none to take."""
    route = Route(plan.mesh.world, plan.mesh.ranks_along(product.axes), label)
    places = [read.operand.index for read in plan.recipe.reads]
    return with_tiles(product, route, tiles[places[0]], [brought[place] for place in places])


def _reduced(plan: CallPlan, local: Reduced, label: Label) -> Tensor:
    """Carry out the statistics that a norm declares in the middle of its work. Waits for the ranks of its axes."""
    routes = plan.route(plan.reduce_axes, label), plan.route(plan.track_axes, label)
    return reduce_statistics(local, *routes, plan.choices.one_sum_ranks)


def _compute(
    plan: CallPlan, brought: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], label: Label
) -> list[Tensor]:
    """The local work on operands that have arrived: a list of results, or NotImplemented where torch declines."""
    if plan.idle:
        return _compute_nothing(plan, brought, args, kwargs)
    result = _call(plan, plan.call, brought, args, kwargs)
    if result is NotImplemented:
        return NotImplemented
    if plan.recipe.reduces is not None:
        return [_reduced(plan, result, label)]
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _compute_nothing(
    plan: CallPlan, brought: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Tensor]:
    """A rank with an empty share computes one made-up element and discards it, which
    keeps its graph like the others'.
    """
    outputs = zip(plan.recipe.outputs, plan.shardings, strict=True)
    if plan.recipe.inplace:
        torch.autograd.graph.increment_version(brought[0])  # that it was written to shows on every rank
        return []
    idle = plan.idle_work([tuple(tensor.shape) for tensor in brought])
    if idle is None:
        return [nothing(output, sharding, brought) for output, sharding in outputs]
    result = _call(plan, bound(plan.recipe, idle.work), idle.operands(brought), args, kwargs)
    results = result if isinstance(result, (tuple, list)) else [result]
    return [thrown_away(made, *output) for made, output in zip(results, outputs, strict=True)]


def _wrapped(plan: CallPlan, settled_results: list[Settled], tensors: list[Tensor], label: Label) -> Any:
    """Results as they are handed out: cut as planned, plain where nothing is cut, marked where they are copies."""
    results = [result for result, _, _ in settled_results]
    if plan.shuffles:
        results = put_back_results(plan, results, label)
    handed_out = [
        _handed_out(result, goal, mark, strides)
        for result, goal, (_, mark, strides) in zip(results, plan.goals, settled_results, strict=True)
    ]
    if plan.recipe.view:
        _remember_views(plan, tensors, handed_out)
    return handed_out[0] if len(handed_out) == 1 else tuple(handed_out)


def _handed_out(result: Tensor, sharding: Sharding, mark: CopyOf | None, strides: Strides | None) -> Tensor:
    """One result for the user: a sharded tensor, or a plain one where no axis cuts it.

    With its copy mark, if it has one.
    """
    if mark is not None and mark.values is None:
        result = result if sharding.axes else counting_writes(result)
        mark.values = partial(wrap, result, sharding) if sharding.axes else lambda: result
    if not sharding.axes:
        return result if mark is None else whole_copy(result, mark)
    shell = wrap(result, sharding)
    if mark is not None or strides is not None:
        shell._copy_of, shell._strides = mark, worth_keeping(strides, sharding.shape, result)
    return shell
