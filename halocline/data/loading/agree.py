"""Bad samples: all ranks learn in the same step which there are, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from ...errors import BadSample, DataError
from ...world import Label, World

_LABEL = Label("bad samples", "hc.data", "control")
_ROOM = 2048  # bytes for the words of the rank that saw it


def agreed(world: World, errors: Mapping[int, BaseException], count: int) -> dict[int, BaseException]:
    """What any rank saw, by place in a batch of ``count``: one small exchange, and one more for each bad sample."""
    if world.size == 1:
        return dict(errors)
    seen = torch.zeros(count, dtype=torch.int64)
    for position in errors:
        seen[position] = world.rank + 1
    everyone = tuple(range(world.size))
    seen = world.maximum(seen, everyone, _LABEL)
    found: dict[int, BaseException] = {}
    for position in torch.nonzero(seen).flatten().tolist():
        teller = int(seen[position]) - 1
        ranks = (teller, *(rank for rank in everyone if rank != teller))
        told = world.broadcast(_words(errors.get(position)), ranks, _LABEL)
        found[position] = errors[position] if position in errors else _error(told, teller)
    return found


def _words(error: BaseException | None) -> torch.Tensor:
    """Where, sample, box and reason; of another error its text."""
    content: list[object] = []
    if isinstance(error, BadSample):
        content = [error.where[:600], error.sample, error.box[:300], error.reason[:600]]
    elif error is not None:
        content = [f"{type(error).__name__}: {error}"[:1500]]
    data = json.dumps(content).encode()[:_ROOM]
    return torch.tensor(list(data.ljust(_ROOM)), dtype=torch.uint8)


def _error(told: torch.Tensor, teller: int) -> BaseException:
    try:
        content = json.loads(bytes(told.tolist()))
    except ValueError:  # longer than the room there is, in letters that take several bytes
        content = ["its words did not fit"]
    if len(content) == 4:
        where, sample, box, why = content
        return BadSample(where, sample, box, f"{why} (seen by rank {teller})")
    return DataError(f"rank {teller} could not prepare its part of a batch: {content[0]}")
