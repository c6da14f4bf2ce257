"""Views that only rename, reorder or stretch dims: every cut goes along. Also the tools that families share.

A rule for a view says which dim of the space each dim of the operand is; torch itself is asked for shapes on tensors
without data. Whether the result shares memory with its operand, and how it lies, is settled by ``rules/aliasing.py``.

The tools: ``each`` and ``made_of`` (and ``made_of_each``) register a rule or a composite for all forms of a function;
``shape`` and ``meta`` ask torch without data; ``viewing``, ``on_tile`` and ``local_shape`` build recipes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...geometry import Window, shape_of
from ...tensor import ShardedTensor, plain, same_memory
from ..recipe import WHOLE, Link, Operand, Read, Recipe, Work, per_tile, stretched
from ..recipe import as_called as as_called  # the view rules' tools in one place
from ..table import composite, rule, run_rule

_HOMES = (torch, Tensor, F, torch.special)  # not torch.linalg: its functions of the same names have other defaults
_NUMPY_NAMES = {"axis": "dim", "x": "input", "x1": "input", "x2": "other"}
Describe = Callable[..., Recipe]


def forms(names: str) -> tuple[Any, ...]:
    """Every function torch has under these names: ``torch.f``, ``Tensor.f``, ``F.f``; of a property, its getter."""
    # Not every function exists in every release of torch.
    functions = [getattr(home, name) for name in names.split() for home in _HOMES if hasattr(home, name)]
    return tuple(dict.fromkeys(f if callable(f) else f.__get__ for f in functions))


def each(names: str) -> Callable[[Describe], Describe]:
    """Register ``describe(function, <the call's arguments>)`` for every form of these functions."""

    def keep(describe: Describe) -> Describe:
        for function in forms(names):
            rule(function, family=_family(describe))(bound(describe, function))
        return describe

    return keep


def made_of(names: str, fresh: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a composite for every form of these functions. With ``fresh`` torch's result is always new memory.

    The composite is called with torch's own argument names; numpy's (``axis``, ``x``) are translated first.
    """

    def keep(run: Callable[..., Any]) -> Callable[..., Any]:
        whole = new_memory(run) if fresh else run
        composite(*forms(names), family=_family(run))(_torch_names(whole))
        return whole

    return keep


def made_of_each(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register ``run(function, <the call's arguments>)`` for every form of these functions.

    ``function`` is the first of the forms, ``torch.f`` for most: the rule that ``run`` calls runs under its name.
    """

    def keep(run: Callable[..., Any]) -> Callable[..., Any]:
        for name in names.split():
            made_of(name)(partial(run, forms(name)[0]))
        return run

    return keep


def with_torch_names(function: Any, result: Any) -> Any:
    """A result of several parts as torch returns it, ``.values`` and ``.indices`` say; any other as it is."""
    kind = getattr(torch.return_types, function.__name__, None)
    return kind(result) if kind is not None and isinstance(result, tuple) else result


def new_memory(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same composite, whose result is copied where it lies in an argument's memory."""

    @wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        # A reshape of a tile may be a view where torch's own function never returns one.
        tiles = [_tile(tensor) for tensor in operands((args, kwargs), Tensor)]
        return result.clone() if any(same_memory(_tile(result), tile) for tile in tiles) else result

    return call


def _tile(tensor: Tensor) -> Tensor:
    return tensor._tile if isinstance(tensor, ShardedTensor) else plain(tensor)


def _family(run: Any) -> str:
    function = run.func if isinstance(run, partial) else run
    return str(function.__module__).rpartition(".")[2]


def bound(describe: Describe, function: Any) -> Describe:
    """``describe(function, ...)`` as the rule of that function alone."""
    return _torch_names(partial(describe, function))


def _torch_names(run: Callable[..., Any]) -> Callable[..., Any]:
    """torch takes numpy's names of arguments too; ``out=None`` changes nothing."""

    def call(*args: Any, out: None = None, **kwargs: Any) -> Any:
        return run(*args, **{_NUMPY_NAMES.get(name, name): value for name, value in kwargs.items()})

    return call


def operands(value: Any, kind: type = Operand) -> Iterator[Any]:
    """The operands (or the tensors) among a call's arguments, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from operands(item, kind)
    elif isinstance(value, dict):
        yield from operands(tuple(value.values()), kind)


def shapes(function: Any, *args: Any, **kwargs: Any) -> list[tuple[int, ...]]:
    """Ask torch itself for the shapes of the results; it raises its own error where the call makes no sense."""
    result = function(*meta(args), **meta(kwargs))
    return [tuple(tensor.shape) for tensor in operands(result if isinstance(result, tuple) else (result,), Tensor)]


def shape(function: Any, *args: Any, **kwargs: Any) -> tuple[int, ...]:
    """The global shape of the one result, asked of torch on tensors without data."""
    return shapes(function, *args, **kwargs)[0]


def meta(value: Any) -> Any:
    """Operands and tensors as tensors of their shapes alone, of which torch can be asked."""
    if isinstance(value, (Operand, Tensor)):
        # Autocast makes operands of different floating dtypes agree, but not on meta: they are all float32 here.
        real = value.dtype.is_floating_point or value.dtype.is_complex
        return torch.empty(value.shape, dtype=torch.float32 if real else value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        items = [meta(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: meta(item) for name, item in value.items()}
    return value


def whole_on_every_rank(tensor: Tensor) -> Tensor:
    """A plain tensor: gathered, where it is cut."""
    return run_rule("gather", _whole_rule, (tensor,), {}) if isinstance(tensor, ShardedTensor) else tensor


def _whole_rule(input: Operand) -> Recipe:
    return per_tile(input, lambda work, tile: tile, uncut=frozenset(range(input.ndim)))


def on_tile(compute: Callable[[Work, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Local work that needs the first tensor of the call and nothing else of it."""
    return lambda work, *args, **kwargs: compute(work, next(operands((args, kwargs), Tensor)))


def viewing(input: Operand, space: Sequence[int], links: Sequence[Link], local: Any, **options: Any) -> Recipe:
    """A view of one operand: the space is the result."""
    options = {"view": True, **options}
    return Recipe(space=tuple(space), reads=(Read(input, tuple(links)),), local=local, runs_empty=True, **options)


def local_shape(work: Work) -> tuple[int, ...]:
    """The shape of this rank's box of the space."""
    return shape_of(work.box)


@each("permute transpose swapaxes swapdims movedim moveaxis t adjoint T mT mH H")
def permutation(function: Any, *args: Any, **kwargs: Any) -> Recipe:
    """torch says where each dim goes, if no two have the same size."""
    (input,) = operands((args, kwargs))
    first = 2
    # Sizes 2, 3, 4, ...: each dim can be recognised in the result by its size.
    probe = torch.empty([first + d for d in range(input.ndim)], device="meta")
    rest = [probe if isinstance(a, Operand) else a for a in args]
    named = {name: probe if isinstance(a, Operand) else a for name, a in kwargs.items()}
    order = [size - first for size in function(*rest, **named).shape]
    links = [Link(order.index(dim)) for dim in range(input.ndim)]
    return viewing(input, [input.shape[dim] for dim in order], links, as_called(function))


@each("contiguous")
def contiguous(function: Any, input: Operand, **options: Any) -> Recipe:
    """Its operand itself, where that is contiguous on one rank."""
    links = [Link(d) for d in range(input.ndim)]
    return viewing(input, input.shape, links, as_called(function), either=True)


@each("expand expand_as broadcast_to")
def expand(function: Any, *args: Any, **kwargs: Any) -> Recipe:
    """A dim of size one is stretched; it was never cut."""
    input = next(operands((args, kwargs)))
    space = shape(function, *args, **kwargs)
    links = stretched(input.shape, space)
    return viewing(input, space, links, on_tile(lambda work, tile: tile.expand(local_shape(work))))


@made_of("broadcast_tensors")
def broadcast_tensors(*tensors: Any) -> tuple[Tensor, ...]:
    """Each stretched to the common shape."""
    given = list(operands(tensors, Tensor))
    common = torch.broadcast_shapes(*(tensor.shape for tensor in given))
    return tuple(tensor.expand(common) for tensor in given)


@each("view_as_real")
def view_as_real(function: Any, input: Operand) -> Recipe:
    """A new last dim of two, never cut."""
    return viewing(input, (*input.shape, 2), [Link(d) for d in range(input.ndim)], as_called(function))


@each("view_as_complex")
def view_as_complex(function: Any, input: Operand) -> Recipe:
    """The last dim of two, which is never cut, becomes one number."""
    links = [*(Link(d) for d in range(input.ndim - 1)), WHOLE]
    return viewing(input, input.shape[:-1], links, as_called(function))


@rule(Tensor.unfold, family="view")
def unfold(input: Operand, dimension: int, size: int, step: int) -> Recipe:
    """Sliding windows along a dim; the windows' own dim is the last."""
    space = shape(Tensor.unfold, input, dimension, size, step)
    dim = dimension % input.ndim
    links = [Link(d, Window(size, step)) if d == dim else Link(d) for d in range(input.ndim)]

    def local(work: Work, tile: Tensor) -> Tensor:
        if work.box[dim].empty:  # no window, and perhaps no room for one
            return tile.narrow(dim, 0, 0).unsqueeze(-1).expand(local_shape(work))
        return tile.unfold(dim, size, step)

    return viewing(input, space, links, on_tile(local))


def normal(dim: int, ndim: int) -> int:
    """A dim counted from 0; torch's error if there is none. A tensor without dims takes 0 and -1, as in torch."""
    most = max(1, ndim)
    if not -most <= dim < most:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-most}, {most - 1}], but got {dim})")
    return dim % most


def flat_ints(values: Sequence[Any]) -> tuple[int, ...]:
    """``f(1, 2)`` and ``f((1, 2))`` mean the same."""
    inner = values[0] if len(values) == 1 and isinstance(values[0], (tuple, list)) else values
    return tuple(int(value) for value in inner)
