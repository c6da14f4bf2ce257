"""What each lever of the founding systems is worth, and what would have to improve for a given efficiency."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .levers import Levers
from .scenario import Scenario, ScenarioError, changed_machine
from .step import Recordings, Simulation, simulate

#: From the system that the founding papers replaced to theirs, one lever after another.
WATERFALL: tuple[tuple[str, dict[str, Any]], ...] = (
    ("coordinator, one ring, no groups", {"control": "coordinator", "grouping": False, "rings": "flat"}),
    ("hierarchical rings", {"rings": "hybrid"}),
    ("tree control", {"control": "tree"}),
    ("bit vectors", {"control": "bits"}),
    ("grouping", {"grouping": True}),
    ("16-bit wire", {"wire": "fp16"}),
    ("no agreement", {"control": "planned"}),
    ("lag", {"lag": True}),
)
LIMIT = 1000.0  # factor beyond which an improvement counts as out of reach
ROUNDS = 24  # halvings of the search for a factor


@dataclass(frozen=True)
class Stage:
    """A lever that was added, and the run with it and all before."""

    name: str
    found: Simulation


def waterfall(scenario: Scenario, seed: int = 0, say: Callable[[str], None] = lambda text: None) -> list[Stage]:
    """The run with one lever more at each stage."""
    recordings, stages, levers = Recordings(), [], Levers(cycle_ms=scenario.levers.cycle_ms)
    for name, change in WATERFALL:
        say(name)
        levers = levers.with_(**change)
        stages.append(Stage(name, simulate(replace(scenario, levers=levers), seed=seed, recordings=recordings)))
    return stages


@dataclass(frozen=True)
class Improvement:
    """A change, and by which factor it reaches the efficiency; None: by no factor."""

    what: str
    factor: float | None
    best: float  # efficiency at the limit


def to_reach(scenario: Scenario, efficiency: float, base: int | None = None, seed: int = 0) -> list[Improvement]:
    """What would have to improve, each by itself. The recorded step stays; only its replay changes."""
    if not 0 < efficiency < 1:
        raise ScenarioError(f"--reach {efficiency:g}: an efficiency lies between 0 and 1")
    recordings = Recordings()

    def at(**changes: Any) -> float:
        machine = changed_machine(scenario.machine, **changes)
        return simulate(replace(scenario, machine=machine), base, seed, recordings=recordings).efficiency

    tried: tuple[tuple[str, Callable[[float], float]], ...] = (
        ("bandwidth of all links, times", lambda factor: at(bandwidth=factor)),
        ("latency of all links, divided by", lambda factor: at(latency=1 / factor)),
        ("delays of ranks and spread of devices, divided by", lambda factor: at(spread=1 / factor)),
        ("samples on each device, times", lambda factor: _with_local(scenario, factor, base, seed, recordings)),
    )
    return [_searched(what, measure, efficiency) for what, measure in tried]


def _with_local(scenario: Scenario, factor: float, base: int | None, seed: int, recordings: Recordings) -> float:
    """Efficiency with more samples on each device, at most 32 times as many."""
    local = max(1, round(scenario.local * min(factor, 32.0)))
    return simulate(replace(scenario, local=local), base, seed, recordings=recordings).efficiency


def _searched(what: str, measure: Callable[[float], float], wanted: float) -> Improvement:
    """The least factor, in steps of a few per cent; efficiency grows with it."""
    best = measure(LIMIT)
    if best < wanted:
        return Improvement(what, None, best)
    low, high = 1.0, LIMIT
    for _ in range(ROUNDS):
        if high / low < 1.05:
            break
        middle = (low * high) ** 0.5
        low, high = (low, middle) if measure(middle) >= wanted else (middle, high)
    return Improvement(what, high, best)
