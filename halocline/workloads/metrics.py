"""What is measured of a network's answers: sums that are global for every cut, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from .workload import Batch


class Confusion:
    """Counts of (true class, predicted class): intersection over union, dice, accuracy.

    Classes are along dim 1 of the output; ``batch["y"]`` holds their numbers, and ``ignore`` where nobody knows.
    """

    def __init__(self, classes: int, ignore: int = -100) -> None:
        self._classes, self._ignore = classes, ignore
        self.counts = torch.zeros(classes, classes, dtype=torch.float64)

    @torch.no_grad()
    def update(self, output: Tensor, batch: Batch) -> None:
        truth, guess = batch["y"], output.argmax(1)
        for row in range(self._classes):
            there = truth == row
            for column in range(self._classes):
                self.counts[row, column] += float((there & (guess == column)).sum())

    def result(self) -> dict[str, float]:
        right = self.counts.diagonal()
        true, guessed = self.counts.sum(1), self.counts.sum(0)
        present = (true + guessed) > 0
        union, total = true + guessed - right, true + guessed
        iou = right[present] / union[present]
        dice = 2 * right[present] / total[present]
        accuracy = float(right.sum() / self.counts.sum()) if self.counts.sum() else 0.0
        return {"mean_iou": float(iou.mean()), "mean_dice": float(dice.mean()), "accuracy": accuracy}


class Regression:
    """Mean squared and absolute error of numbers, and the share of the truth's variance that is explained."""

    def __init__(self) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64)

    @torch.no_grad()
    def update(self, output: Tensor, batch: Batch) -> None:
        truth = batch["y"].double()
        error = output.double() - truth
        count = torch.tensor(float(truth.numel()))
        found = (count, error.square().sum(), error.abs().sum(), truth.sum(), truth.square().sum())
        self._sums += torch.stack([part.detach().double().cpu().reshape(()) for part in found])

    def result(self) -> dict[str, float]:
        count, squares, absolute, total, total_squares = self._sums.tolist()
        count = count or 1.0
        variance = total_squares / count - (total / count) ** 2
        mse = squares / count
        return {"mse": mse, "mae": absolute / count, "explained": 1 - mse / variance if variance > 0 else 0.0}


class Accuracy:
    """The share of samples whose class is right; ``batch["y"]`` holds one number a sample."""

    def __init__(self) -> None:
        self._right, self._all = 0.0, 0

    @torch.no_grad()
    def update(self, output: Tensor, batch: Batch) -> None:
        self._right += float((output.argmax(1) == batch["y"]).sum())
        self._all += batch["y"].numel()

    def result(self) -> dict[str, float]:
        return {"accuracy": self._right / max(1, self._all)}
