"""Padding and cropping. Tiles stay where they are; only a wrap, or a reflection wider than its tile, moves data.

The output is cut where the input's tiles come to lie, so that a constant padding is local: the outer tiles grow. A
reflection reads what lies near the edge, which the outer tile usually has; a wrap reads the opposite edge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ShardingError
from ...geometry import Access, Mirror, Window, whole
from ...tensor import here
from ..recipe import Link, Operand, Read, Recipe, Work
from ..table import name_of, rule

Amounts = list[tuple[int, int]]


def shape_from_torch(function: Callable[..., Tensor], input: Operand, *args: Any) -> tuple[int, ...]:
    """The global shape of a result: torch itself is asked, with a tensor that has no data. What it refuses, we do."""
    try:
        return tuple(function(torch.empty(input.shape, dtype=input.dtype, device="meta"), *args).shape)
    except (RuntimeError, TypeError, ValueError) as error:
        why = f"{error}".partition("\n")[0]
        raise ShardingError(f"{name_of(function)} in {here()}: {why} (global shape {list(input.shape)})") from error


@rule(F.pad)
def describe_pad(input: Operand, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Recipe:
    """The rule of F.pad in every mode."""
    shape = shape_from_torch(F.pad, input, pad, mode, value)
    amounts = _by_dim(pad, input.ndim)
    if mode == "constant":
        windows = [Window(padding=before) for before, _ in amounts]
        return _recipe(input, shape, amounts, windows, _constant(input, amounts, len(pad), value))
    mirrors = [Mirror(n, before, mode, after) for n, (before, after) in zip(input.shape, amounts, strict=True)]
    if mode == "circular":
        _check_wrap(input, amounts, mirrors)
    return _recipe(input, shape, amounts, mirrors, _mirrored(input, amounts, len(pad), mirrors))


@rule(torch.constant_pad_nd)
def constant_pad_nd(input: Operand, pad: Sequence[int], value: float = 0) -> Recipe:
    """F.pad under another name."""
    return describe_pad(input, pad, "constant", value)


def _by_dim(pad: Sequence[int], ndim: int) -> Amounts:
    """torch counts pads from the last dim; here (before, after) for each dim from the first.

    >>> _by_dim((1, 2, 3, 4), 3)
    [(0, 0), (3, 4), (1, 2)]
    """
    given = [(int(pad[i]), int(pad[i + 1])) for i in range(0, len(pad), 2)]
    return [(0, 0)] * (ndim - len(given)) + given[::-1]


def _from_last(amounts: Amounts, length: int) -> list[int]:
    return [amount for pads in reversed(amounts) for amount in pads][:length]


def _check_wrap(input: Operand, amounts: Amounts, mirrors: list[Mirror]) -> None:
    """torch checks a wrap against the uncropped size only, and past what was kept returns memory it never wrote."""
    for dim, (pads, mirror) in enumerate(zip(amounts, mirrors, strict=True)):
        if max(pads) > mirror.kept.size:
            raise ShardingError(
                f"pad in {here()}: dim {dim} of {list(input.shape)} cannot wrap round more than once: circular padding "
                f"{pads} of the {mirror.kept.size} elements kept; pad less, or in two steps"
            )


def _recipe(
    input: Operand, shape: tuple[int, ...], amounts: Amounts, accesses: Sequence[Access], local: Callable[..., Tensor]
) -> Recipe:
    """Dims that are not padded are read one to one, so that their cuts stay."""
    links = tuple(Link(d, access) if any(amounts[d]) else Link(d) for d, access in enumerate(accesses))
    return Recipe(space=shape, reads=(Read(input, links),), local=local)


def _outside(work: Work, input: Operand, dim: int, before: int) -> tuple[int, int]:
    """How much of this rank's box lies before and after the sample."""
    wanted = work.box[dim].shift(-before)
    inside = wanted.intersect(whole(input.shape[dim]))
    return (wanted.size, 0) if inside.empty else (inside.lo - wanted.lo, wanted.hi - inside.hi)


def _constant(input: Operand, amounts: Amounts, length: int, value: float | None) -> Callable[..., Tensor]:
    """Local work of a constant padding: the outer tiles grow."""

    def local(work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        pads = [
            both if work.native(input, dim) else _outside(work, input, dim, both[0]) for dim, both in enumerate(amounts)
        ]
        return F.pad(tile, _from_last(pads, length), "constant", value)

    return local


def _mirrored(input: Operand, amounts: Amounts, length: int, mirrors: list[Mirror]) -> Callable[..., Tensor]:
    """Local work of a reflection, a replication or a wrap."""

    def local(work: Work, tile: Tensor, *_: Any, **__: Any) -> Tensor:
        """Cut dims are completed first, each by the cheapest way; torch pads the others in one call."""
        rest: Amounts = list(amounts)
        wrapped = False
        for dim, mirror in enumerate(mirrors):
            if work.native(input, dim) or not any(amounts[dim]):
                continue
            rest[dim] = (0, 0)
            if mirror.mode == "circular":  # its runs were laid side by side on their way here
                wrapped = wrapped or max(amounts[dim]) > 0
            elif _fits(work, mirror, dim):
                rest[dim] = _outside(work, input, dim, mirror.before)
            else:
                tile = _selected(work, mirror, tile, dim)
        if wrapped and not any(map(any, rest)):  # a movement made it: no second copy
            return tile
        return F.pad(tile, _from_last(rest, length), mirrors[0].mode)

    return local


def _fits(work: Work, mirror: Mirror, dim: int) -> bool:
    """Is what was fetched the very part of the sample under this box, so that torch can pad it by itself?"""
    (fetched,) = mirror.need(work.box[dim])
    return work.box[dim].shift(-mirror.before).intersect(whole(mirror.in_size)) == fetched


def _selected(work: Work, mirror: Mirror, tile: Tensor, dim: int) -> Tensor:
    """A tile smaller than its padding: element by element, in global terms."""
    (fetched,) = mirror.need(work.box[dim])
    sources = [mirror.source(i) - fetched.lo for i in range(work.box[dim].lo, work.box[dim].hi)]
    return tile.index_select(dim, torch.tensor(sources, device=tile.device))
