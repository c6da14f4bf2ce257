"""Assignment to part of a tensor, ``x[...] = value``: each rank writes what falls into its own tile.

The target does not move. Of the value, a rank fetches the part that its box takes. Positions held in tensors are read
whole by every rank; those that point into another rank's tile are skipped.

    x[:, 3:9] = y      # y is cut as rows 3 to 9 of x are: each rank gets its own rows of y
    x[index] = y       # every rank reads index, and writes the rows it owns
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...geometry import Interval, Transposed
from ...tensor import ShardedTensor, same_memory
from ..recipe import WHOLE, Link, Operand, Read, Recipe, Work, per_tile, whole_operands
from ..table import composite, refuse, run_rule
from .lookup import chosen_place
from .masks import put
from .pointwise import broadcast_shape
from .subscript import Item, is_mask, items_of, located
from .view import made_of, made_of_each, meta, normal, whole_on_every_rank


@composite(Tensor.__setitem__, family="index")
def setitem(self: Tensor, index: Any, value: Any) -> None:
    """A whole target (``torch.zeros(shape)`` inside a model) takes in the whole value, gathered."""
    items = items_of(index, self.ndim)
    given = _as_tensor(self, value)
    if any(is_mask(item) for item in items) and _fills(self, items, given):
        return
    if not isinstance(self, ShardedTensor):
        items = [whole_on_every_rank(item) if is_mask(item) else item for item in items]
    elif isinstance(items[0], ShardedTensor) and is_mask(items[0]) and all(item == slice(None) for item in items[1:]):
        mask = items[0].reshape(*items[0].shape, *[1] * (len(items) - 1)).expand(self.shape)
        self.copy_(put(self, mask, given.to(self.dtype), exactly=True))
        return
    _write(self, located(items, self.shape), given, accumulate=False)


def _without_leading_ones(value: Tensor, dims: int) -> Tensor:
    """torch passes over leading dims of size one that the target has not."""
    while value.ndim > dims and value.shape[0] == 1:
        value = value.squeeze(0)
    return value


def _as_tensor(self: Tensor, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return torch.full((), value, dtype=self.dtype, device=self.device)


def _write(self: Tensor, items: Sequence[Item], value: Tensor, accumulate: bool, rule: Any = None) -> Tensor:
    """In place, or by another ``rule``."""
    positions = [item for item in items if isinstance(item, Tensor)]
    taken = sum(item is None or isinstance(item, slice) for item in items)
    value = _without_leading_ones(value, taken + max((tensor.ndim for tensor in positions), default=0))
    return run_rule(Tensor.__setitem__, rule or _write_rule, (self, value, tuple(items), accumulate), {})


def _fills(self: Tensor, items: Sequence[Any], value: Tensor) -> bool:
    """One value for all that a mask takes, or one for each index of the dims behind it: no need to count, then."""
    masks = [place for place, item in enumerate(items) if is_mask(item)]
    if len(masks) > 1 or any(item != slice(None) for item in items if not is_mask(item)):
        return False
    mask: Tensor = items[masks[0]].to(self.device)
    behind = len(items) - masks[0] - 1
    value = _without_leading_ones(value, behind)
    if value.ndim > behind:
        return False
    if tuple(mask.shape) != tuple(self.shape[masks[0] : masks[0] + mask.ndim]):
        raise IndexError(f"The shape of the mask {list(mask.shape)} does not match the indexed tensor {self.shape}")
    wide = mask.reshape(*mask.shape, *[1] * behind)
    if value.ndim == 0 and not isinstance(value, ShardedTensor):
        self.masked_fill_(wide, value.to(self.dtype))
    else:
        self.copy_(torch.where(wide, value.to(self.dtype), self))
    return True


def _write_rule(target: Operand, value: Operand, items: tuple[Any, ...], accumulate: bool) -> Recipe:
    """Write ``value`` into this rank's tile of ``target``, at the part of ``items`` that falls into it."""
    probe = meta(target)
    probe[tuple(map(meta, items))] = meta(value).to(probe.dtype)  # torch's own error where the value does not fit
    links = _value_links(target, value, items)

    def local(work: Work, tile: Tensor, value: Tensor, items: tuple[Any, ...], accumulate: bool) -> Tensor:
        """Write in place and return the tile. A rank into whose tile nothing falls takes part in the backward too."""
        if same_memory(tile, value):  # y[0] *= 2 writes back what it has changed in place
            value = value.clone()
        keys = [*_keys(work.box, target.shape, items)]
        view = tile[tuple(keys)]
        if not any(isinstance(item, Tensor) for item in items):
            view.copy_(_beside_numbers(value, items))
            return tile
        numbers = [place for place, item in enumerate(items) if isinstance(item, int)]
        if any(view.shape[place] == 0 for place in numbers):
            view.copy_(value.reshape(-1)[:0].sum())  # nothing to write here, yet a part in the value's backward
            return tile
        for place in reversed(numbers):
            view = view.select(place, 0)
        _put(view, work.box, target.shape, items, value, accumulate)
        return tile

    return per_tile(target, local, Read(value, links), *whole_operands(*items), inplace=True)


def _written_rule(target: Operand, value: Operand, items: tuple[Any, ...], accumulate: bool) -> Recipe:
    """The same into a copy of the target. A whole one is cut as the value is: nothing is gathered."""
    recipe = _write_rule(target, value, items, accumulate)

    def local(work: Work, tile: Tensor, value: Tensor, items: tuple[Any, ...], accumulate: bool) -> Any:
        return recipe.local(work, tile.clone(), value, items, accumulate)

    return replace(recipe, local=local, inplace=False)


def _value_links(target: Operand, value: Operand, items: tuple[Any, ...]) -> tuple[Link, ...]:
    """For each dim of the value: the dim of the target it is written along, by the slice's own count."""
    made: list[tuple[int, Link]] = []  # size and link of each dim of what is written, positions apart
    places: list[int] = []
    dim = 0
    for item in items:
        if isinstance(item, Operand):
            places.append(len(made) + len(places))
        elif isinstance(item, slice):
            steps = range(target.shape[dim])[item]
            made.append((len(steps), Link(dim, Transposed(1, steps.step, padding=-steps.start))))
        elif item is None:
            made.append((1, WHOLE))
        dim += item is not None
    if places:
        chosen = broadcast_shape(*(item.shape for item in items if isinstance(item, Operand)))
        first = chosen_place(places)
        made[first:first] = [(size, WHOLE) for size in chosen]
    beside = made[len(made) - value.ndim :]
    return tuple(link if size == n else WHOLE for (n, link), size in zip(beside, value.shape, strict=True))


def _keys(box: Sequence[Interval], shape: Sequence[int], items: Sequence[Any]) -> Any:
    """The part of each item that lies in this rank's box; a number becomes a slice of one, or of none."""
    dim = 0
    for item in items:
        if item is None:
            yield None
            continue
        own, size = box[dim], shape[dim]
        if isinstance(item, int):
            steps = range(item % size, item % size + 1)
        else:
            steps = range(size)[item if isinstance(item, slice) else slice(None)]
        dim += 1
        yield _inside(steps, own)


def _inside(steps: range, own: Interval) -> slice:
    """Those of the ``steps`` that lie in this rank's interval, counted from its first index."""
    first, last = (max(0, -((steps.start - end) // steps.step)) for end in (own.lo, own.hi))
    last = min(last, len(steps))
    if last <= first:
        return slice(0, 0)
    begin = steps.start + first * steps.step - own.lo
    return slice(begin, begin + (last - first - 1) * steps.step + 1, steps.step)


def _beside_numbers(value: Tensor, items: Sequence[Any]) -> Tensor:
    """The value with a dim of one for each number, where the target's view has kept one."""
    kept = len(items) - sum(isinstance(item, int) for item in items)
    value = value.reshape([*[1] * (kept - value.ndim), *value.shape])
    for place, item in enumerate(items):
        value = value.unsqueeze(place) if isinstance(item, int) else value
    return value


def _put(
    view: Tensor, box: Sequence[Interval], shape: Sequence[int], items: Sequence[Any], value: Tensor, accumulate: bool
) -> None:
    """Write at positions held in tensors. Those in other tiles are left out, with what is written there."""
    dims = [d for d, item in enumerate(i for i in items if i is not None) if isinstance(item, Tensor)]
    left = [item for item in items if not isinstance(item, int)]
    places = [place for place, item in enumerate(left) if isinstance(item, Tensor)]
    indices = [left[place] for place in places]
    # A dim that positions point into is cut: keep the positions that fall into this rank's part.
    if any(box[dim].size != shape[dim] for dim in dims):
        chosen = torch.broadcast_shapes(*(index.shape for index in indices))
        first = chosen_place(places)
        wide = [*(n for place, n in enumerate(view.shape) if place not in places)]
        wide[first:first] = chosen
        near = [index.to(view.device) for index in indices]
        mine, indices = own_positions(near, [(shape[dim], box[dim]) for dim in dims])
        value = value.expand(wide)
        value = value.flatten(first, first + len(chosen) - 1).index_select(first, mine)
    if accumulate:  # index_put_ alone, whose positions point into the first dims
        view.index_put_(tuple(indices), value, accumulate)
    else:
        where = dict(zip(places, indices, strict=True))
        view[tuple(where.get(place, slice(None)) for place in range(view.ndim))] = value


def own_positions(indices: Sequence[Tensor], dims: Sequence[tuple[int, Interval]]) -> tuple[Tensor, list[Tensor]]:
    """Which of the positions, counted in a row, point into this rank's box; and those, counted from its corner."""
    flat = [index.flatten() for index in torch.broadcast_tensors(*indices)]
    inside = torch.ones_like(flat[0], dtype=torch.bool)
    counted = []
    for index, (size, own) in zip(flat, dims, strict=True):
        check_range(index, size)
        index = torch.where(index < 0, index + size, index)
        inside &= (index >= own.lo) & (index < own.hi)
        counted.append(index - own.lo)
    mine = torch.empty_like(flat[0]) if inside.is_meta else inside.nonzero()[:, 0]
    return mine, [index[mine] for index in counted]


def check_range(index: Tensor, size: int, lowest: int | None = None) -> None:
    """torch's own check, which a rank that passes positions over would never come to."""
    lowest = -size if lowest is None else lowest
    if index.is_meta or not index.numel():
        return
    low, high = index.aminmax()
    if low < lowest or high >= size:
        raise IndexError(f"index {int(high if high >= size else low)} is out of bounds for a dimension of size {size}")


@made_of("index_put_")
def index_put_(input: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False) -> Tensor:
    """Written where positions point, in place."""
    _write(input, located(items_of(tuple(indices), input.ndim), input.shape), values, accumulate)
    return input


@made_of("index_put")
def index_put(input: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False) -> Tensor:
    """Written where positions point, into a copy."""
    items = items_of(tuple(indices), input.ndim)
    if any(map(is_mask, items)):
        return input.clone().index_put_(tuple(indices), values, accumulate)
    return _write(input, items, values, accumulate, _written_rule)


def _along(input: Tensor, dim: int, index: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * normal(dim, input.ndim), index)


@made_of_each("index_fill index_fill_")
def index_fill(function: Any, input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """One value at positions of a dim, into a copy or in place."""
    return _set(function, input, _along(input, dim, index), value)


@made_of_each("index_copy index_copy_")
def index_copy(function: Any, input: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """Slices at positions of a dim, into a copy or in place."""
    meta(input).index_copy_(dim, meta(index), meta(source))  # torch's own error for shapes that do not fit
    return _set(function, input, _along(input, dim, index), source)


def _set(function: Any, input: Tensor, index: tuple[Any, ...], value: Any) -> Tensor:
    """``input[index] = value``, in place where the name of ``function`` says so."""
    if not function.__name__.endswith("_"):
        return _written(input, index, value)
    input[index] = value
    return input


@made_of("select_scatter")
def select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Tensor:
    """One index of a dim replaced in a copy."""
    return _written(input, _along(input, dim, index), src)


@made_of("slice_scatter")
def slice_scatter(
    input: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """A slice replaced in a copy."""
    return _written(input, _along(input, dim, slice(start, end, step)), src)


def _written(input: Tensor, index: tuple[Any, ...], value: Any) -> Tensor:
    return _write(input, items_of(index, input.ndim), _as_tensor(input, value), False, _written_rule)


@composite(Tensor.fill_diagonal_, family="refused")
def fill_diagonal_(input: Tensor, fill_value: Any, wrap: bool = False) -> Tensor:
    """By each element's place in the whole."""
    raise refuse("fill_diagonal_", "the diagonal runs across the tiles", "multiply by 1 - torch.eye(n) and add its own")
