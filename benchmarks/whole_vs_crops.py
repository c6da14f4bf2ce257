"""``bench whole-vs-crops``: does a network learn more from whole cubes than from the same cubes chopped into eight?

The claim of the strong-scaling paper (Oyama et al. 2020), on universes that anyone can make. Both networks see the same
voxels in as many steps; what differs is how far a sample reaches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from halocline.data import Field, Generated, Loader
from halocline.data.processes import in_processes
from halocline.distribute import distribute
from halocline.geometry import Box
from halocline.train.optimizers import make_optimizer, rate_at
from halocline.train.precision import Precision
from halocline.train.settings import OptimizerSettings, ScheduleSettings
from halocline.train.step import training_step
from halocline.workloads.cosmoflow import CosmoFlow
from halocline.workloads.universes import scatter, universes

PARTS = 2  # along each dim: an eighth


@dataclass(frozen=True)
class CropsTrial:
    """How both are trained, each cube seen once. ``batch`` is in cubes; of crops eight times as many.

    A batch of four cubes has deviations of its own: were batch norm to go by them to the end, they would be taken for
    something known. So for the second half it goes by the averages of the first.
    """

    size: int = 64
    width: int = 8
    validation: int = 64
    batch: int = 4
    steps: int = 600
    lr: float = 1e-3
    settled: float = 0.5  # the share of steps after which batch norm keeps to what it has learned
    seed: int = 0
    crops: bool = False


@dataclass(frozen=True)
class Chopped:
    """The eighths of cubes, as samples: number ``8 cube + part``."""

    cubes: Any  # makes a box of a cube
    size: int  # of an eighth

    def __call__(self, sample: int, box: Box) -> Any:
        cube, part = divmod(sample, PARTS**3)
        corner = [part // PARTS**2, part // PARTS % PARTS, part % PARTS]
        inside = (i.shift(self.size * place) for i, place in zip(box[1:], corner, strict=True))
        return self.cubes(cube, (box[0], *inside))


@dataclass(frozen=True)
class Repeated:
    """A cube's parameters for each of its eighths."""

    targets: Any

    def __call__(self, sample: int, box: Box) -> Any:
        return self.targets(sample // PARTS**3, box)


def fields_of(trial: CropsTrial, samples: int, seed: int) -> dict[str, Field]:
    whole = universes(samples, seed, trial.size)
    if not trial.crops:
        return whole
    x, y = (whole[name].store for name in ("x", "y"))
    assert isinstance(x, Generated)
    assert isinstance(y, Generated)
    size, count = trial.size // PARTS, samples * PARTS**3
    chopped = Generated(Chopped(x.make, size), count, (x.shape[0], size, size, size), "CDHW")
    return {"x": Field(chopped), "y": Field(Generated(Repeated(y.make), count, y.shape, "C"))}


def measure(trial: CropsTrial) -> dict[str, Any]:
    """Both trainings, side by side on two cores."""
    results = dict(in_processes(run, [trial, replace(trial, crops=True)], jobs=2))
    whole, single, averaged = results[False]["mse"], results[True]["mse"], results[True]["averaged_mse"]
    return {
        "whole_mse": whole,
        "crop_mse": single,
        "averaged_crops_mse": averaged,
        "ratio": single / whole,
        "averaged_ratio": averaged / whole,
        "knowing_nothing_mse": results[False]["variance"],
        "scatter_of_whole": scatter(trial.size),
        "whole_curve": results[False]["curve"],
        "crop_curve": results[True]["curve"],
        "seconds": max(each["seconds"] for each in results.values()),
        "trial": asdict(trial),
    }


def run(trial: CropsTrial) -> tuple[bool, dict[str, Any]]:
    """Train, and compare with the truth of cubes that were never seen."""
    torch.set_num_threads(1)
    began = time.monotonic()
    torch.manual_seed(trial.seed)
    size = trial.size // PARTS if trial.crops else trial.size
    model = distribute(CosmoFlow(width=trial.width, size=size, batch_norm=True))
    curve = list(_train(trial, model))
    answers, truth = _answers(trial, model)
    cubes = truth.reshape(trial.validation, -1, truth.shape[1])
    averaged = answers.reshape(cubes.shape).mean(1)
    result = {
        "mse": float(F.mse_loss(answers, truth)),
        "averaged_mse": float(F.mse_loss(averaged, cubes[:, 0])),
        "variance": float(truth.var(0, correction=0).mean()),
        "curve": [float(np.mean(part)) for part in np.array_split(curve, 20)],
        "seconds": time.monotonic() - began,
    }
    return trial.crops, result


def _train(trial: CropsTrial, model: Any) -> Iterator[float]:
    batch = trial.batch * (PARTS**3 if trial.crops else 1)
    optimizer = make_optimizer(model, OptimizerSettings(lr=trial.lr))
    precision, schedule = Precision("fp32", torch.device("cpu")), ScheduleSettings("cosine", warmup=20)
    fields = fields_of(trial, trial.batch * trial.steps, trial.seed)
    with Loader(fields, batch=batch, seed=trial.seed, shuffle=False, epochs=1) as loader:
        for step, group in enumerate(loader):
            if step % max(1, trial.steps // 10) == 0:
                sys.stderr.write(f"{'crops' if trial.crops else 'whole cubes'}: step {step} of {trial.steps}\n")
            if step == int(trial.settled * trial.steps):
                _settle(model)
            for each in optimizer.param_groups:
                each["lr"] = trial.lr * rate_at(step, trial.steps, schedule)
            yield float(training_step(model, [group], _loss, optimizer, precision))


def _settle(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm3d):
            module.eval()


def _loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return F.mse_loss(output, batch["y"])


@torch.no_grad()
def _answers(trial: CropsTrial, model: Any) -> tuple[Tensor, Tensor]:
    model.eval()
    answers, truth = [], []
    with Loader(fields_of(trial, trial.validation, trial.seed + 1), batch=8, shuffle=False, epochs=1) as loader:
        for batch in loader:
            answers.append(model(batch["x"]))
            truth.append(batch["y"].clone())
    return torch.cat(answers), torch.cat(truth)
