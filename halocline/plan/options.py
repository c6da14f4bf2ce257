"""What may be worth recording: every mesh, evenly cut or aligned, with modules that gather or recompute, estimated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..arrangement import DATA, Arrangement
from .candidate import is_plain, reading_seconds
from .estimate import Estimate, Estimator
from .gathering import best_gathers
from .recompute import least_work
from .shares import uneven_points

ROOM = 1.1  # times the memory up to which an estimate may be too high
WITH_GATHERS = 16  # options, the best first, for which modules that gather are sought
WORTH_GATHERING = 0.005  # of a step that gathering must save by its estimate


@dataclass(frozen=True)
class Option:
    """An arrangement that may be worth recording."""

    arrangement: Arrangement
    samples: int
    estimate: Estimate

    @property
    def seconds_per_sample(self) -> float:
        return self.estimate.seconds / self.samples

    @property
    def local(self) -> int:
        """Samples on each rank of the data axis."""
        return self.samples // self.arrangement.sizes[DATA]


def options(
    estimator: Estimator,
    wanted: Sequence[Mapping[str, int]],
    batch: int | None,
    speeds: Sequence[float],
    input_bytes: int | None = None,
) -> list[Option]:
    """The best estimate first."""
    found: list[Option] = []
    for sizes in wanted:
        local = 1 if batch is None else batch // sizes[DATA]
        even = Option(Arrangement(sizes), local * sizes[DATA], estimator(sizes, local))
        uneven = with_shares(estimator, even, speeds) if speeds else []
        found += uneven or [even, *with_aligned_cuts(estimator, even)]
    found += with_recomputation(estimator, found)
    found.sort(key=lambda option: option.seconds_per_sample)
    found += with_gathers(estimator, [each for each in found if not is_plain(each.arrangement)][:WITH_GATHERS])
    read = [_reading(estimator, option, input_bytes) for option in found]
    return sorted(read, key=lambda option: (option.seconds_per_sample, _strided(option.arrangement)))


def _strided(arrangement: Arrangement) -> tuple[int, ...]:
    """Cuts of the last dims come first among equals: their slabs need fewer copies."""
    return tuple(arrangement.sizes.values())


def _reading(estimator: Estimator, option: Option, input_bytes: int | None) -> Option:
    """Where reading takes longer than the step, its time counts."""
    read = reading_seconds(estimator.subject, estimator.machine, option.arrangement, option.local, input_bytes)
    return replace(option, estimate=replace(option.estimate, seconds=max(option.estimate.seconds, read)))


def with_aligned_cuts(estimator: Estimator, even: Option) -> list[Option]:
    """The same cut at multiples of the network's total stride, or of the largest part of it that leaves no rank empty.

    None where even cuts lie there anyway.
    """
    sizes, multiple = even.arrangement.sizes, aligned_multiple(estimator, even.arrangement)
    volume = {axis: size for axis, size in estimator.subject.volume.items() if sizes[axis] > 1}
    if all(size % (sizes[axis] * multiple) == 0 for axis, size in volume.items()):
        return []
    aligned = replace(even.arrangement, multiple=multiple)
    return [Option(aligned, even.samples, estimator(sizes, even.local, multiple=multiple))]


def with_shares(estimator: Estimator, even: Option, speeds: Sequence[float]) -> list[Option]:
    """The same cut with shares by speed: at multiples of the network's total stride, and anywhere; none where equal.

    Aligned shares fit the speeds less well, and spare the later layers the moving of slabs; recording decides.
    """
    found: list[Option] = []
    for multiple in {aligned_multiple(estimator, even.arrangement): None, 1: None}:
        sizes, volume = even.arrangement.sizes, estimator.subject.volume
        points = uneven_points(sizes, volume, speeds, partial(estimator.compute, sizes), multiple)
        arrangement = replace(even.arrangement, points=points)
        if points and all(arrangement != each.arrangement for each in found):
            found.append(replace(even, arrangement=arrangement))
    return found


def aligned_multiple(estimator: Estimator, arrangement: Arrangement) -> int:
    """The network's total stride, or the largest part of it at whose multiples no rank is left empty."""
    sizes = arrangement.sizes
    volume = {axis: size for axis, size in estimator.subject.volume.items() if sizes[axis] > 1}
    possible = [
        divisor
        for divisor in range(2, estimator.stride + 1)
        if estimator.stride % divisor == 0 and all(size // divisor >= sizes[axis] for axis, size in volume.items())
    ]
    return max(possible, default=1)


def with_recomputation(estimator: Estimator, found: Sequence[Option]) -> list[Option]:
    """Those that do not fit, with the modules whose recomputation makes them fit in the least time, if any do."""
    room = int(estimator.machine.device.memory_gb.value * 1e9)
    tight = [option for option in found if option.estimate.memory > room / ROOM]
    fitting: list[Option] = []
    for option in tight:
        tile = math.prod(size for axis, size in option.arrangement.sizes.items() if axis != DATA)
        again = least_work(estimator.blocks(tile, option.local), int(option.estimate.memory * ROOM) - room)
        if again is not None:
            estimate = Estimate(option.estimate.seconds + again.seconds, option.estimate.memory - again.freed)
            fitting.append(Option(replace(option.arrangement, recompute=again.paths), option.samples, estimate))
    return fitting


def with_gathers(estimator: Estimator, found: Sequence[Option]) -> list[Option]:
    """Those in which late layers have so little work that each rank does all of it, sooner than it exchanges halos."""
    better: list[Option] = []
    for option in found if estimator.can_gather else ():
        gathered = best_gathers(estimator.chain(option.arrangement.sizes, option.local))
        if gathered.seconds > WORTH_GATHERING * option.estimate.seconds:
            estimate = Estimate(option.estimate.seconds - gathered.seconds, option.estimate.memory + gathered.memory)
            better.append(Option(replace(option.arrangement, gather=gathered.paths), option.samples, estimate))
    return better
