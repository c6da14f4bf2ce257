"""Products summed over shared dims: linear, matmul and its kin, einsum. A cut shared dim is summed over the ranks.

Every product is an einsum: each label is a dim of the space, each operand's dims follow their labels, and labels that
the result lacks are summed over the ranks that cut them. Autocast decides the dtype of a product before anything is
summed over ranks, so that the sum of parts has the precision of one rank's sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..asking_torch import planned
from ..recipe import WHOLE, Link, Operand, Output, Read, Recipe, Work
from ..table import composite, refuse
from .view import as_called, each, made_of, made_of_each, normal, operands, shape

Labels = Sequence[Hashable]


def result_dtype(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: str) -> torch.dtype:
    """What autocast makes of this call on one rank: it depends on which sizes are one, and a tile has other sizes.

    torch is asked with tensors of the same dims that are two long at most.
    """

    def small(value: Any) -> Any:
        """Operands as small real tensors on the device, everything else as it is."""
        if isinstance(value, (Operand, Tensor)):
            return torch.zeros([min(2, size) for size in value.shape], dtype=value.dtype, device=device)
        if isinstance(value, (tuple, list)):
            return type(value)(small(item) for item in value)
        return value

    with planned(), torch.no_grad():
        made: Tensor = function(*small(args), **{name: small(value) for name, value in kwargs.items()})
    return made.dtype


def autocasts(device: str) -> bool:
    """Does torch choose the dtype of a product on this device?"""
    return device != "meta" and torch.is_autocast_enabled(device)


def made_of_products(names: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a composite that computes under autocast in the dtype in which torch's own function does."""

    def keep(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(run)
        def call(function: Any, *args: Any, **kwargs: Any) -> Tensor:
            """Run under the autocast state that leads to torch's own dtype."""
            device = next(operands((args, kwargs), Tensor)).device.type
            if not autocasts(device):
                return run(*args, **kwargs)
            dtype = result_dtype(function, args, kwargs, device)
            with torch.autocast(device, enabled=dtype != torch.float32):
                return run(*args, **kwargs).to(dtype)

        made_of_each(names)(call)
        return run

    return keep


def contraction(
    terms: Sequence[tuple[Operand, Labels]], result: Labels, local: Callable[..., Tensor], uncut: Labels = ()
) -> Recipe:
    """Every label is a dim of the space; those the result lacks are summed. A dim of size one is stretched."""
    sizes: dict[Hashable, int] = {}
    for operand, labels in terms:
        for label, size in zip(labels, operand.shape, strict=True):
            # A dim of size one stretches to the size of its label in other operands.
            sizes[label] = size if sizes.get(label, 1) == 1 else sizes[label]
    where = {label: dim for dim, label in enumerate(sizes)}

    def link(label: Hashable, size: int) -> Link:
        return Link(where[label]) if size == sizes[label] else WHOLE

    reads = [Read(operand, tuple(map(link, labels, operand.shape))) for operand, labels in terms]
    return Recipe(
        space=tuple(sizes.values()),
        reads=tuple(reads),
        outputs=(Output(tuple(sizes[label] for label in result), tuple(where[label] for label in result)),),
        local=local,
        uncut=frozenset(where[label] for label in uncut),
        combine="sum",
        runs_empty=True,
    )


@each("linear")
def linear(function: Any, input: Operand, weight: Operand, bias: Operand | None = None) -> Recipe:
    """Where the features are cut, the rank that holds the first of them adds the bias."""
    result = shape(F.linear, input, weight, bias)
    lead, place, features = range(input.ndim - 1), input.ndim - 1, input.shape[-1]
    terms: list[tuple[Operand, Labels]] = [(input, (*lead, "in")), (weight, ("out", "in")[2 - weight.ndim :])]
    if bias is not None:
        terms.append((bias, ("out",)[1 - bias.ndim :]))

    def adds_bias(work: Work) -> bool:
        """Does this rank hold the first feature?"""
        box = work.box[place]
        return box.size == features or not (box.lo > 0 or box.empty)

    def local(work: Work, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Ranks that hold no first feature leave the bias out: the sum over ranks then has it once."""
        if bias is not None and not adds_bias(work):
            weight, bias = weight + bias.reshape(-1)[:0].sum(), None  # adds nothing, yet takes part in its backward
        return F.linear(input, weight, bias)

    recipe = contraction(terms, (*lead, "out")[: len(result)], local, uncut=() if features else ("in",))
    return replace(recipe, row_product=adds_bias) if weight.ndim == 2 and input.ndim > 1 else recipe


@each("matmul mm bmm mv dot vdot __matmul__")
def matmul(function: Any, input: Operand, other: Operand) -> Recipe:
    """Rows and columns keep their cuts; a cut shared dim is summed over the ranks."""
    shape(function, input, other)
    # Labels: numbers for dims of the batch, m rows, n columns, k the shared dim.
    batch = max(input.ndim, other.ndim, 2) - 2
    left = (*range(batch + 2 - input.ndim, batch), "m", "k") if input.ndim > 1 else ("k",)
    right = (*range(batch + 2 - other.ndim, batch), "k", "n") if other.ndim > 1 else ("k",)
    result = (*range(batch), *("m",) * (input.ndim > 1), *("n",) * (other.ndim > 1))
    return contraction([(input, left), (other, right)], result, as_called(function))


@made_of("__rmatmul__")
def rmatmul(self: Tensor, other: Tensor) -> Tensor:
    """``other @ input``."""
    return other @ self


def _plus(input: Tensor, product: Tensor, beta: Any, alpha: Any) -> Tensor:
    """``beta * input + alpha * product``; as in torch, beta zero ignores even what is not finite."""
    scaled = product if alpha == 1 else product * alpha
    if beta == 0:
        return scaled
    return scaled + (input if beta == 1 else input * beta)


@made_of_products("addmm")
def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """A product plus a scaled addend that stretches."""
    return _plus(input, torch.mm(mat1, mat2), beta, alpha)


@made_of_products("addmv")
def addmv(input: Tensor, mat: Tensor, vec: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """A product with a vector plus an addend."""
    return _plus(input, torch.mv(mat, vec), beta, alpha)


@made_of_products("baddbmm")
def baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """A product of stacks of matrices plus an addend."""
    return _plus(input, torch.bmm(batch1, batch2), beta, alpha)


@made_of_products("addbmm")
def addbmm(input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """A product summed over the stack too, plus an addend."""
    return _plus(input, torch.einsum("bij,bjk->ik", batch1, batch2), beta, alpha)


@made_of_products("outer ger")
def outer(input: Tensor, vec2: Tensor) -> Tensor:
    """Every element of one with every element of the other: both keep their cuts."""
    return input.unsqueeze(1) * vec2


@made_of_products("addr")
def addr(input: Tensor, vec1: Tensor, vec2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    """An outer product plus an addend."""
    return _plus(input, torch.outer(vec1, vec2), beta, alpha)


@composite(torch.linalg.vecdot, family="contract")
def vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> Tensor:
    """Products summed over one dim."""
    return (x.conj() * y).sum(dim)


@made_of_products("bilinear")
def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product of two inputs with a whole weight."""
    result = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return result if bias is None else result + bias


@made_of_products("inner")
def inner(input: Tensor, other: Tensor) -> Tensor:
    """Products summed over the last dim of both."""
    if input.ndim == 0 or other.ndim == 0:
        return input * other
    return torch.tensordot(input, other, ([-1], [-1]))


@made_of_products("tensordot")
def tensordot(a: Tensor, b: Tensor, dims: Any = 2) -> Tensor:
    """Products summed over the dims that are named."""
    left, right = _contracted(a, b, dims)
    # A letter for each dim; contracted dims of both share one.
    letters = [chr(ord("a") + i) for i in range(a.ndim + b.ndim)]
    first, second = letters[: a.ndim], letters[a.ndim :]
    for one, other in zip(left, right, strict=True):
        second[other] = first[one]
    kept = [c for d, c in enumerate(first) if d not in left] + [c for d, c in enumerate(second) if d not in right]
    return torch.einsum(f"{''.join(first)},{''.join(second)}->{''.join(kept)}", a, b)


def _contracted(a: Tensor, b: Tensor, dims: Any) -> tuple[list[int], list[int]]:
    """The contracted dims of both operands, counted from 0, in pairs."""
    if isinstance(dims, Tensor):
        raise refuse("tensordot", "dims held in a tensor are not known when moves are planned", "give integers")
    if isinstance(dims, int):
        return list(range(a.ndim - dims, a.ndim)), list(range(dims))
    one, other = ([d] if isinstance(d, int) else list(d) for d in dims)
    return [normal(d, a.ndim) for d in one], [normal(d, b.ndim) for d in other]


@each("einsum")
def einsum(function: Any, equation: str, *terms: Operand) -> Recipe:
    """Each letter is a dim of the space; those that the result lacks are summed over the ranks."""
    shape(torch.einsum, equation, *terms)
    given, arrow, result = equation.replace(" ", "").partition("->")
    labels = [_spelled(text, term.ndim) for text, term in zip(given.split(","), terms, strict=True)]
    all_labels = [label for part in labels for label in part]
    out = _spelled(result, None, _dots(all_labels)) if arrow else _implied(all_labels)
    twice = [label for part in labels for label in part if part.count(label) > 1]  # a diagonal: not to be cut
    # Asked once for each state of autocast; the plan outlives it.
    expected = cache(lambda device, autocast: result_dtype(torch.einsum, (equation, *terms), {}, device))

    def local(work: Work, equation: str, *tiles: Tensor) -> Tensor:
        made, device = torch.einsum(equation, *tiles), tiles[0].device.type
        return made.to(expected(device, torch.get_autocast_dtype(device))) if autocasts(device) else made

    return contraction(list(zip(terms, labels, strict=True)), out, local, uncut=twice)


def _spelled(text: str, ndim: int | None, dots: Sequence[Hashable] = ()) -> list[Hashable]:
    """A label for each dim: its letter, or its distance from the end of the ellipsis."""
    # Dims of the ellipsis are counted from its end, as they are aligned.
    before, ellipsis, after = text.partition("...")
    if ellipsis and ndim is not None:
        dots = [-d for d in range(ndim - len(before) - len(after), 0, -1)]
    return [*before, *(dots if ellipsis else ()), *after]


def _dots(labels: Sequence[Hashable]) -> list[int]:
    return sorted({label for label in labels if isinstance(label, int)})


def _implied(labels: Sequence[Hashable]) -> list[Hashable]:
    """Without an arrow: the ellipsis, then the letters that occur once, in alphabetical order."""
    once = sorted(label for label in labels if isinstance(label, str) and labels.count(label) == 1)
    return [*_dots(labels), *once]
