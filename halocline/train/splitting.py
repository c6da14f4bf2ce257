"""Batches that do not fit in memory, computed in parts: the gradient is that of the whole batch.

A part's loss counts by its share of the samples. That is exact where the loss is a mean over samples and no layer mixes
samples, which batch norm does: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .._torch_private import BatchNormBase
from ..data.loading.pipeline import Batch
from ..errors import ConfigError
from ..world import Label, World
from ..world.agreement import extremes
from .forecast import check_room
from .guard import TrainingError
from .precision import Precision
from .settings import Settings
from .task import MeshLayout, TrainingTask

_LABEL = Label("parts of a batch", "the training loop", "control")


def part_size(settings: Settings, task: TrainingTask, layout: MeshLayout, world: World, precision: Precision) -> int:
    """Samples that are computed at once: a batch, or the largest even part of it that fits. Raises TrainingError.

    By all ranks together where ``split`` is 0, since the memory of the fullest rank decides.
    """
    for parts in range(settings.split or 1, settings.batch + 1):
        size = -(-settings.batch // parts)
        try:
            check_room(replace(settings, batch=size), task, layout, world.rank, precision)
        except TrainingError:
            if settings.split or size == 1:
                raise
            continue
        break
    if settings.split:
        return size
    _, most = extremes(world, torch.tensor([parts]), _LABEL)
    return -(-settings.batch // int(most))


def check_divisible(model: nn.Module, settings: Settings, size: int) -> None:
    """Raise ConfigError if parts of a batch would not give its gradient."""
    mixing = [name for name, module in model.named_modules() if isinstance(module, BatchNormBase)]
    if size < settings.batch and mixing:
        raise ConfigError(
            f"split: {mixing[0]} is a batch norm, whose statistics are those of a whole batch: parts of one give "
            "another gradient; take group norms, cut over more ranks, or a smaller batch"
        )


def steps_of(loader: Any, batch: int, accumulate: int) -> Iterator[list[Batch]]:
    """The parts of each step without end: of ``accumulate`` batches of ``batch`` samples, the last of an epoch smaller.

    A batch never spans two epochs, so that parts hold the samples that it has unsplit.
    """
    group: list[Batch] = []
    batches = 0
    while True:
        samples = seen = 0
        for part in loader:
            group.append(part)
            samples, seen = samples + len(part.samples), seen + 1
            del part  # its memory goes back to the loader
            if samples >= batch:
                samples, batches = 0, batches + 1
            if batches == accumulate:
                yield group
                group, batches = [], 0
        if not seen:
            raise TrainingError("no sample of an epoch could be read; check the data")
        batches += bool(samples)
        if batches == accumulate:
            yield group
            group, batches = [], 0
