"""Batches that do not fit in memory, computed in parts: the gradient is that of the whole batch.

A part's loss counts by its share of the samples. That is exact where the loss is a mean over samples and no layer mixes
samples. Batch norms are refused at once; other losses and layers by :class:`PartsCheck`, which computes outputs and
losses of some steps both ways.
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
from ..tree import map_tensors, tensors_in
from ..world import Label, World
from ..world.agreement import extremes
from .forecast import check_room
from .guard import TrainingError
from .precision import Precision
from .settings import Settings
from .step import Loss, evaluating
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


class PartsCheck:
    """Is the batch's loss the mean of its parts' losses, and no sample's output changed by others?

    Looked at in the steps 1, 2, 4, 8, ..., since a loss may differ with some targets only, such as those to ignore. It
    takes a forward in eval mode of each part and of two parts at once, without gradients, and the outputs of a batch.
    """

    def __init__(self, model: nn.Module, settings: Settings, size: int, precision: Precision) -> None:
        """``size``: samples of a part. Raises ConfigError for a batch norm."""
        check_divisible(model, settings, size)
        self._model, self._batch, self._precision = model, settings.batch, precision
        self._seen = 0
        narrow = precision.name not in ("fp32", "fp64")
        self._loss_off = 1e-3 if narrow else 1e-9 if precision.name == "fp64" else 1e-5
        self._output_off = 1e-1 if narrow else 1e-7 if precision.name == "fp64" else 1e-3

    def __call__(self, batches: list[Batch], loss_of: Loss) -> None:
        """Before a step, with its parts. By all ranks together; raises ConfigError on all."""
        model = self._model
        self._seen += 1
        parts = self._of_one_batch(batches)
        if self._seen & (self._seen - 1) or len(parts) < 2:
            return
        with torch.no_grad(), evaluating(model), self._precision.autocast():
            outputs = [model(part["x"]) for part in parts]
            sizes = [len(part["x"]) for part in parts]
            both = model(torch.cat([part["x"] for part in parts[:2]]))
            for mine, joint in zip(tensors_in(_joined(outputs[:2])), tensors_in(both), strict=True):
                if float((mine - joint).abs().max()) > self._output_off * max(1e-30, float(joint.abs().max())):
                    raise ConfigError(
                        "split: the network mixes the samples of a batch: its output for a sample is another in a "
                        "smaller batch, so that parts of one give another gradient; cut over more ranks, or take a "
                        "smaller batch"
                    )
            losses = [float(loss_of(out, part)) for out, part in zip(outputs, parts, strict=True)]
            mean = sum(loss * size for loss, size in zip(losses, sizes, strict=True)) / sum(sizes)
            whole = float(loss_of(_joined(outputs), {name: torch.cat([p[name] for p in parts]) for name in parts[0]}))
        apart = abs(mean - whole) > self._loss_off * max(abs(whole), abs(mean))
        if apart:  # a loss that is no number is the guard's business
            raise ConfigError(
                f"split: the loss of a batch is {whole:.6g}, and the mean of its parts' losses {mean:.6g}: it is no "
                "mean over samples (a sum, weights of classes, ignored targets, or a dice over the batch), so that "
                "parts give another gradient; take a loss that is, cut over more ranks, or take a smaller batch"
            )

    def _of_one_batch(self, batches: list[Batch]) -> list[Batch]:
        """The parts of the step's first batch, of several that accumulate."""
        parts, samples = [], 0
        for part in batches:
            if samples < self._batch:
                parts.append(part)
                samples += len(part.samples)
        return parts


def _joined(outputs: list[Any]) -> Any:
    """Outputs of parts as one of their batch."""
    joined = iter([torch.cat(each) for each in zip(*map(tensors_in, outputs), strict=True)])
    return map_tensors(lambda _: next(joined), outputs[0])


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
