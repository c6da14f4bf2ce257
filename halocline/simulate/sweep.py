"""A run at many sizes: weak scaling keeps the samples of a rank, strong scaling those of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ..plan.machine import Machine
from .scenario import Scenario, ScenarioError
from .step import Recordings, Simulation, simulate

Say = Callable[[str], None]


def usual_sizes(machine: Machine, most: int, replica: int) -> list[int]:
    """One replica, then from a node four times as many each, up to ``most``."""
    sizes, size = [replica], max(replica, machine.devices_per_node)
    while 1.5 * size < most:
        sizes.append(size - size % replica)
        size *= 4
    return sorted({*sizes, most})


def weak(
    scenario: Scenario, sizes: Sequence[int], base: int | None = None, seed: int = 0, say: Say = lambda text: None
) -> list[Simulation]:
    """As many samples on each rank at every size; efficiency by ``base`` devices, or the smallest size."""
    recordings, found = Recordings(), []
    base = min(sizes) if base is None else base
    for size in sizes:
        say(f"{size:,} devices")
        found.append(simulate(scenario.on(size), base, seed, recordings=recordings))
    return found


def strong(scenario: Scenario, sizes: Sequence[int], seed: int = 0, say: Say = lambda text: None) -> list[Simulation]:
    """The scenario's samples of a step at every size; sizes that do not divide them are left out."""
    batch, replica = scenario.samples, scenario.replica
    fitting = [size for size in sizes if size % replica == 0 and batch % (size // replica) == 0]
    if not fitting:
        raise ScenarioError(
            f"no size of {', '.join(map(str, sizes))} divides a batch of {batch:,}; give --sizes that do"
        )
    recordings, found = Recordings(), []
    first: Simulation | None = None
    for size in sorted(fitting):
        say(f"{size:,} devices")
        each = simulate(
            replace(scenario, devices=size, local=batch // (size // replica)), size, seed, recordings=recordings
        )
        first = first or each
        found.append(replace(each, base=None if each is first else first))
    return found
