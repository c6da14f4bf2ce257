"""Reductions: each rank reduces its tile, and the executor combines the parts.

Sums and extremes are rules with a ``combine``; means, variances, norms and the like are written with them, so that each
costs one or two small sums over the ranks that cut the reduced dims. Parts of half precision are added up in float32
and rounded once, as torch does on one device.

    x.mean((2, 3, 4))   # per rank: the sum of its tile; then one sum over ranks; then a division by the global count
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..recipe import Operand, Recipe, Work, as_called
from ..table import composite, refuse, run_for, run_rule
from .scan import cut_points, extreme_along
from .view import made_of, made_of_each, normal, with_torch_names
from .whole_axis import reduced_shape, reduction

Dims = int | Sequence[int] | None
NARROW = (torch.half, torch.bfloat16)


def normal_dims(dim: Dims, ndim: int) -> tuple[int, ...]:
    """The reduced dims, from 0; None or an empty list means all of them."""
    if dim is None or (isinstance(dim, Sequence) and len(dim) == 0):
        return tuple(range(ndim))
    dims = tuple(normal(d, ndim) for d in ((dim,) if isinstance(dim, int) else dim))
    if len(set(dims)) != len(dims):
        raise RuntimeError(f"dim {dims[-1]} appears multiple times in the list of dims")
    return tuple(sorted(dims)) if ndim else ()


def _sum_rule(input: Operand, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Recipe:
    """Each rank sums its tile; the executor adds the parts up over the ranks."""
    dims = normal_dims(dim, input.ndim)

    def local(work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        return tile.sum(dims, keepdim, dtype=dtype)

    return reduction(input, dims, keepdim, local, combine="sum")


@made_of("sum")
def sum_(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Each rank adds up its tile, the executor the parts; numbers of half precision in float32."""
    if dtype is None and input.dtype in NARROW:  # parts are added in float32, rounded once
        return sum_(input, dim, keepdim, dtype=torch.float32).to(input.dtype)
    return run_rule(torch.sum, _sum_rule, (input, dim, keepdim), {"dtype": dtype})


def count(input: Tensor, dim: Dims) -> int:
    """How many elements one value of a reduction over ``dim`` is made of."""
    return prod(input.shape[d] for d in normal_dims(dim, input.ndim))


@made_of("mean")
def mean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """A sum over the global count, which every rank knows."""
    target = dtype or input.dtype
    if not (target.is_floating_point or target.is_complex):
        raise RuntimeError(f"mean(): could not infer output dtype: {target} has no mean; convert to a floating dtype")
    wide = torch.float32 if target in NARROW else target
    return (sum_(input, dim, keepdim, dtype=wide) / count(input, dim)).to(target)


@composite(torch.nansum, Tensor.nansum)
def nansum(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """A sum in which NaN counts as zero."""
    return sum_(torch.where(input.isnan(), torch.zeros((), dtype=input.dtype), input), dim, keepdim, dtype=dtype)


@composite(torch.nanmean, Tensor.nanmean)
def nanmean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Both the sum and the count of what is no NaN run over all ranks."""
    return nansum(input, dim, keepdim, dtype=dtype) / sum_(~input.isnan(), dim, keepdim)


@composite(torch.count_nonzero, Tensor.count_nonzero)
def count_nonzero(input: Tensor, dim: Dims = None) -> Tensor:
    """A sum of comparisons."""
    return sum_(input != 0, dim)


@composite(torch.any, Tensor.any)
def any_(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Is the number of true elements over all ranks above zero?"""
    return _as_byte(input, sum_(input != 0, dim, keepdim) > 0)


@composite(torch.all, Tensor.all)
def all_(input: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Is the number of false elements over all ranks zero?"""
    return _as_byte(input, sum_(input == 0, dim, keepdim) == 0)


def _as_byte(input: Tensor, answer: Tensor) -> Tensor:
    """torch answers in bytes where it is asked in bytes."""
    return answer.to(torch.uint8) if input.dtype == torch.uint8 else answer


def _split_var(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Dims, float, bool]:
    """torch's two signatures: (dim, unbiased, keepdim) and (dim, *, correction, keepdim); or (unbiased) alone."""
    # By place, as torch's older signature has them.
    values = dict(zip(("dim", "unbiased", "keepdim"), args, strict=False))
    if isinstance(values.get("dim"), bool):
        values = {"unbiased": values["dim"]}
    values.update(kwargs)
    correction = values.get("correction")
    if correction is None:
        correction = 1 if values.get("unbiased", True) else 0
    return values.get("dim", values.get("axis")), correction, values.get("keepdim", False)


def _moments(input: Tensor, dim: Dims, correction: float, keepdim: bool) -> tuple[Tensor, Tensor]:
    """Variance and mean over ``dim``, from two sums over the ranks."""
    if input.dtype in NARROW:  # statistics in float32, rounded once
        variance, centre = _moments(input.float(), dim, correction, keepdim)
        return variance.to(input.dtype), centre.to(input.dtype)
    centre = mean(input, dim, True)
    deviation = input - centre
    squares = (deviation * deviation.conj()).real if input.is_complex() else deviation * deviation
    # The global count: torch's correction is of the whole sample.
    freedom = max(0.0, count(input, dim) - correction)
    variance = sum_(squares, dim, keepdim) / freedom
    return variance, _dropping(centre, normal_dims(dim, input.ndim), keepdim)


@composite(torch.var, Tensor.var)
def var(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Two sums: the mean, then the squared deviations from it."""
    return _moments(input, *_split_var(args, kwargs))[0]


@composite(torch.std, Tensor.std)
def std(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The root of the variance; of a variance of zero the slope is zero, as in torch."""
    return std_mean(input, *args, **kwargs)[0]


@composite(torch.var_mean)
def var_mean(input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Both from the same two sums."""
    return _moments(input, *_split_var(args, kwargs))


@composite(torch.std_mean)
def std_mean(input: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Both from the same two sums, in float32 for half precision."""
    wide = input.float() if input.dtype in NARROW else input
    variance, centre = _moments(wide, *_split_var(args, kwargs))
    dtype = variance.dtype if wide is input else input.dtype
    return _root(variance, 2).to(dtype), centre.to(input.dtype)


def _worst_value(dtype: torch.dtype, largest: bool) -> float:
    """What any value beats."""
    if dtype.is_floating_point:
        return float("-inf") if largest else float("inf")
    bounds = torch.iinfo(dtype)
    return bounds.min if largest else bounds.max


def _extreme_rule(input: Operand, dims: tuple[int, ...], keepdim: bool, largest: bool) -> Recipe:
    """The largest value over ``dims``; of the smallest its negative, so that the ranks' largest is asked for."""

    def local(work: Work, tile: Tensor, *_: Any) -> Tensor:
        tile = tile.detach()
        if any(tile.shape[d] == 0 for d in dims):  # this rank has nothing to say
            shape = reduced_shape(tile.shape, dims, keepdim)
            return _signed(tile.new_full(shape, _worst_value(tile.dtype, largest)), largest)
        return _signed(tile.amax(dims, keepdim) if largest else tile.amin(dims, keepdim), largest)

    return reduction(input, dims, keepdim, local, combine="max")


def _signed(value: Tensor, largest: bool) -> Tensor:
    return value if largest else -value if value.is_floating_point() else ~value


def extreme_value(input: Tensor, dims: tuple[int, ...], keepdim: bool, largest: bool) -> Tensor:
    """The largest (smallest) value over ``dims``, without gradient."""
    function = torch.amax if largest else torch.amin
    return _signed(run_rule(function, _extreme_rule, (input, dims, keepdim, largest), {}), largest)


def _extreme(input: Tensor, dim: Dims, keepdim: bool, largest: bool) -> Tensor:
    """As torch's amax: ties share the gradient evenly, over all ranks."""
    dims = normal_dims(dim, input.ndim)
    # Maximum and minimum of truth values are "any" and "all".
    if input.dtype == torch.bool:
        return any_(input, dims, keepdim) if largest else all_(input, dims, keepdim)
    value = best = extreme_value(input, dims, True, largest)
    if input.requires_grad:
        chosen = (input == best) | (input.isnan() & best.isnan())
        share = sum_(torch.where(chosen, input, torch.zeros((), dtype=input.dtype)), dims, True)
        value = share / sum_(chosen, dims, True)
        # The quotient has the gradient; the value itself is the extreme, without the rounding of a division.
        value = torch.where(torch.isfinite(best), value + (best - value).detach(), value)
    return _dropping(value, dims, keepdim)


def _dropping(value: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """A result with dims of size one in place of ``dims``, without them unless ``keepdim``."""
    return value if keepdim else value.reshape(reduced_shape(value.shape, dims, False))


@made_of_each("amax amin")
def amax(function: Any, input: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    """The largest or smallest value; ties share the gradient evenly over all ranks, as they do on one."""
    return _extreme(input, dim, keepdim, function is torch.amax)


@made_of_each("max min")
def max_(function: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's three functions of each name: of two tensors, of all elements, and along a dim with positions."""
    other = args[0] if args else kwargs.get("other")
    if isinstance(other, Tensor):
        return (torch.maximum if function is torch.max else torch.minimum)(input, other)
    if not args and not kwargs:
        return _extreme(input, None, False, function is torch.max)
    return _along(function, input, *args, **kwargs) if args else _along(function, input, **{"dim": 0, **kwargs})


#: Functions that answer with positions alone, and those that answer with values too.
_PAIRED = {torch.argmax: torch.max, torch.argmin: torch.min}


def _along(function: Any, input: Tensor, dim: int, keepdim: bool = False) -> Any:
    """Functions of one dim that answer with values and positions, or with positions alone."""
    place = normal(dim, input.ndim)
    points = cut_points(input, place)
    if points is None or input.dtype == torch.bool:
        result = run_for(function, _whole_dim_rule, input, place, keepdim)
    else:
        pair = extreme_along(_PAIRED.get(function, function), input, place, points)
        result = pair if keepdim else tuple(part.squeeze(place) for part in pair)
        result = result[1] if function in _PAIRED else result
    return with_torch_names(function, result)


def _whole_dim_rule(function: Any, input: Operand, dim: int, keepdim: bool) -> Recipe:
    local, results = as_called(function), 1 if function in _PAIRED else 2
    return reduction(input, (dim,), keepdim, local, results=results, uncut=frozenset({dim}))


@made_of_each("argmax argmin")
def argmax(function: Any, input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The position along a dim, counted through the whole sample."""
    if dim is None:
        raise refuse(function, "the position in the flattened tensor needs the whole of it", "call it on hc.gather(x)")
    return _along(function, input, dim, keepdim)


@composite(torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp)
def logsumexp(input: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """A maximum over the ranks, then a sum of what is left above it."""
    dims = normal_dims(dim, input.ndim)
    top = extreme_value(input, dims, True, True)
    # Infinity minus infinity is no number.
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    return _dropping(sum_((input - top).exp(), dims, True).log() + top, dims, keepdim)


@composite(torch.linalg.vector_norm)
def vector_norm(x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """A sum of powers, or an extreme for infinite orders; never a gather."""
    if x.dtype in NARROW and dtype is None:  # squares of such numbers leave their range
        return vector_norm(x.float(), ord, dim, keepdim).to(x.dtype)
    size = (x if dtype is None else x.to(dtype)).abs()
    if ord == float("inf"):
        return size.amax(normal_dims(dim, x.ndim), keepdim)
    if ord == float("-inf"):
        return size.amin(normal_dims(dim, x.ndim), keepdim)
    if ord == 0:
        return sum_((size != 0).to(size.dtype), dim, keepdim)
    if ord == 1:
        return sum_(size, dim, keepdim)
    return _root(sum_(size * size if ord == 2 else _power(size, ord), dim, keepdim), ord)


def _power(size: Tensor, order: float) -> Tensor:
    """As in torch, a zero has no slope, where the power's would be infinite."""
    if order > 1:
        return size**order
    zero = size == 0
    return size.masked_fill(zero, 1.0).pow(order).masked_fill(zero, 0.0 if order > 0 else float("inf"))


def _root(powers: Tensor, order: float) -> Tensor:
    """torch gives a zero norm the gradient zero; a bare root would give it infinity."""
    zero = powers == 0
    safe = torch.where(zero, torch.ones_like(powers), powers)
    root = safe.sqrt() if order == 2 else safe ** (1.0 / order)
    return torch.where(zero, torch.zeros_like(powers), root)


@composite(torch.norm, Tensor.norm)
def norm(
    input: Tensor, p: Any = "fro", dim: Dims = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Tensor:
    """torch's older name for vector norms. Of matrix norms only Frobenius', which is one of them."""
    if out is not None:
        raise refuse(torch.norm, "out= writes into a tensor of its own sharding", "assign the result instead")
    if p == "nuc":
        raise refuse(torch.norm, "the nuclear norm needs the whole matrix", "call it on hc.gather(x)")
    return vector_norm(input, 2 if p in ("fro", None) else p, dim, keepdim, dtype=dtype)


@composite(torch.linalg.norm)
def linalg_norm(A: Tensor, ord: Any = None, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Vector norms. A norm of a matrix needs the whole of it, and is refused."""
    several = A.ndim != 1 if dim is None else isinstance(dim, (tuple, list)) and len(dim) > 1
    if ord is not None and several:
        raise refuse(torch.linalg.norm, "a matrix norm of a cut matrix", "use torch.linalg.vector_norm or hc.gather(x)")
    return vector_norm(A, 2 if ord is None else ord, dim, keepdim, dtype=dtype)
