"""Bad samples: all ranks learn in the same step which samples are bad, and why.

A rank that raised alone would leave the others waiting; a rank that skipped a sample alone would train on another
batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from ...errors import BadSample, DataError
from ...world import Label, World
from ...world.agreement import errors_on_any_rank

_LABEL = Label("bad samples", "hc.data", "control")
_LONGEST = 12288  # bytes of a text: 1500 letters, of which some take six


def agreed(world: World, errors: Mapping[int, BaseException], count: int, tick: int = 0) -> dict[int, BaseException]:
    """Errors of any rank, by position in a batch of ``count``. All ranks must be at the same step.

    A rank that left an epoch earlier than the others would go on with other samples.
    """
    texts = {position: _text(error) for position, error in errors.items()}
    raised, ticks = errors_on_any_rank(world, texts, count, _LABEL, tick, _LONGEST)
    if len(ticks) > 1:
        raise DataError(
            f"the ranks prepare different batches: rank {world.rank} the one at step {tick} of the run, others those "
            f"from {ticks[0]} to {ticks[-1]}; all ranks must leave an epoch, and load a state, at the same step"
        )
    return {
        position: errors[position] if rank == world.rank else _error(text, rank)
        for position, (rank, text) in raised.items()
    }


def _text(error: BaseException) -> str:
    """Where, sample, box and reason; of another error its text."""
    content: list[object] = [f"{type(error).__name__}: {error}"[:1500]]
    if isinstance(error, BadSample):
        content = [str(error.where)[:600], int(error.sample), str(error.box)[:300], str(error.reason)[:600]]
    return json.dumps(content)


def _error(text: str, teller: int) -> BaseException:
    """The error again, on a rank that did not raise it, with the rank that did."""
    content = json.loads(text)
    if len(content) == 4:
        where, sample, box, why = content
        return BadSample(where, sample, box, f"{why} (seen by rank {teller})")
    return DataError(f"rank {teller} failed: {content[0]}")
