"""Maximum pools that say where each maximum lies, and the way back. Positions count through the whole sample.

torch counts positions through the tile it is given; they are recounted through the sample. On the way back a value goes
to its own window, if a pool has made the indices: the ranks ask with one sum whether all do, and fetch their halo only.
Else any value may go anywhere, and the input is read whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...geometry import Access, Adaptive, Interval, Same, Transposed, Window, whole
from ...geometry.access import Everything, Pieces
from ...tensor import ShardedTensor
from ..recipe import Link, Operand, Output, Read, Recipe, Work, per_tile
from ..table import composite, run_rule
from .adaptive_pool import out_sizes, points_to_reduce, side_by_side
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
    """The rule of ``max_pool*d`` with indices.

    ``shape_of`` is the function without, which torch answers on meta tensors.
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
            if (points := points_to_reduce(both[0], d, m)) is not None:
                both = _along(function, both, d, Pieces(points), given)
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
        # One output cannot be cut: the ranks' maxima are brought together.
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
    # Positions in the flattened view: rows are indices along the pooled dim.
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
        if any(isinstance(value, Sequence) and len(value) != spatial for value in (kernel_size, stride, padding)):
            values, places = (Operand(n, tuple(input.shape), dtype, frozenset()) for n, dtype in enumerate(_UNPOOLED))
            shape(function, values, places, kernel_size, stride, padding, size)  # torch says what is wrong with them
        windows = tuple(windows_of(spatial, kernel_size, stride, padding))
        call = Unpool(function, tuple(input.shape), windows, size)
        cut = tuple(d for d in range(call.lead, input.ndim) if is_cut(input, d) or is_cut(indices, d))
        # One small sum over the ranks, instead of gathering the input.
        near = not cut or _near(indices, cut, call)
        return run_rule(function, _unpool_rule, (input, indices, call, near, _widened(input)), {})

    return run


_UNPOOLED = (torch.float32, torch.int64)  # dtypes of values and places, where only shapes count


def _widened(input: Tensor) -> torch.dtype:
    """Of the result: on the CPU, autocast unpools in float32."""
    narrow = input.dtype in (torch.half, torch.bfloat16)
    return torch.float32 if narrow and input.device.type == "cpu" and torch.is_autocast_enabled("cpu") else input.dtype


@dataclass(frozen=True)
class Unpool:
    """One call of ``max_unpool*d``, by which plans are kept: an input of shape ``given``, and the pool to undo.

    If a pool made the indices, a value of the input goes to a place in its own window.
    """

    function: Any
    given: tuple[int, ...]
    windows: tuple[Window, ...]
    size: tuple[int, ...] | None  # of the result, where the user gives it

    @property
    def lead(self) -> int:
        """How many dims stand before the spatial ones."""
        return len(self.given) - len(self.windows)

    @cached_property
    def made(self) -> tuple[int, ...]:
        """The shape of the result, asked of torch."""
        values = Operand(0, self.given, torch.float32, frozenset())
        places = Operand(1, self.given, torch.int64, frozenset())
        return shape(self.run, values, places, [w.padding for w in self.windows], self.size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The spatial sizes of the result."""
        return self.made[self.lead :]

    @cached_property
    def accesses(self) -> list[Transposed]:
        """Which inputs can reach an output, for each spatial dim."""
        return [Transposed(w.kernel, w.stride, 1, w.padding) for w in self.windows]

    def run(self, values: Tensor, places: Tensor, padding: list[int], size: Sequence[int] | None) -> Tensor:
        """torch's own function."""
        windows = self.windows
        return self.function(values, places, [w.kernel for w in windows], [w.stride for w in windows], padding, size)

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
        reached = []
        for uncut, need, w, size in zip(native, needs, self.windows, self.sizes, strict=True):
            first = w.stride * need.lo - w.padding
            reached.append(whole(size) if uncut else Interval(first, first + w.stride * (need.size - 1) + w.kernel))
        padding = [w.padding if uncut else 0 for w, uncut in zip(self.windows, native, strict=True)]
        flat = _moved(flat, self.sizes, reached)
        full = self.run(tile, flat, padding, [interval.size for interval in reached])
        wanted = work.box[self.lead :]
        return _trim(full, [(w.lo - r.lo, r.hi - w.hi) for w, r in zip(wanted, reached, strict=True)])


def _moved(flat: Tensor, sizes: Sequence[int], reached: Sequence[Interval]) -> Tensor:
    """Positions in the whole result, counted through the part of it that is made here."""
    origin = [-interval.lo for interval in reached]
    return _recounted(flat, sizes, origin, [interval.size for interval in reached])


def _near(indices: Tensor, dims: tuple[int, ...], call: Unpool) -> bool:
    """Does every value go to its own window? The ranks agree on it, for each sees its own indices only."""
    if not isinstance(indices, ShardedTensor):
        box = [whole(size) for size in indices.shape]
        return indices.is_meta or not _strays(indices, box, dims, call).any()
    total = run_rule("max_unpool reach", _strays_rule, (indices, dims, call), {})
    return total.is_meta or not total.item()  # without values, as a pool would have made them


def _strays_rule(indices: Operand, dims: tuple[int, ...], call: Unpool) -> Recipe:
    """How many indices leave their window, over all ranks."""
    output = Output((1,), (None,), constant=True, dtype=torch.int64)
    local = lambda work, tile, *_: _strays(tile, work.box, dims, call).sum().reshape(1)  # noqa: E731
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


def _unpool_rule(input: Operand, indices: Operand, call: Unpool, near: bool, dtype: torch.dtype) -> Recipe:
    """Each output reads the windows that can reach it (``near``), or all of the input."""
    anywhere = [Everything(n) for n in input.shape[call.lead :]]
    links = _links(input.ndim, call.accesses if near else anywhere)

    def local(work: Work, tile: Tensor, flat: Tensor, *_: Any) -> Tensor:
        if near:
            return call.local(work, input, tile, flat).to(dtype)
        full = call.run(tile, flat, [w.padding for w in call.windows], call.size)
        for dim, interval in enumerate(work.box[call.lead :], call.lead):
            full = full.narrow(dim, interval.lo, interval.size)
        return full

    output = Output(call.made, tuple(range(input.ndim)), dtype=dtype)
    reads = (Read(input, links), Read(indices, links))
    return Recipe(space=call.made, reads=reads, outputs=(output,), local=local, positions=True)


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
