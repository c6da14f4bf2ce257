"""``bench curves``: does every workload, cut over ranks, follow its run on one rank?

The commands that a user would type are run, and their losses compared: in float64 step by step; in float32, whose
rounding grows from step to step whatever the cut, against what another number of threads does to a run on one rank.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halocline.errors import HaloclineError

CLOSE = 1e-8  # of the loss, in float64
TIMES = 3.0  # what another number of threads does, in float32
DEADLINE = 3600.0


@dataclass(frozen=True)
class CurvesPlan:
    workloads: tuple[str, ...]
    ranks: int = 2
    steps: int = 50
    single: bool = True  # float32 too


def measure_curves(plan: CurvesPlan, say: Callable[[str], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="halocline-curves-") as folder:
        workloads = {name: _compare(plan, name, Path(folder), say) for name in plan.workloads}
    return {
        "follows": all(
            each["float64"] <= CLOSE and each.get("float32_ratio", 0.0) <= TIMES for each in workloads.values()
        ),
        "ranks": plan.ranks,
        "steps": plan.steps,
        "targets": {"float64": CLOSE, "float32_ratio": TIMES},
        "workloads": workloads,
    }


def _compare(plan: CurvesPlan, name: str, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    def losses(ranks: int, precision: str, threads: int = 1) -> list[float]:
        say(f"{name}: {plan.steps} steps on {ranks} rank{'s'[: ranks > 1]}, {precision}, {threads} threads a rank")
        out = folder / f"{name}-{ranks}-{precision}-{threads}"
        return _trained(name, ranks, precision, threads, plan.steps, out)

    one, cut = losses(1, "fp64"), losses(plan.ranks, "fp64")
    differences: dict[str, Any] = {"float64": worst(one, cut), "first": one[0], "last": one[-1]}
    if plan.single:
        one, other, cut = losses(1, "fp32"), losses(1, "fp32", 2), losses(plan.ranks, "fp32")
        differences |= {"float32": worst(one, cut), "float32_threads": worst(one, other)}
        differences["float32_ratio"] = differences["float32"] / max(differences["float32_threads"], 1e-7)
    say(f"{name}: {', '.join(f'{key} {value:.2g}' for key, value in differences.items())}")
    return differences


def worst(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two curves, of the loss.

    >>> worst([1.0, 2.0], [1.0, 2.5])
    0.25
    """
    return max(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True))


def _trained(name: str, ranks: int, precision: str, threads: int, steps: int, out: Path) -> list[float]:
    command = [sys.executable, "-m", "halocline.cli", "train", name, "--ranks", str(ranks), "--json", "--out", str(out)]
    command += ["--set", f"precision={precision}", "--set", f"steps={steps}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        raise HaloclineError(f"`{' '.join(command[1:])}` failed: {done.stderr.strip().splitlines()[-1:]}")
    losses: list[float] = json.loads(done.stdout.strip().splitlines()[-1])["losses"]
    return losses
