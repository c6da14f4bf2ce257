"""``bench quality``: do the segmentation workloads learn, at their small defaults?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from halocline.train.config import make_settings
from halocline.train.task import defaults_of, make_task
from halocline.train.trainer import Trainer
from halocline.workloads.metrics import Confusion

SEGMENTATION = ("unet3d", "tiramisu", "deeplab")
BETTER = 0.1  # than calling everything background, in mean intersection over union


def measure_quality(names: tuple[str, ...], folder: Path | None, say: Callable[[str], None]) -> dict[str, Any]:
    """Each trained on one rank, and judged on samples that it never saw."""
    with tempfile.TemporaryDirectory(prefix="halocline-quality-", dir=folder) as place:
        workloads = {name: _trained(name, Path(place) / name, say) for name in names}
    return {"learned": all(each["gain"] >= BETTER for each in workloads.values()), "workloads": workloads}


def _trained(name: str, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    say(f"training {name}")
    began = time.monotonic()
    settings = make_settings({}, (), defaults_of(name))
    floor = background(name)
    metrics = Trainer(settings, folder).train().metrics
    say(f"{name}: mean IoU {metrics['mean_iou']:.3f}, all background {floor:.3f}")
    return {
        "mean_iou": metrics["mean_iou"],
        "all_background": floor,
        "gain": metrics["mean_iou"] - floor,
        "steps": settings.steps,
        "seconds": time.monotonic() - began,
    }


def background(name: str) -> float:
    """The mean intersection over union of calling everything background."""
    held_out = make_task(make_settings({}, (), defaults_of(name)), torch.float32).validation
    assert held_out is not None
    store, meter = held_out["y"].store, Confusion(3)
    for sample in range(len(store)):
        truth = torch.from_numpy(store.read_new(sample)).long().unsqueeze(0)
        answer = torch.zeros(1, 3, *truth.shape[1:])
        answer[:, 0] = 1
        meter.update(answer, {"y": truth})
    return meter.result()["mean_iou"]
