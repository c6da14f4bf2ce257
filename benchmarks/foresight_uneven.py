"""Part of ``bench foresight``: two ranks of which one is half as fast, with equal shares and with planned ones.

The second rank's core also runs a program that never rests, so that the rank has half of it. Work that equal ranks do
in E seconds takes them 4/3 E at best, and 2 E where each has half of the sample.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from halocline.plan.cost import Prices
from halocline.plan.machine import Machine
from halocline.plan.search import search
from halocline.testing.pool import RankPool

from . import foresight_ranks as on_ranks
from .foresight_cases import Case, subject_of
from .topology import ClusterError

SPEEDS = (2.0, 1.0)
MESH = {"data": 1, "depth": 2, "height": 1, "width": 1}
CASE = Case("unet3d", {"width": 8, "channels_in": 1}, (1, 1, 48, 48, 48), MESH)
DEADLINE = 300.0
STEPS = 3


def measure_uneven(machine: Machine, repeat: int) -> dict[str, Any]:
    """``equal_over_ideal``, ``planned_over_ideal``, and where the plan cuts."""
    if (os.cpu_count() or 1) < 2:
        raise ClusterError("unequal ranks are emulated on two cores, and this machine has one")
    planned = replace(CASE, **planned_cut(machine))
    even = replace(planned, points={})
    with RankPool(2) as pool:
        pool.run(pin_to_core, per_rank=[(0,), (1,)], deadline=DEADLINE)
        times: dict[str, list[float]] = {"alike": [], "equal": [], "planned": []}
        names = {"alike": even.name, "equal": even.name, "planned": f"planned {planned.name}"}
        pool.run(on_ranks.prepare, even, deadline=DEADLINE)
        pool.run(on_ranks.prepare, planned, names["planned"], deadline=DEADLINE)
        for _ in range(repeat):
            times["alike"].append(_step(pool, names["alike"]))
            with busy_core(1):
                for way in ("equal", "planned"):
                    times[way].append(_step(pool, names[way]))
    ideal = median(times["alike"]) * 2 / (1 + SPEEDS[1] / SPEEDS[0])
    return {
        "cut": {axis: list(points) for axis, points in planned.points.items()},
        "ideal_s": ideal,
        **{f"{way}_over_ideal": median(times[way]) / ideal for way in ("equal", "planned")},
    }


def planned_cut(machine: Machine) -> dict[str, Any]:
    """Mesh and cut points that the planner takes for these speeds, among cuts of the sample."""
    candidates = search(subject_of(CASE), machine, 2, 1, Prices(machine.device), speeds=SPEEDS)
    best = next(each for each in candidates if each.arrangement.points)
    return {"sizes": dict(best.sizes), "points": dict(best.arrangement.points)}


def _step(pool: RankPool, name: str) -> float:
    return max(pool.run(on_ranks.timed_steps, name, STEPS, deadline=DEADLINE))


def pin_to_core(core: int) -> None:
    """All threads of this rank run there."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


@contextmanager
def busy_core(core: int) -> Iterator[None]:
    """Inside, a program that never rests runs on that core."""
    spin = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    program = subprocess.Popen([sys.executable, "-c", spin])
    try:
        yield
    finally:
        program.kill()
        program.wait()
