"""Sums over ranks that wait: each rank keeps its part of a result, and one sum follows the additions.

Where a mesh has ``Choices(defer_sums=True)``, a product over a cut shared dim gives a :class:`PartialTensor`. Functions
that are linear in it run on the parts. Any other completes the sum first, so that its answer is that of one rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._torch_private import autograd_state, no_torch_function
from ..errors import Refused, ShardingError
from ..tensor import ShardedTensor, Sharding, here, recut, unwrap, wrap
from ..tree import map_tensors, tensors_in
from ..world import Label, Mesh, MoveBoxes, Route, Sum, SumToPlain, scaled
from .same_sample import check_same
from .table import name_of


class PartialMark:
    """What the marker ``hc.PARTIAL`` is an object of."""

    def __repr__(self) -> str:
        return "hc.PARTIAL"


PARTIAL = PartialMark()


class PartialTensor(Tensor):
    """A result of which each rank of ``route`` holds a part; the result is the sum of the parts."""

    _part: Tensor  # plain or, where other axes cut the result, sharded
    _sharding: Sharding  # of the result
    _route: Route
    _whole: Tensor | None = None
    _history: int = 0  # of the functions that made it, with their numbers: the same on all ranks, or the sum fails

    @staticmethod
    def __torch_function__(function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return on_parts(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise _past_python(str(function))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PartialTensor({self._part!r}, summed over ranks {self._route.ranks})"

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("Only leaves of the graph can be copied deeply; detach this tensor first")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refused("pickle", here(), "a part means nothing elsewhere", "save hc.gather(x) instead")


def _past_python(name: str) -> Refused:
    return Refused(
        name,
        here(),
        "a sum that waits reached it past torch's function protocol, where only this rank's part is seen",
        "complete the sum before: hc.annotate(x, hc.WHOLE)",
    )


def keep_part(part: Tensor, sharding: Sharding, route: Route) -> PartialTensor:
    """This rank's part (a tile of ``sharding``) as a tensor whose sum waits."""
    return _partial(wrap(part, sharding) if sharding.axes else part, sharding, route)


def _partial(part: Tensor, sharding: Sharding, route: Route) -> PartialTensor:
    tile = unwrap(part)
    with no_torch_function():
        shell = tile.detach().as_subclass(PartialTensor)
        if tile.requires_grad:
            # Only what goes round torch's function protocol gives the shell itself a gradient.
            shell.requires_grad_()
            Tensor.register_hook(shell, _refuse_gradient)
    shell._part, shell._sharding, shell._route = part, sharding, route
    return shell


def _refuse_gradient(gradient: Tensor) -> None:
    raise _past_python("an autograd Function")


def _check_own(value: PartialTensor) -> None:
    """Raise where a function outside the protocol has made this shell: the part would know nothing of it."""
    if autograd_state(value)[0] is not None:
        raise _past_python("an autograd Function")


def _as_made(value: PartialTensor, operation: str) -> Route:
    """The route of its sum. Ranks that have made their parts differently send tags that nobody awaits."""
    return value._route._replace(label=Label(f"{operation} {value._history:x}", value._route.label.place))


def complete(value: Tensor) -> Tensor:
    """The sum of the parts, any other tensor as it is. It is taken once: from then on the whole stands for the parts,
    since whoever has it may write to it."""
    if not isinstance(value, PartialTensor):
        return value
    _check_own(value)
    if value._whole is None:
        tile, sharding, route = unwrap(value._part), value._sharding, _as_made(value, value._route.label.operation)
        with torch.enable_grad():  # a later use may want the gradient, where this one does not
            if not sharding.axes:
                total = SumToPlain.apply(tile, route)
            else:
                total = Sum.apply(tile, route, (1.0, 1.0 / len(route.ranks)))
            value._whole = wrap(total, sharding) if sharding.axes else total
    return value._whole


def scatter(value: PartialTensor, goal: Sharding) -> Tensor | None:
    """The sum, of which each rank receives its box of ``goal`` alone; None where more has to move, or has moved."""
    if value._whole is not None:
        return None
    old, tile = value._sharding, unwrap(value._part)
    mesh, kept = old.mesh, zip(old.cuts, goal.cuts, strict=True)
    if mesh.ranks_along(goal.axes - old.axes) != value._route.ranks or any(a is not None and a != b for a, b in kept):
        return None
    gather = recut(goal, old)
    route = _as_made(value, "reduce-scatter")._replace(ranks=gather.ranks)
    return wrap(MoveBoxes.apply(tile, gather.transfer.reversed, route, (1.0, 1.0), 0.0), goal)


def into_parts(whole: Tensor, mesh: Mesh) -> PartialTensor:
    """A tensor that is whole on some axes as a sum of equal parts over them."""
    if not isinstance(whole, ShardedTensor) and sum(size > 1 for size in mesh.sizes.values()) > 1:
        raise ShardingError(
            f"hc.PARTIAL: on {mesh} a plain tensor does not say on which axes it is whole; cut it first"
        )
    sharding = whole.sharding if isinstance(whole, ShardedTensor) else Sharding(mesh, whole.shape, (None,) * whole.ndim)
    axes = [axis for axis in mesh.names if axis not in sharding.axes]
    check_same(unwrap(whole), mesh, axes, None, "annotate")
    route = Route(mesh.world, mesh.ranks_along(axes), Label("deferred sum", here()))
    return _partial(_share(whole, route), sharding, route)


def _share(whole: Tensor, route: Route) -> Tensor:
    share = scaled((1.0 / len(route.ranks), 1.0), unwrap(whole))
    return wrap(share, whole.sharding) if isinstance(whole, ShardedTensor) else share


def on_parts(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a function on the parts where it is linear in them, else on completed sums."""
    if function in _ABOUT:
        parts = map_tensors(lambda t: t._part if isinstance(t, PartialTensor) else t, (args, dict(kwargs)))
        return function(*parts[0], **parts[1])
    tensors = tensors_in((args, dict(kwargs)))
    scales = function in _LINEAR and len(tensors) == 1 and args[0] is tensors[0] and not kwargs.keys() & _ROUNDING
    if scales or (function in _ADDING and len(tensors) == 2):
        found = _added(function, args, kwargs, tensors)
        if found is not None:
            return found
    args, kwargs = map_tensors(complete, (args, dict(kwargs)))
    return function(*args, **kwargs)


def _added(function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> PartialTensor | None:
    """A linear function of the parts; None where its operands do not lie alike."""
    for tensor in tensors:
        if isinstance(tensor, PartialTensor):
            _check_own(tensor)
    first = next(tensor for tensor in tensors if isinstance(tensor, PartialTensor))
    if any(not _lies_beside(tensor, first) for tensor in tensors):
        return None
    route = first._route

    def part(tensor: Tensor) -> Tensor:
        return tensor._part if isinstance(tensor, PartialTensor) else _share(tensor, route)

    numbers = map_tensors(lambda tensor: None, (args, dict(kwargs)))
    args, kwargs = map_tensors(part, (args, dict(kwargs)))
    result = function(*args, **kwargs)
    mesh = first._sharding.mesh
    whole = Sharding(mesh, tuple(result.shape), (None,) * result.ndim)
    sharding = result.sharding if isinstance(result, ShardedTensor) else whole
    made = _partial(result, sharding, route)
    histories = [tensor._history if isinstance(tensor, PartialTensor) else -1 for tensor in tensors]
    made._history = zlib.crc32(repr((name_of(function), histories, numbers)).encode())
    return made


def _lies_beside(tensor: Tensor, first: PartialTensor) -> bool:
    """Is it a part of a sum over the same ranks that still waits, or a sharded tensor that each of them has whole?

    A plain tensor completes the sum: ranks may hold different ones.
    """
    if isinstance(tensor, PartialTensor):
        if tensor._whole is not None:
            return False
        return tensor._route.ranks == first._route.ranks and tensor._sharding is first._sharding
    return isinstance(tensor, ShardedTensor) and tensor.dtype == first.dtype and tensor.sharding is first._sharding


def _functions(names: str) -> set[Any]:
    found = {getattr(owner, name, None) for name in names.split() for owner in (Tensor, torch)}
    return found - {None}


#: Questions that a part answers as the result does.
_ABOUT = _functions("size dim ndimension numel nelement is_floating_point is_complex element_size __len__") | {
    getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_meta", "layout")
}
#: Arguments with which a result is rounded, so that a sum of results is not the result of the sum.
_ROUNDING = {"rounding_mode", "dtype"}
#: Linear in both operands together.
_ADDING = _functions("add sub subtract __add__ __radd__ __sub__")
#: Linear in their only tensor.
_LINEAR = _functions("neg negative __neg__ mul multiply __mul__ __rmul__ div divide true_divide __truediv__ sum mean")
