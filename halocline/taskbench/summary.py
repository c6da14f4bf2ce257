"""A result as one JSON object: METG by pattern and runtime, and how it compares with bare messages."""

from __future__ import annotations

from typing import Any

from .kernels import WORK
from .measure import TaskBenchResult, TaskBenchSettings
from .metg import Curve

#: The bare runtimes that each of ours is compared with: those of its transport, else torch's, which ours replaces.
BARE = {"mpi": ("mpi",), "gloo": ("torch", "torch-batch"), "": ("torch", "torch-batch")}
#: How many times the METG of the best bare runtime is allowed, by transport.
TARGETS = {"gloo": 1.3, "": 1.0}
MICRO = 1e6


def summary(settings: TaskBenchSettings, result: TaskBenchResult) -> dict[str, Any]:
    """Microseconds throughout. ``over_bare`` is METG over that of the best bare runtime; None where either has none."""
    runtimes: dict[str, dict[str, Any]] = {}
    for curve in result.curves:
        runtimes.setdefault(curve.pattern, {})[curve.runtime] = _entry(settings, result, curve)
    work, unit = WORK[settings.kernel]
    return {
        "runtimes": runtimes,
        "skipped": [dict(zip(("pattern", "runtime", "reason"), each, strict=True)) for each in result.skipped],
        "targets": {"over_bare": {"gloo": TARGETS["gloo"], "sockets": TARGETS[""]}},
        "best_rate_per_core": result.best * work,
        "unit": f"{unit}/s",
        "ranks": settings.ranks,
        "steps": settings.steps,
        "width": settings.width or settings.ranks,
        "radix": settings.radix,
        "output_bytes": settings.output_bytes,
        "kernel": settings.kernel,
        "graphs": settings.graphs,
        "rounds": settings.rounds,
    }


def _entry(settings: TaskBenchSettings, result: TaskBenchResult, curve: Curve) -> dict[str, Any]:
    """The figures of one curve, times in microseconds; over the best bare runtime that uses the same transport."""
    prefix, _, transport = curve.runtime.partition("-")
    bare = [result.metg(curve.pattern, name) for name in BARE[transport]] if prefix in ("world", "tensor") else []
    known = [each for each in bare if each is not None]
    rounds = [each for each in curve.rounds if each is not None]
    limit = curve.limit(curve.tasks / curve.cores)
    return {
        "metg_us": _micro(curve.metg),
        "low_us": _micro(min(rounds, default=None)),
        "high_us": _micro(max(rounds, default=None)),
        "overhead_us": _micro(curve.overhead),
        "over_bare": curve.metg / min(known) if curve.metg is not None and known else None,
        "limit_s": limit,
        "tasks_per_core": curve.tasks / curve.cores,
        "points": [
            {"iterations": p.iterations, "granularity_us": p.granularity * MICRO, "efficiency": p.efficiency}
            for p in curve.points
        ],
    }


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * MICRO
