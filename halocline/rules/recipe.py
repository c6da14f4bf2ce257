"""What a rule says about one call: data for the executor, made from global shapes and arguments alone.

An operation runs over a *space* of dims. Each dim of each operand is linked to a dim of the space by an access (which
interval of it a box of the space needs), or is read whole. Each output lists the dims of the space it is made of; dims
of the space that no output has are summed over.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..geometry import Access, Box, Interval, Same


@dataclass(frozen=True)
class Operand:
    """A tensor argument as a rule sees it: its global shape, never its values."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    cut_dims: frozenset[int]

    @property
    def ndim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def dim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """As of a tensor."""
        return self.shape[dim]

    def numel(self) -> int:
        """Global elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Link:
    """Ties a dim of an operand to a dim of the space (None: every rank reads the same, all of it or one part).

    ``access`` says which interval of the operand an interval of the space needs. ``fill`` says what stands outside the
    operand; without it the needed interval is clipped to the operand.
    """

    dim: int | None
    access: Access = field(default_factory=Same)
    fill: float | None = None


WHOLE = Link(None)


@dataclass(frozen=True)
class Read:
    """One operand, and how each of its dims follows the space."""

    operand: Operand
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Output:
    """A result: its global shape, and for each dim the dim of the space it is (None: one that is never cut).

    ``constant`` results carry no gradient; ``dtype`` is that of the first operand unless said otherwise. Both matter
    where a rank has an empty tile and nothing to compute, yet must take part in what follows like all others.
    """

    shape: tuple[int, ...]
    dims: tuple[int | None, ...]
    constant: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Slot:
    """How one dim of an operand came to this rank: ``needs`` in the operand's own indices, unclipped.

    Where ``native``, neither operand nor work is cut along it: the dim is as on one rank, and torch pads it itself.
    """

    needs: tuple[Interval, ...]
    native: bool


@dataclass(frozen=True)
class Work:
    """This rank's share: its box of the space, and how each operand was brought (by operand index)."""

    box: Box
    slots: tuple[tuple[Slot, ...], ...]

    def native(self, operand: Operand, dim: int) -> bool:
        """Is a dim of an operand as on one rank, so that torch pads it itself?"""
        return self.slots[operand.index][dim].native


class Local:
    """Local work in two stages: ``bound(work)`` is called once for a rank's share, its result for every call."""

    def __init__(self, bound: Callable[[Work], Callable[..., Any]]) -> None:
        self.bound = bound

    def __call__(self, work: Work, *args: Any, **kwargs: Any) -> Any:
        return self.bound(work)(*args, **kwargs)


def as_called(function: Callable[..., Any]) -> Local:
    """Local work that is the call itself: for functions whose other arguments speak of no sizes."""
    return Local(lambda work: function)


@dataclass(frozen=True)
class LinearPart:
    """What a piece of the first operand adds to ``out`` of the local output, through ``sees`` of the second operand.

    ``compute.forward(piece, *others)`` gives it, ``compute.backward(gradient, piece, *others, needed)`` the gradients
    of piece and others.
    """

    out: tuple[slice, ...]
    sees: tuple[slice, ...]
    compute: Any


@dataclass(frozen=True)
class SingleNode:
    """Local work that makes just one autograd node, of this class, whose inputs are the operands in order of reading.

    Law 3's factors can then be a hook on it. ``again(work, gradient, slope, *others)`` gives the gradient of the first
    operand once more, as a function of the others: only so do their factors show in a second derivative.
    """

    node: type
    again: Callable[..., Tensor]


class Moments(NamedTuple):
    """Of each group of elements: how many, their mean, and the sum of squared deviations from it, in float64."""

    elements: Tensor
    mean: Tensor
    spread: Tensor


def merged(parts: Moments, dim: int) -> Moments:
    """The moments of parts taken together. Never a mean of squares less a square of the mean."""
    elements = parts.elements.sum(dim)
    mean = (parts.elements * parts.mean).sum(dim) / elements.clamp_min(1)
    spread = (parts.spread + parts.elements * (parts.mean - mean.unsqueeze(dim)) ** 2).sum(dim)
    return Moments(elements, mean, spread)


class Reduction(Protocol):
    """Local work in two halves, between which the ranks reduce statistics. Operands are this rank's, or None.

    Forward: ``moments`` of this rank, merged over the ranks, then ``result``. Backward: ``slopes`` gives numbers to be
    added up over the ranks and what to keep meanwhile, ``gradients`` gets their sum over ``count`` and that, and gives
    the gradient of each operand. ``composed`` is the whole map from differentiable functions, for second derivatives;
    ``total`` in it is the sum over the ranks.
    """

    @property
    def count(self) -> int:
        """Elements of a group over all ranks."""

    def moments(self, *operands: Any) -> Moments:
        """The moments of this rank's elements."""

    def result(self, mean: Tensor, variance: Tensor, *operands: Any) -> Tensor:
        """The forward result, from the statistics of all ranks."""

    def slopes(self, gradient: Tensor, mean: Tensor, variance: Tensor, *operands: Any) -> tuple[Tensor, Any]:
        """Backward, first half: what has to be added up over the ranks, and what to keep meanwhile."""

    def gradients(self, means: Tensor, kept: Any, mean: Tensor, variance: Tensor, *operands: Any) -> Any:
        """Backward, second half: the gradient of each operand."""

    def composed(self, total: Callable[[Tensor], Tensor], *operands: Any) -> Tensor:
        """The whole map from differentiable functions, for a second derivative."""


class Tracking(NamedTuple):
    """Running statistics: ``update`` gets the sum of every rank's ``share(mean, variance)``, in forward."""

    share: Callable[[Tensor, Tensor], Tensor]
    update: Callable[[Tensor], None]


class Reduced(NamedTuple):
    """What ``local`` returns where ``Recipe.reduces`` is set: work that the executor carries out."""

    work: Reduction
    operands: tuple[Tensor | None, ...]
    tracking: Tracking | None = None
    alone: Callable[..., Tensor] | None = None  #: torch's own kernel, where this rank has all that shares statistics


class RingWork(Protocol):
    """Work that takes the pieces of some operands one after another, as they go round the ranks.

    ``begin`` gets this rank's operands, ``step`` a piece of each travelling one and which interval of the whole dim it
    is, ``end`` gives the result and a tensor to keep for backward. Backward takes the same pieces in the same order:
    ``step_backward`` gives a piece's gradients, ``end_backward`` those of the operands that stay.
    """

    def begin(self, *operands: Any) -> Any:
        """The state before the first piece."""

    def step(self, state: Any, interval: Interval, *pieces: Any) -> Any:
        """The state after one more piece."""

    def end(self, state: Any) -> tuple[Tensor, Tensor]:
        """The result, and a tensor to keep for backward."""

    def begin_backward(self, gradient: Tensor, result: Tensor, kept: Tensor, *resident: Any) -> Any:
        """The state of backward before the first piece."""

    def step_backward(self, state: Any, interval: Interval, *pieces: Any) -> tuple[Any, list[Tensor]]:
        """The state after one more piece, and that piece's gradients."""

    def end_backward(self, state: Any) -> list[Tensor]:
        """The gradients of the operands that stay."""


@dataclass(frozen=True)
class RingSteps:
    """Operands that are read whole along a dim may go round in pieces instead, if one axis cuts them and the work.

    The first ``resident`` operands stay. The others are cut along ``dim``, and the space along ``along``, by that axis,
    which may also cut ``instead`` for the call (a shuffle). ``bound(work)`` makes the steps of a rank.
    """

    resident: int
    dim: int
    along: int
    instead: int
    bound: Callable[[Work], RingWork]


@dataclass(frozen=True)
class Recipe:
    """What a rule says about one call. A rule never communicates: where ranks must, a field here says what about."""

    #: The sizes of the dims that the work runs over.
    space: tuple[int, ...]
    #: The operands, in the order of the call's tensors as far as the work reads them.
    reads: tuple[Read, ...]
    #: ``local(work, *args, **kwargs)`` gets the call's own arguments with each tensor replaced by what was needed of
    #: it, and returns the local part of each output.
    local: Callable[..., Any]
    #: Without any there is one result, which is the space.
    outputs: tuple[Output, ...] = ()
    #: Dims of the space that may not be cut: they are gathered, or their cut is moved to another dim for the call.
    uncut: frozenset[int] = frozenset()
    #: The first operand is written to, and is the result.
    inplace: bool = False
    #: How the parts of dims that no output has become one: added up, or the largest, which has no gradient.
    combine: Literal["sum", "max"] | None = None
    #: ``local`` runs on empty tiles too. Else a rank without work computes one element that is thrown away.
    runs_empty: bool = False
    #: torch's result shares memory with the first operand.
    view: bool = False
    #: torch's result is new memory, even where ``local`` gives its operand back.
    fresh: bool = False
    #: Integers among the operands point into the sample, so that an idle rank cannot make them up.
    positions: bool = False
    #: With ``view``: torch copies where the strides do not allow a view.
    either: bool = False
    #: What an index takes of the first operand, so that a copy of it can be written back.
    index: tuple[Any, ...] | None = None
    #: Of work that is linear in its first operand: ``linear_part(out, piece, main)`` is what a piece of it adds to the
    #: box ``out``, both in global indices. The ``main`` piece is the own tile, which reaches all of the box.
    linear_part: Callable[[Box, Box, bool], LinearPart] | None = None
    #: ``local`` may be called for any box of the space, with one operand, whose dims are the space's: the output is
    #: then computed box by box where that spares gluing a halo to the tile.
    box_local: bool = False
    #: The work makes one autograd node, on which law 3 can be a hook.
    single_node: SingleNode | None = None
    #: The work is ``F.linear`` of the first operand's rows; says whether this rank adds the bias. Sums of it, and of
    #: its gradients, then travel in tiles of rows.
    row_product: Callable[[Work], bool] | None = None
    #: Dims over which statistics run in the middle of the work: ``local`` then returns a :class:`Reduced`.
    reduces: frozenset[int] | None = None
    #: Dims over which what is tracked of those statistics is added up.
    tracks: frozenset[int] = frozenset()
    #: Results are cut as the first operand is, whatever the work needed.
    keeps_cut: bool = False
    #: Another way to bring operands that are read whole.
    ring: RingSteps | None = None
    #: Operands are gathered so that the weights can stay cut: the log does not advise against it.
    gathers_by_design: bool = False
    #: Former names, for one release.
    boxes: InitVar[bool | None] = None
    sums: InitVar[bool | None] = None

    def __post_init__(self, boxes: bool | None, sums: bool | None) -> None:
        if not self.outputs:
            object.__setattr__(self, "outputs", (Output(self.space, tuple(range(len(self.space)))),))
        if boxes is not None:
            warnings.warn("Recipe(boxes=...) is now Recipe(box_local=...)", DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "box_local", boxes)
        if sums:
            warnings.warn('Recipe(sums=True) is now Recipe(combine="sum")', DeprecationWarning, stacklevel=3)
            object.__setattr__(self, "combine", "sum")


def follow(operand: Operand, *dims: int | None) -> Read:
    """A read whose dims follow these dims of the space one to one; without any, the dims of the same numbers.

    None stands for a dim of the operand that every rank reads whole.
    """
    dims = dims or tuple(range(operand.ndim))
    return Read(operand, tuple(WHOLE if dim is None else Link(dim) for dim in dims))


def read_whole(operand: Operand) -> Read:
    """A read of all of an operand, on every rank."""
    return Read(operand, (WHOLE,) * operand.ndim)


def per_tile(input: Operand, local: Callable[..., Any], *others: Read, **options: Any) -> Recipe:
    """A recipe whose space is ``input``: each rank works on its own tile, be it empty, with what ``others`` bring."""
    return Recipe(space=input.shape, reads=(follow(input), *others), local=local, runs_empty=True, **options)


def whole_operands(*values: Any) -> list[Read]:
    """Reads of all of each operand; arguments that are None, or numbers, are passed over."""
    return [read_whole(value) for value in values if isinstance(value, Operand)]


def stretched(shape: Sequence[int], space: Sequence[int]) -> tuple[Link, ...]:
    """Dims aligned from the right; one of size one that is stretched is read whole."""
    first = len(space) - len(shape)
    return tuple(Link(first + d) if size == space[first + d] else WHOLE for d, size in enumerate(shape))


def pair(value: Any, count: int) -> tuple[int, ...]:
    """torch's way of giving one number for all spatial dims.

    >>> pair(3, 2), pair((1, 2), 2), pair([5], 3)
    ((3, 3), (1, 2), (5, 5, 5))
    """
    if isinstance(value, Sequence):
        return tuple(int(v) for v in value) if len(value) == count else (int(value[0]),) * count
    return (int(value),) * count
