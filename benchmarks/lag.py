"""``bench lag``: what gradients applied one step late do to the loss. Each workload is trained with and without."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from halocline.train.config import make_settings
from halocline.train.task import defaults_of
from halocline.train.trainer import Trainer

WORKLOADS = ("unet3d", "tiramisu", "stemdl")
LAST = 0.1  # of the steps, whose mean loss counts


def measure_lag(names: Sequence[str], steps: int | None, say: Callable[[str], None]) -> dict[str, Any]:
    """On one rank: what a step computes does not depend on their number."""
    with tempfile.TemporaryDirectory(prefix="halocline-lag-") as folder:
        return {"workloads": {name: _compared(name, steps, Path(folder), say) for name in names}}


def _compared(name: str, steps: int | None, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    curves: dict[str, Any] = {}
    for lag in (0, 1):
        say(f"training {name} with lag {lag}")
        wanted = [f"gradients.lag={lag}", *([f"steps={steps}"] if steps else [])]
        settings = make_settings({}, wanted, defaults_of(name))
        result = Trainer(settings, folder / f"{name}-{lag}").train()
        last = result.losses[-max(1, int(LAST * len(result.losses))) :]
        curves[f"lag {lag}"] = {"steps": result.steps, "training_loss": fmean(last), **result.metrics}
    without, late = curves["lag 0"], curves["lag 1"]
    curves["training_loss_ratio"] = late["training_loss"] / without["training_loss"]
    say(f"{name}: training loss {without['training_loss']:.4g}, one step late {late['training_loss']:.4g}")
    return curves
