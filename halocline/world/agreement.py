"""How ranks agree: numbers compared, rows that every rank gets, and an error of one rank raised on all.

All ranks of the world call each of these together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import HaloclineError, RankFailure
from .base import World
from .events import Label
from .text import broadcast_text

T = TypeVar("T")


def extremes(world: World, numbers: Tensor, label: Label) -> tuple[Tensor, Tensor]:
    """The minimum and the maximum over all ranks of each int64, in one exchange."""
    if world.size == 1:
        return numbers, numbers
    # The least is the complement of the complements' greatest: the smallest int64 has no negative.
    most = world.maximum(torch.cat([numbers, ~numbers]), tuple(range(world.size)), label)
    return ~most[len(numbers) :], most[: len(numbers)]


def gather_rows(world: World, row: Tensor, label: Label, ranks: tuple[int, ...] | None = None) -> Tensor:
    """The rows of ``ranks`` (default: all), one below the other, on every rank. Rows have the same shape on all ranks,
    and no negative numbers."""
    ranks = tuple(range(world.size)) if ranks is None else ranks
    table = torch.zeros((len(ranks), *row.shape), dtype=row.dtype)
    if world.rank in ranks:
        table[ranks.index(world.rank)] = row
    return world.maximum(table, tuple(range(world.size)), label)


class ErrorOnRank(NamedTuple):
    """The text of an error, and the rank that has it."""

    rank: int
    text: str


def errors_on_any_rank(
    world: World, errors: Mapping[int, str], count: int, label: Label, alike: int = 0, longest: int = 512
) -> tuple[dict[int, ErrorOnRank], range]:
    """For each of ``count`` places, the highest rank that has an error there, with at most ``longest`` bytes of its
    text.

    The range holds the values that ranks gave as ``alike``, from the least to the greatest. One small exchange, and one
    more for each place that has an error.
    """
    failed = torch.zeros(count + 1, dtype=torch.int64)
    for place in errors:
        failed[place] = world.rank + 1
    failed[count] = alike
    least, most = extremes(world, failed, label)
    raised = {}
    for place in torch.nonzero(most[:count]).flatten().tolist():
        rank = int(most[place]) - 1
        text = broadcast_text(world, rank, errors.get(place, ""), label, longest) if world.size > 1 else errors[place]
        raised[place] = ErrorOnRank(rank, text)
    return raised, range(int(least[count]), int(most[count]) + 1)


def agree(
    world: World, work: Callable[[], T], label: Label, raises: Callable[[str], HaloclineError] = RankFailure
) -> T:
    """Run ``work`` on every rank and return this rank's result. If it fails on one rank, all raise.

    The failing rank raises its own error, the others an error of class ``raises`` that names that rank and its text.
    """
    values, own = list[T](), None
    try:
        values.append(work())
    except Exception as error:  # noqa: BLE001 - raised below, when all ranks know
        own = error
    errors = {} if own is None else {0: str(own) if isinstance(own, HaloclineError) else f"{type(own).__name__}: {own}"}
    raised, _ = errors_on_any_rank(world, errors, 1, label)
    if own is not None:
        raise own
    for rank, text in raised.values():
        raise raises(f"rank {world.rank}, {label}: rank {rank} failed: {text}")
    return values[0]
