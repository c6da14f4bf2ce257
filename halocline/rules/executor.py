"""The one executor: align -> move -> local -> wrap. It alone knows the factors of law 3; it plans once per shape."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._torch_private import storage_key, tracing, transforming
from ..errors import Refused
from ..reduction import DeferredParameter, settle
from ..sizes import size_text
from ..tensor import (
    CopyOf,
    ShardedTensor,
    Sharding,
    Strides,
    check_entering,
    counting_writes,
    dispatched_by,
    family_of,
    from_preloaded_halo,
    here,
    note_write,
    plain,
    recut,
    refuse_write,
    simple_tiles,
    unwrap,
    whole_copy,
    wrap,
)
from ..world import AVERAGED, Bundle, Label, MoveTogether, Route, Sum, scaled
from .aliasing import settled, worth_keeping
from .asking_torch import planned
from .boxes import Boxes, in_boxes
from .halo import Halo, with_halo
from .idle import nothing, thrown_away
from .out import into
from .plan import CallPlan, bound, make_plan, substitute
from .recipe import Reduced
from .remedy import forced, forcing
from .ring import Ring, in_ring
from .statistics import reduce_statistics
from .table import entry_for, executed_by, refuse
from .whole_target import becomes_cut

_log = logging.getLogger("halocline")
_WORTH_ADVICE = 1 << 20  # bytes
_plans: dict[Any, CallPlan] = {}
_MOST_PLANS = 4096


@dispatched_by
def dispatch(function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function at least one of whose arguments is a sharded tensor."""
    if tracing() is not None or transforming():
        raise _refuse_capture(function)
    if DeferredParameter in types:  # a weight whose step is still to be made; rules would look past that
        settle((args, kwargs))
    entry = entry_for(function)
    if kwargs and kwargs.get("out") is not None:
        return into(kwargs["out"], function, args, kwargs)
    if entry.kind == "rule":
        return run_rule(function, entry.run, args, kwargs, entry.by_value)
    return entry.run(*args, **kwargs)


def _refuse_capture(function: Any) -> Refused:
    if transforming():
        why = "a transform of torch.func sees this rank's tile alone, and movements have no rule in it"
        return refuse(function, why, "use torch.autograd.grad, or call the transform on hc.gather(x)")
    return refuse(function, "a trace would keep this rank's numbers as constants", "trace the untouched model")


@executed_by
def run_rule(function: Any, describe: Any, args: tuple[Any, ...], kwargs: dict[str, Any], by_value: bool = True) -> Any:
    """Run one rule; its plan is kept by the global shapes and cuts of the tensors and all other arguments.

    Rules that hand numbers straight on to torch need not be planned anew for each of them (``by_value`` False).
    """
    tensors: list[Tensor] = []
    picture = [_key(value, tensors, by_value) for value in args]
    if kwargs:
        picture += [(name, _key(value, tensors, by_value)) for name, value in kwargs.items()]
    key = (function, describe, *picture, forced()) if forcing else (function, describe, *picture)
    try:
        plan = _plans.get(key)
    except TypeError:  # an argument that cannot be hashed: plan anew
        plan, key = None, None  # type: ignore[assignment]
    if plan is None:
        plan = _new_plan(function, describe, args, kwargs, tensors, key)
    if plan.steady:
        tiles = simple_tiles(tensors)
        if tiles is not None:
            return _run_steady(plan, tiles, args, kwargs)
    elif plan.fitting is not None and becomes_cut(tensors[0], plan.fitting):
        return run_rule(function, describe, args, kwargs, by_value)
    return _run(plan, function, tensors, args, kwargs)


def _new_plan(function: Any, describe: Any, args: Any, kwargs: Any, tensors: list[Tensor], key: Any) -> CallPlan:
    with planned():
        plan = make_plan(function, describe, args, kwargs, tensors)
    if key is not None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _key(value: Any, tensors: list[Tensor], by_value: bool) -> Any:
    """A hashable picture of an argument, and its tensors in order. 1, 1.0 and True are told apart, as 0.0 and -0.0."""
    kind = type(value)
    if kind is ShardedTensor:
        tensors.append(value)
        return value.sharding, value._tile.dtype
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.shape, value.dtype
    if kind is int:
        return (int, value) if by_value else int
    if value is None or kind is bool:
        return kind, value
    if kind is tuple and by_value and _ONLY_INT.issuperset(map(type, value)):
        return tuple, int, value
    return _rare_key(value, tensors, by_value)


_ONLY_INT = frozenset((int,))


def _rare_key(value: Any, tensors: list[Tensor], by_value: bool) -> Any:
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
    entering = plan.factors and torch.is_grad_enabled()
    if entering and plan.hooked:
        _check_entering(plan, tiles)
    elif entering:
        _enter(plan, tiles)
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
        given = iter(tiles)
        return local(*[substitute(value, given) for value in args], **substitute(kwargs, given))
    if plan.leading:
        return local(*tiles, *args[len(tiles) :], **kwargs)
    arguments = list(args)
    for place, tile in zip(plan.places, tiles, strict=True):
        arguments[place] = tile
    return local(*arguments, **kwargs)


def _check_entering(plan: CallPlan, tiles: list[Tensor]) -> None:
    for _, places in plan.factors:
        for place in places:
            tile = tiles[place]
            if not getattr(tile, AVERAGED, False) and tile.requires_grad:
                fetch = plan.fetches[place]
                check_entering(tile, plan.mesh, fetch.work_axes - fetch.axes, Label(plan.name, here()))  # type: ignore[union-attr]


def _enter(plan: CallPlan, tiles: list[Tensor]) -> None:
    """Law 3: whole operands of cut work, in place of themselves."""
    _check_entering(plan, tiles)
    for factor, places in plan.factors:
        entering = [place for place in places if tiles[place].requires_grad]
        if len(entering) == 1:
            tiles[entering[0]] = scaled((1.0, factor), tiles[entering[0]])
        elif entering:
            found = scaled((1.0, factor), *[tiles[place] for place in entering])
            for place, tile in zip(entering, found, strict=True):
                tiles[place] = tile


def _run(plan: CallPlan, function: Any, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    label = Label(plan.name, here())
    target: CopyOf | None = getattr(tensors[0], "_copy_of", None) if plan.recipe.inplace else None
    if target is not None and not (target.unsure or target.can_write_back()):
        raise refuse_write(plan.name)
    tiles = [unwrap(t) if isinstance(t, ShardedTensor) else plain(t) for t in tensors]
    ready = _ready(plan, tensors, tiles)
    if plan.overlapped is not None and not ready:
        return _run_overlapped(plan, plan.overlapped, tiles, label)
    brought = _bring(plan, tiles, label, ready)
    if plan.gathers:
        _count_gathers(plan, tiles, label)
    results = _compute(plan, brought, args, kwargs, label)
    if results is NotImplemented:
        return NotImplemented
    if plan.recipe.inplace:
        note_write(tiles[0])
        if target is not None:
            target.written() if target.unsure else target.write_back()
        return tensors[0]
    if plan.sum_axes:
        route = plan.route(plan.sum_axes, label)
        results = [_combined(plan, result, route) for result in results]  # type: ignore[arg-type]
    known = settled(plan, function, args, kwargs, tensors, tiles, results)
    results = [result for result, _, _ in known]
    if plan.shuffles:
        results = _put_back(plan, results, label)
    marks = [(mark, strides) for _, mark, strides in known]
    wrapped = [_wrapped(result, goal, *mark) for result, goal, mark in zip(results, plan.goals, marks, strict=True)]
    if plan.recipe.view:
        _remember_views(plan, tensors, wrapped)
    return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)


def _combined(plan: CallPlan, part: Tensor, route: Route) -> Tensor:
    """The parts of all ranks of the route as one result: cut to whole, whose adjoint is the mean (law 3)."""
    if plan.recipe.combine == "max":
        return route.world.maximum(part.detach(), route.ranks, route.label)
    return Sum.apply(part, route, (1.0, 1.0 / len(route.ranks)))


def _remember_views(plan: CallPlan, tensors: list[Tensor], views: list[Tensor]) -> None:
    operand = tensors[plan.recipe.reads[0].operand.index]
    if isinstance(operand, ShardedTensor) and plan.mesh.channels_last:
        memory = storage_key(operand._tile)
        for view in views:
            if isinstance(view, ShardedTensor) and storage_key(view._tile) == memory:
                view._family = family_of(operand)
                view._family.add(view)


def _ready(plan: CallPlan, tensors: list[Tensor], tiles: list[Tensor]) -> dict[int, Tensor]:
    """Operands that came with what the operation needs beside their tiles."""
    found: dict[int, Tensor] = {}
    for place, tensor in enumerate(tensors):
        fetch = plan.fetches[place]
        if getattr(tensor, "_preloaded_halo", None) is not None and fetch is not None and fetch.communicates:
            brought = from_preloaded_halo(tensor, fetch, tiles[place])
            if brought is not None:
                found[place] = brought
    return found


def _run_overlapped(plan: CallPlan, work: Halo | Boxes | Ring, tiles: list[Tensor], label: Label) -> Tensor:
    """The operands in the order in which the rule reads them; the Function applies law 3 itself."""
    operands = [tiles[read.operand.index] for read in plan.recipe.reads]
    if isinstance(work, Ring):
        route = Route(plan.mesh.world, plan.mesh.ranks_along([work.axis]), label)
        return wrap(in_ring(work, route, *operands), plan.shardings[0])
    fetch = plan.fetches[plan.recipe.reads[0].operand.index]
    for operand in operands[1:]:
        if not getattr(operand, AVERAGED, False):
            check_entering(operand, plan.mesh, fetch.work_axes, label)  # type: ignore[union-attr]
    route = Route(plan.mesh.world, fetch.ranks, label)  # type: ignore[union-attr]
    result = in_boxes(work, route, *operands) if isinstance(work, Boxes) else with_halo(work, route, *operands)
    return wrap(result, plan.shardings[0])


def _reduced(plan: CallPlan, local: Reduced, label: Label) -> Tensor:
    return reduce_statistics(local, plan.route(plan.reduce_axes, label), plan.route(plan.track_axes, label))


def _compute(
    plan: CallPlan, brought: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], label: Label
) -> list[Tensor]:
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


def _put_back(plan: CallPlan, results: list[Tensor], label: Label) -> list[Tensor]:
    """The second half of a shuffle, counted, and said once a place, as a gather is; or a gathered result cut again."""
    moves = [None if old is new else recut(old, new) for old, new in zip(plan.shardings, plan.goals, strict=True)]
    exchanged = any(move is not None and move.communicates for move in moves)
    if exchanged and plan.mesh.world.redistributed("shuffle", label) == 1 and plan.mesh.rank == 0:
        _log.info("%s: the ranks exchange tiles so that another dim is cut meanwhile, and back", label)
    return [result if move is None else move(result, label) for result, move in zip(results, moves, strict=True)]


def _count_gathers(plan: CallPlan, tiles: list[Tensor], label: Label) -> None:
    """A gather is exact but costs memory: counted always, said once a place."""
    for fetch, tile in zip(plan.fetches, tiles, strict=True):
        if fetch is None or not fetch.gathers:
            continue
        size = fetch.transfer.received_elements * tile.element_size()
        if plan.mesh.world.redistributed("gather", label, size) == 1 and plan.mesh.rank == 0:
            axes = ", ".join(sorted(fetch.axes - fetch.work_axes))
            _log.warning(
                "%s: every rank fetches the whole operand over %s, %s a call; the result is exact, but this operation "
                "saves no memory by being cut%s",
                label,
                axes,
                size_text(size),
                "" if size < _WORTH_ADVICE else "; cut another dim if this costs too much",
            )


def _wrapped(result: Tensor, sharding: Sharding, mark: CopyOf | None, strides: Strides | None) -> Tensor:
    if mark is not None and mark.values is None:
        result = result if sharding.axes else counting_writes(result)
        mark.values = partial(wrap, result, sharding) if sharding.axes else lambda: result
    if not sharding.axes:
        return result if mark is None else whole_copy(result, mark)
    shell = wrap(result, sharding)
    shell._copy_of, shell._strides = mark, worth_keeping(strides, sharding.shape, result)
    return shell


def _bring(plan: CallPlan, tiles: list[Tensor], label: Label, ready: dict[int, Tensor]) -> list[Tensor]:
    """Each operand's needed box, with law 3's factor on its gradient."""
    brought = list(tiles)
    if plan.factors and torch.is_grad_enabled():
        _enter(plan, brought)
    together = ready or (_together(plan, tiles, label) if plan.joined else {})
    for place, moved in together.items():
        brought[place] = moved
    for place in plan.touched:
        fetch = plan.fetches[place]
        if fetch.adjoint_scale != 1:  # type: ignore[union-attr]
            check_entering(tiles[place], plan.mesh, fetch.work_axes - fetch.axes, label)  # type: ignore[union-attr]
        if place not in together:
            brought[place] = fetch(tiles[place], label)  # type: ignore[misc]
    return brought


def _together(plan: CallPlan, tiles: list[Tensor], label: Label) -> dict[int, Tensor]:
    """Operands that move among the same ranks go in the same messages, where their dtypes allow."""
    places = [place for place in plan.joined if tiles[place].dtype == tiles[plan.joined[0]].dtype]
    if len(places) < 2:
        return {}
    fetches = [fetch for fetch in (plan.fetches[place] for place in places) if fetch is not None]
    bundle = Bundle(
        Route(plan.mesh.world, fetches[0].ranks, label),
        tuple(fetch.transfer for fetch in fetches),
        tuple((1.0, fetch.adjoint_scale) for fetch in fetches),
        tuple(fetch.fill for fetch in fetches),
    )
    return dict(zip(places, MoveTogether.apply(bundle, *(tiles[place] for place in places)), strict=True))
