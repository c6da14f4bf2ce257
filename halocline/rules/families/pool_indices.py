"""Maximum pools that say where each maximum lies, and the way back. Positions count through the whole sample.

torch counts positions through the tile it is given; they are recounted through the sample. On the way back a value goes
to its own window, if a pool has made the indices: the ranks ask with one sum whether all do, and fetch their halo only.
Else any value may go anywhere, and the input is read whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...geometry import Access, Adaptive, Interval, Same, Transposed, whole
from ...geometry.access import Everything, Pieces
from ...tensor import ShardedTensor
from ..recipe import Link, Operand, Output, Read, Recipe, Work, per_tile
from ..table import composite, run_rule
from .adaptive_pool import has_several_a_tile, out_sizes, side_by_side, tile_points
from .pad import shape_from_torch
from .pool import check_not_empty, is_cut, max_pool, own_windows, padded_call, windows_of
from .view import shape
from .window import _trim

Both = tuple[Tensor, Tensor]


def _links(ndim: int, accesses: Sequence[Access]) -> tuple[Link, ...]:
    """Batch and channels one to one, each of the last dims by its access."""
    lead = ndim - len(accesses)
    return (*map(Link, range(lead)), *(Link(lead + i, access) for i, access in enumerate(accesses)))


def _both(made: tuple[int, ...], dtype: torch.dtype) -> tuple[Output, Output]:
    """The outputs of such a rule: values, and positions without a gradient."""
    dims = tuple(range(len(made)))
    return Output(made, dims, dtype=dtype), Output(made, dims, constant=True, dtype=torch.int64)


def _recounted(flat: Tensor, held: Sequence[int], origin: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Positions counted through a block of ``held`` that begins at ``origin``, counted through ``sizes`` instead."""
    # Only the first dim is cut: positions move by whole rows.
    if list(held[1:]) == list(sizes[1:]) and not any(origin[1:]):
        shift = origin[0] * math.prod(sizes[1:])
        return flat + shift if shift else flat
    step, total = 1, torch.zeros_like(flat)
    for size, first, count in reversed(list(zip(held, origin, sizes, strict=True))):
        total = total + (flat % size + first) * step
        flat, step = flat // size, step * count
    return total


# ---- pools with windows of one size ----


def _max_rule(spatial: int, function: Any, shape_of: Any) -> Callable[..., Recipe]:
    """The rule of ``max_pool*d`` with indices; ``shape_of`` is the function without, which torch answers on meta
    tensors.
    """

    def describe(input: Operand, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Recipe:
        made = shape_from_torch(shape_of, input, kernel, stride, padding, dilation, ceil_mode)
        windows = windows_of(spatial, kernel, stride, padding, dilation)
        check_not_empty(function, input, windows)
        lead = input.ndim - spatial

        def local(work: Work, tile: Tensor, *_: Any, **__: Any) -> Both:
            """torch's maxima and positions in the tile, with positions counted through the whole sample."""
            tile, options = padded_call(work, tile, input, windows, ceil_mode)
            values, flat = function(tile, *options)
            box = work.box[lead:]
            origin = [slot.needs[0].lo for slot in work.slots[input.index][lead:]]
            places = _recounted(own_windows(flat, box), tile.shape[lead:], origin, input.shape[lead:])
            return own_windows(values, box), places

        reads = (Read(input, _links(input.ndim, windows)),)
        return Recipe(space=made, reads=reads, outputs=_both(made, input.dtype), local=local)

    return describe


# ---- adaptive pools: a dim at a time, the innermost first as torch scans ----


def _adaptive_max_pool(spatial: int, function: Any) -> Callable[..., Both]:
    """The composite of ``adaptive_max_pool*d`` with indices."""

    def run(input: Tensor, output_size: Any, return_indices: bool = True) -> Both:
        """Dim by dim; each stage hands on the maxima and where in the whole sample they lie."""
        sizes = out_sizes(input, spatial, output_size)
        dims = range(input.ndim - spatial, input.ndim)
        if not any(is_cut(input, d) for d in dims):
            return run_rule(function, _as_on_one_rank, (input, sizes, function), {})
        given = tuple(input.shape[d] for d in dims)
        both: Any = (input, None)
        todo = [(d, m) for d, m in zip(dims, sizes, strict=True) if input.shape[d] != m]
        for d, m in reversed(todo or [(input.ndim - 1, sizes[-1])]):
            if m == 1 and has_several_a_tile(both[0], d):
                both = _along(function, both, d, Pieces(tile_points(both[0], d)), given)
            both = _along(function, both, d, Adaptive(both[0].shape[d], m), given)
        return both

    return run


def _along(function: Any, both: Any, dim: int, access: Any, given: tuple[int, ...]) -> Any:
    """One stage; once no dim is cut any more, on plain tensors."""
    if isinstance(both[0], ShardedTensor):
        return run_rule(function, _stage, (*both, dim, access, given), {})
    values, places = both
    return _max_along(values, places, dim, [_window(access, i) for i in range(access.out_size)])


def _as_on_one_rank(input: Operand, sizes: tuple[int, ...], function: Any) -> Recipe:
    """No spatial dim is cut: torch's own kernel counts right."""
    made = (*input.shape[: input.ndim - len(sizes)], *sizes)
    return Recipe(
        space=made,
        reads=(Read(input, _links(input.ndim, [Same()] * len(sizes))),),
        outputs=_both(made, input.dtype),
        local=lambda work, tile, *_: function(tile, sizes),
    )


def _stage(values: Operand, places: Operand | None, dim: int, access: Any, given: tuple[int, ...]) -> Recipe:
    """Maxima along one dim, and what is known of their places. ``given`` are the spatial sizes of the sample."""
    out = len(access.points) - 1 if isinstance(access, Pieces) else access.out_size
    made = (*values.shape[:dim], out, *values.shape[dim + 1 :])
    links = tuple(Link(d, access if d == dim else Same()) for d in range(values.ndim))

    def local(work: Work, tile: Tensor, known: Tensor | None, *_: Any) -> Both:
        if known is None:
            known = _places(work, values, tile, given)
        (need,), box = access.need(work.box[dim]), work.box[dim]
        return _max_along(tile, known, dim, [_window(access, i).shift(-need.lo) for i in range(box.lo, box.hi)])

    return Recipe(
        space=made,
        reads=tuple(Read(operand, links) for operand in (values, places) if operand is not None),
        outputs=_both(made, values.dtype),
        local=local,
        uncut=frozenset({dim} if out == 1 and values.shape[dim] > 1 else ()),
    )


def _window(access: Pieces | Adaptive, index: int) -> Interval:
    return access.need(Interval(index, index + 1))[0]


def _places(work: Work, input: Operand, tile: Tensor, given: tuple[int, ...]) -> Tensor:
    """Where in the whole sample each element of what was fetched lies."""
    lead = input.ndim - len(given)
    origin = [work.slots[input.index][lead + i].needs[0].lo for i in range(len(given))]
    flat = torch.arange(math.prod(tile.shape[lead:]), device=tile.device).view(tile.shape[lead:])
    return _recounted(flat, tile.shape[lead:], origin, given).expand(tile.shape)


def _max_along(tile: Tensor, known: Tensor, dim: int, windows: list[Interval]) -> Both:
    """Maxima of windows along one dim, and the known places of the elements that they chose."""
    flat, width = side_by_side(tile, dim, windows)
    values, chosen = F.max_pool2d(flat, (width, 1), return_indices=True)
    rows = chosen // flat.shape[2]
    places = side_by_side(known, dim, windows)[0].gather(1, rows)
    made = (*tile.shape[:dim], len(windows), *tile.shape[dim + 1 :])
    return values.reshape(made), places.reshape(made)


# ---- the way back ----


def _max_unpool(spatial: int, function: Any) -> Callable[..., Tensor]:
    """The composite of ``max_unpool*d``."""

    def run(
        input: Tensor,
        indices: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        output_size: Any = None,
    ) -> Tensor:
        size = None if output_size is None else tuple(output_size)
        given = (kernel_size, stride, padding, size)
        dims = range(input.ndim - spatial, input.ndim)
        cut = [d for d in dims if is_cut(input, d) or is_cut(indices, d)]
        # One small sum over the ranks, instead of gathering the input.
        near = not cut or _near(indices, tuple(cut), (spatial, function, tuple(input.shape), *given))
        dtype = _widened(input)
        return run_rule(function, _describe_unpool, (input, indices, *given, spatial, function, near, dtype), {})

    return run


def _widened(input: Tensor) -> torch.dtype:
    """Of the result: on the CPU, autocast unpools in float32."""
    narrow = input.dtype in (torch.half, torch.bfloat16)
    return torch.float32 if narrow and input.device.type == "cpu" and torch.is_autocast_enabled("cpu") else input.dtype


class Unpool:
    """One call: its windows (an input's value goes to a place in its window, if a pool made the indices) and sizes."""

    def __init__(
        self, spatial: int, function: Any, given: tuple[int, ...], kernel: Any, stride: Any, padding: Any, size: Any
    ) -> None:
        windows = windows_of(spatial, kernel, stride, padding)
        self.function, self.lead = function, len(given) - spatial
        self.accesses = [Transposed(w.kernel, w.stride, 1, w.padding) for w in windows]
        self.kernel, self.stride = [w.kernel for w in windows], [w.stride for w in windows]
        values, places = Operand(0, given, torch.float32, frozenset()), Operand(1, given, torch.int64, frozenset())
        self.made = shape(function, values, places, kernel, stride, padding, size)
        self.sizes = self.made[self.lead :]

    def along(self, flat: Tensor, dim: int) -> Tensor:
        """The coordinate along one dim of positions in the result."""
        i = dim - self.lead
        return flat // math.prod(self.sizes[i + 1 :]) % self.sizes[i]

    def local(self, work: Work, input: Operand, tile: Tensor, flat: Tensor) -> Tensor:
        """Unpool to all that the windows at hand reach, then keep this rank's box of it."""
        needs = [slot.needs[0] for slot in work.slots[input.index][self.lead :]]
        native = [work.native(input, self.lead + i) for i in range(len(needs))]
        if 0 in tile.shape:  # outputs that no window reaches
            return tile.new_zeros([interval.size for interval in work.box]) + tile.sum() * 0
        reached = [
            whole(size) if uncut else Interval(s * need.lo - a.padding, s * (need.hi - 1) - a.padding + k)
            for uncut, need, a, k, s, size in zip(
                native, needs, self.accesses, self.kernel, self.stride, self.sizes, strict=True
            )
        ]
        padding = [a.padding if uncut else 0 for a, uncut in zip(self.accesses, native, strict=True)]
        flat = _moved(flat, self.sizes, reached)
        full = self.function(tile, flat, self.kernel, self.stride, padding, [interval.size for interval in reached])
        wanted = work.box[self.lead :]
        return _trim(full, [(w.lo - r.lo, r.hi - w.hi) for w, r in zip(wanted, reached, strict=True)])


def _moved(flat: Tensor, sizes: Sequence[int], reached: Sequence[Interval]) -> Tensor:
    """Positions in the whole result, counted through the part of it that is made here."""
    origin = [-interval.lo for interval in reached]
    return _recounted(flat, sizes, origin, [interval.size for interval in reached])


def _near(indices: Tensor, dims: tuple[int, ...], call: tuple[Any, ...]) -> bool:
    """Does every value go to its own window? The ranks agree on it, for each sees its own indices only."""
    if not isinstance(indices, ShardedTensor):
        box = [whole(size) for size in indices.shape]
        return indices.is_meta or not _strays(indices, box, dims, Unpool(*call)).any()
    total = run_rule("max_unpool reach", _strays_rule, (indices, dims, call), {})
    return total.is_meta or not total.item()  # without values, as a pool would have made them


def _strays_rule(indices: Operand, dims: tuple[int, ...], call: tuple[Any, ...]) -> Recipe:
    """How many indices leave their window, over all ranks."""
    output = Output((1,), (None,), constant=True, dtype=torch.int64)
    local = lambda work, tile, *_: _strays(tile, work.box, dims, Unpool(*call)).sum().reshape(1)  # noqa: E731
    return per_tile(indices, local, outputs=(output,), combine="sum")


def _strays(tile: Tensor, box: Sequence[Interval], dims: Sequence[int], call: Unpool) -> Tensor:
    """Where an index leaves its window, or the whole result (torch then says so, on every rank)."""
    strays = (tile < 0) | (tile >= math.prod(call.sizes))
    for dim in dims:
        access = call.accesses[dim - call.lead]
        first = torch.arange(box[dim].lo, box[dim].hi, device=tile.device) * access.stride - access.padding
        first = first.view(-1, *[1] * (tile.ndim - 1 - dim))
        place = call.along(tile, dim)
        strays = strays | (place < first) | (place >= first + access.kernel)
    return strays


def _describe_unpool(
    input: Operand,
    indices: Operand,
    kernel: Any,
    stride: Any,
    padding: Any,
    size: Any,
    spatial: int,
    function: Any,
    near: bool,
    dtype: torch.dtype,
) -> Recipe:
    """Each output reads the windows that can reach it (``near``), or all of the input."""
    call = Unpool(spatial, function, input.shape, kernel, stride, padding, size)
    anywhere = [Everything(n) for n in input.shape[call.lead :]]
    links = _links(input.ndim, call.accesses if near else anywhere)

    def local(work: Work, tile: Tensor, flat: Tensor, *_: Any) -> Tensor:
        if near:
            return call.local(work, input, tile, flat).to(dtype)
        full = function(tile, flat, kernel, stride, padding, size)
        for dim, interval in enumerate(work.box[call.lead :], call.lead):
            full = full.narrow(dim, interval.lo, interval.size)
        return full

    return Recipe(
        space=call.made,
        reads=(Read(input, links), Read(indices, links)),
        outputs=(Output(call.made, tuple(range(input.ndim)), dtype=dtype),),
        local=local,
        positions=True,
    )


for _spatial in (1, 2, 3):
    _pool, _adaptive, _unpool = (
        getattr(F, name.format(_spatial))
        for name in ("max_pool{}d_with_indices", "adaptive_max_pool{}d_with_indices", "max_unpool{}d")
    )
    _aliases = (torch.max_pool1d_with_indices,) if _spatial == 1 else ()
    _adaptive_aliases = (torch.adaptive_max_pool1d,) if _spatial == 1 else ()
    _rule = _max_rule(_spatial, _pool, getattr(torch, f"max_pool{_spatial}d"))
    composite(_pool, *_aliases, family="pool_indices")(max_pool(_spatial, _pool, _rule, return_indices=True))
    composite(_adaptive, *_adaptive_aliases)(_adaptive_max_pool(_spatial, _adaptive))
    composite(_unpool)(_max_unpool(_spatial, _unpool))
