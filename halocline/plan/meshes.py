"""Every mesh for a number of devices, and which of them are worth an estimate.

The axes that a mesh may have are those of ``factorizations``: data and the dims of the volume. Further axes, of the
model or of stages, join there, in :data:`halocline.arrangement.AXIS_OF_LETTER` and in :class:`.estimate.Estimator`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..arrangement import DATA
from ..errors import PlanError
from .recording import Subject

ESTIMATED = 100  # meshes that are estimated, about
PER_DATA_SIZE = 4  # spatial cuts, of the least surface, that are estimated at least for each size of the data axis


class NoPlan(PlanError):
    """No cut fits. The message names the limit, and the smallest change that would do."""


def factorizations(count: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Every way to write ``count`` as a product over ``axes``."""
    if len(axes) == 1:
        yield {axes[0]: count}
        return
    for first in (divisor for divisor in range(1, count + 1) if count % divisor == 0):
        for rest in factorizations(count // first, axes[1:]):
            yield {axes[0]: first, **rest}


def meshes(subject: Subject, devices: int, batch: int | None) -> list[dict[str, int]]:
    """Every mesh that the samples allow. ``batch`` samples a step; None: one on each rank of the data axis."""
    legal = [
        sizes
        for sizes in factorizations(devices, [DATA, *subject.volume])
        if all(sizes[axis] <= subject.volume[axis] for axis in subject.volume)
        and (batch is None or batch % sizes[DATA] == 0)
    ]
    if not legal:
        most = math.prod(subject.volume.values())
        reason = (
            f"a sample of {' x '.join(map(str, subject.volume.values()))} voxels can be cut over {most} devices at most"
        )
        divides = "" if batch is None else f", and the data axis must divide a batch of {batch}"
        raise NoPlan(f"no mesh for {devices} devices: {reason}{divides}; plan for fewer devices, or a larger batch")
    return legal


def least_surface(legal: Sequence[dict[str, int]], volume: Mapping[str, int]) -> list[dict[str, int]]:
    """For each size of the data axis the cuts with the least surface: their halos are the smallest there are."""
    by_data: dict[int, list[dict[str, int]]] = {}
    for sizes in sorted(legal, key=lambda sizes: surface(sizes, volume)):
        by_data.setdefault(sizes[DATA], []).append(sizes)
    kept = max(PER_DATA_SIZE, ESTIMATED // len(by_data))
    return [sizes for group in by_data.values() for sizes in group[:kept]]


def surface(sizes: Mapping[str, int], volume: Mapping[str, int]) -> float:
    """Elements of one rank's tile that lie on a cut, per element of the tile."""
    return sum(2 * sizes[axis] / volume[axis] for axis in volume if sizes[axis] > 1)
