"""Bad samples: all ranks learn in the same step which there are, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from ...errors import BadSample, DataError
from ...world import Label, World

_LABEL = Label("bad samples", "hc.data", "control")
_ROOM = 12288  # bytes for the words of the rank that saw it: 1500 letters, of which some take six


def agreed(world: World, errors: Mapping[int, BaseException], count: int, tick: int = 0) -> dict[int, BaseException]:
    """What any rank saw, by place in a batch of ``count``: one small exchange, and one more for each bad sample.

    All must be at the same step: one that left an epoch earlier than the others would go on with other samples.
    """
    if world.size == 1:
        return dict(errors)
    seen = torch.zeros(count + 2, dtype=torch.int64)
    for position in errors:
        seen[position] = world.rank + 1
    seen[count], seen[count + 1] = tick, -tick
    everyone = tuple(range(world.size))
    seen = world.maximum(seen, everyone, _LABEL)
    last, first = int(seen[count]), -int(seen[count + 1])
    if first != last:
        raise DataError(
            f"the ranks prepare different batches: rank {world.rank} the one at step {tick} of the run, others those "
            f"from {first} to {last}; all ranks must leave an epoch, and load a state, at the same step"
        )
    seen = seen[:count]
    found: dict[int, BaseException] = {}
    for position in torch.nonzero(seen).flatten().tolist():
        teller = int(seen[position]) - 1
        ranks = (teller, *(rank for rank in everyone if rank != teller))
        told = world.broadcast(_words(errors.get(position)), ranks, _LABEL)
        found[position] = errors[position] if teller == world.rank else _error(told, teller)  # one word for all
    return found


def _words(error: BaseException | None) -> torch.Tensor:
    """Where, sample, box and reason; of another error its text."""
    content: list[object] = []
    if isinstance(error, BadSample):
        content = [str(error.where)[:600], int(error.sample), str(error.box)[:300], str(error.reason)[:600]]
    elif error is not None:
        content = [f"{type(error).__name__}: {error}"[:1500]]
    data = json.dumps(content).encode()
    return torch.tensor(list(data.ljust(_ROOM)), dtype=torch.uint8)


def _error(told: torch.Tensor, teller: int) -> BaseException:
    content = json.loads(bytes(told.tolist()))
    if len(content) == 4:
        where, sample, box, why = content
        return BadSample(where, sample, box, f"{why} (seen by rank {teller})")
    return DataError(f"rank {teller} failed: {content[0]}")
