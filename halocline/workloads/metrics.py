"""Metrics of a network's answers: sums over batches in float64, global whatever the cut."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..rules import gather
from .workload import Batch


class Confusion:
    """Counts of (true class, predicted class): intersection over union, dice, accuracy.

    Classes are along dim 1 of the output; ``batch["y"]`` holds their numbers. Any other number there, such as a loss's
    ``ignore_index``, is left out.
    """

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self.counts = torch.zeros(classes, classes, dtype=torch.float64)

    @torch.no_grad()
    def update(self, output: Tensor, batch: Batch) -> None:
        """Add a batch; every rank calls it, and gets the counts of all ranks."""
        truth, guess = batch["y"].long(), output.argmax(1)
        pairs = torch.where((truth >= 0) & (truth < self._classes), truth * self._classes + guess, -1)
        number = self._classes**2
        sums = torch.histc(pairs.double(), number, -0.5, number - 0.5)  # one sum over ranks; -1 is out of range
        self.counts += sums.cpu().reshape(self._classes, self._classes)

    def by_class(self) -> dict[str, Tensor]:
        """dice, iou and accuracy (the share of a class's elements that were found); NaN for a class that is absent."""
        right = self.counts.diagonal()
        true, guessed = self.counts.sum(1), self.counts.sum(0)
        return {
            "dice": 2 * right / (true + guessed),
            "iou": right / (true + guessed - right),
            "accuracy": right / true,
        }

    @property
    def accuracy(self) -> float:
        """The share of all elements that are right."""
        total = self.counts.sum()
        return float(self.counts.diagonal().sum() / total) if total else 0.0

    def result(self) -> dict[str, float]:
        """Means over the classes that occur."""
        by_class = self.by_class()
        return {
            "mean_iou": float(by_class["iou"].nanmean()),
            "mean_dice": float(by_class["dice"].nanmean()),
            "accuracy": self.accuracy,
        }


class Regression:
    """Mean squared and absolute error of numbers, and the share of the truth's variance that is explained."""

    def __init__(self) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64)

    @torch.no_grad()
    def update(self, output: Tensor, batch: Batch) -> None:
        """Add a batch; every rank calls it."""
        truth = batch["y"].double()
        error = output.double() - truth
        count = torch.tensor(float(truth.numel()))
        sums = (count, error.square().sum(), error.abs().sum(), truth.sum(), truth.square().sum())
        self._sums += torch.stack([part.detach().double().cpu().reshape(()) for part in sums])

    def result(self) -> dict[str, float]:
        """Errors, and one minus the squared error over the variance of the truth."""
        count, squares, absolute, total, total_squares = self._sums.tolist()
        count = count or 1.0
        # In float64: targets are of order one, so that the difference keeps its digits.
        variance = total_squares / count - (total / count) ** 2
        mse = squares / count
        return {"mse": mse, "mae": absolute / count, "explained": 1 - mse / variance if variance > 0 else 0.0}


class RocCurve:
    """True against false alarms over all thresholds, from the score and the class (0 or 1) of every sample."""

    def __init__(self) -> None:
        self._scores: list[Tensor] = []
        self._truth: list[Tensor] = []

    @torch.no_grad()
    def add(self, scores: Tensor, truth: Tensor) -> None:
        """Add a batch; every rank calls it, and gets the scores of all ranks."""
        self._scores.append(_whole(scores.double()).cpu())
        self._truth.append(_whole((truth > 0.5).double()).cpu())

    def curve(self) -> tuple[Tensor, Tensor]:
        """Shares of false and of true alarms, from the highest threshold to the lowest, equal scores as one point."""
        scores, truth = torch.cat(self._scores), torch.cat(self._truth)
        order = scores.argsort(descending=True, stable=True)
        scores, truth = scores[order], truth[order]
        # The last sample of each run of equal scores.
        ends = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])
        true, false = truth.cumsum(0)[ends], (1 - truth).cumsum(0)[ends]
        start = torch.zeros(1, dtype=torch.float64)
        return torch.cat([start, false / max(1.0, float(false[-1]))]), torch.cat(
            [start, true / max(1.0, float(true[-1]))]
        )

    def result(self) -> dict[str, float]:
        """The area under the curve, and the share of true alarms at 5 % and 20 % false ones.

        NaN where samples are all of one class, which has no curve, or a score is NaN.
        """
        if not self._scores:
            return {}
        truth, scores = torch.cat(self._truth), torch.cat(self._scores)
        if bool(scores.isnan().any()) or not 0 < int(truth.sum()) < len(truth):
            return dict.fromkeys(("auc", "true_at_5%_false", "true_at_20%_false"), math.nan)
        false, true = self.curve()
        area = float(torch.trapezoid(true, false))
        at = {f"true_at_{share}%_false": float(true[false <= share / 100].max()) for share in (5, 20)}
        return {"auc": area, **at}


def _whole(tensor: Tensor) -> Tensor:
    """All samples on every rank."""
    return gather(tensor).reshape(-1)


class Accuracy:
    """The share of samples whose class is right; ``batch["y"]`` holds one number a sample."""

    def __init__(self) -> None:
        self._right, self._all = 0.0, 0

    @torch.no_grad()
    def update(self, output: Tensor, batch: Batch) -> None:
        """Add a batch; every rank calls it."""
        self._right += float((output.argmax(1) == batch["y"]).sum())
        self._all += batch["y"].numel()

    def result(self) -> dict[str, float]:
        """The share that is right."""
        return {"accuracy": self._right / max(1, self._all)}
