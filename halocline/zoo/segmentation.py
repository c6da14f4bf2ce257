"""Losses of segmentation, written with torch functions as the libraries of that field write them.

Predictions are logits [N, C, ...], targets are class numbers [N, ...]; voxels of ``ignore_index`` do not count. They
are here to be checked, not to be used: each stands for a way to write such a loss.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = 255


class OverlapLoss(nn.Module):
    """Dice, Jaccard and Tversky loss by classes.

    The target is one-hot, sums run over batch and space, and ignored voxels are masked. A class that does not occur
    does not count.
    """

    def __init__(self, kind: str, ignore_index: int | None = None, alpha: float = 0.3, beta: float = 0.7) -> None:
        super().__init__()
        self.kind, self.ignore_index, self.alpha, self.beta = kind, ignore_index, alpha, beta

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """One minus the mean score of the classes."""
        batch, classes = prediction.shape[:2]
        probability = F.log_softmax(prediction, 1).exp().view(batch, classes, -1)
        target = target.view(batch, -1)
        if self.ignore_index is not None:
            mask = target != self.ignore_index
            probability = probability * mask.unsqueeze(1)
            # Ignored voxels become class 0, and are masked out again.
            one_hot = F.one_hot((target * mask).to(torch.long), classes).permute(0, 2, 1) * mask.unsqueeze(1)
        else:
            one_hot = F.one_hot(target, classes).permute(0, 2, 1)
        one_hot = one_hot.type_as(probability)
        score = self.score(probability, one_hot)
        # Over the whole batch: on a tile alone a class might be missing.
        present = (one_hot.sum((0, 2)) > 0).to(score.dtype)
        return ((1 - score) * present).mean()

    def score(self, probability: Tensor, one_hot: Tensor) -> Tensor:
        """The overlap of each class, between 0 and 1."""
        both = torch.sum(probability * one_hot, (0, 2))
        if self.kind == "tversky":
            more = torch.sum(probability * (1 - one_hot), (0, 2))
            less = torch.sum((1 - probability) * one_hot, (0, 2))
            return both / (both + self.alpha * more + self.beta * less).clamp_min(1e-7)
        either = torch.sum(probability + one_hot, (0, 2))
        if self.kind == "jaccard":
            return both / (either - both).clamp_min(1e-7)
        return 2 * both / either.clamp_min(1e-7)


class FocalLoss(nn.Module):
    """Focal loss class by class, of the voxels that count: a mask takes them out, so
    that the size depends on values.
    """

    def __init__(self, gamma: float = 2.0, alpha: float = 0.25, ignore_index: int = IGNORED) -> None:
        super().__init__()
        self.gamma, self.alpha, self.ignore_index = gamma, alpha, ignore_index

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The sum over classes of the mean over voxels."""
        counted = target != self.ignore_index
        loss = prediction.new_zeros(())
        for number in range(prediction.shape[1]):
            truth = (target == number).to(prediction.dtype)[counted]
            # How many voxels count depends on values.
            logits = prediction[:, number][counted]
            entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
            missed = (1 - torch.exp(-entropy)).pow(self.gamma)
            loss = loss + (missed * entropy * (self.alpha * truth + (1 - self.alpha) * (1 - truth))).mean()
        return loss


class LovaszLoss(nn.Module):
    """The Lovasz extension of the Jaccard index.

    The errors of each class are sorted, and weighted by how much the index falls at each: a sort and a cumulative sum
    over all voxels of the batch.
    """

    def __init__(self, ignore_index: int | None = None) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The mean over classes."""
        classes = prediction.shape[1]
        probability = prediction.softmax(1).movedim(1, -1).reshape(-1, classes)
        labels = target.reshape(-1)
        if self.ignore_index is not None:
            valid = labels != self.ignore_index
            probability, labels = probability[valid], labels[valid]
        losses = [self.of_class(probability[:, number], labels == number) for number in range(classes)]
        return torch.stack(losses).mean()

    def of_class(self, probability: Tensor, truth: Tensor) -> Tensor:
        """The loss of one class over all voxels in a row."""
        truth = truth.type_as(probability)
        errors, order = torch.sort((truth - probability).abs(), 0, descending=True)
        truth = truth[order]
        total = truth.sum()
        index = 1 - (total - truth.cumsum(0)) / (total + (1 - truth).cumsum(0))
        # Differences of neighbours, across tiles too.
        falls = torch.cat([index[:1], index[1:] - index[:-1]])
        return torch.dot(errors, falls.detach())


class SoftCrossEntropy(nn.Module):
    """Cross entropy with smoothed labels.

    Ignored voxels become class 0 for ``gather`` and are filled with zero after it.
    """

    def __init__(self, smooth: float = 0.1, ignore_index: int = IGNORED) -> None:
        super().__init__()
        self.smooth, self.ignore_index = smooth, ignore_index

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """The mean over all voxels, ignored ones included."""
        log_probability, target = F.log_softmax(prediction, 1), target.unsqueeze(1)
        ignored = target.eq(self.ignore_index)
        # ``gather`` needs valid class numbers everywhere.
        likelihood = -log_probability.gather(1, target.masked_fill(ignored, 0))
        likelihood = likelihood.masked_fill(ignored, 0.0)
        rest = -log_probability.sum(1, keepdim=True).masked_fill(ignored, 0.0)
        share = self.smooth / log_probability.size(1)
        return ((1 - self.smooth) * likelihood.sum() + share * rest.sum()) / target.numel()


class CorrelationLoss(nn.Module):
    """One minus Matthews' correlation coefficient of a binary prediction: four sums over the whole batch."""

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        """From the four sums of the confusion matrix."""
        predicted, truth = prediction.sigmoid()[:, :1], (target.unsqueeze(1) == 1).to(prediction.dtype)
        tp, tn = (predicted * truth).sum() + 1e-5, ((1 - predicted) * (1 - truth)).sum() + 1e-5
        fp, fn = (predicted * (1 - truth)).sum() + 1e-5, ((1 - predicted) * truth).sum() + 1e-5
        return 1 - (tp * tn - fp * fn) / torch.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))


class ConfusionScores(nn.Module):
    """IoU, Dice and accuracy by classes from a confusion matrix, counted as metrics count it: ``bincount`` of pairs."""

    def forward(self, prediction: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Scores by class, and the prediction, whose gradient can be compared."""
        classes = prediction.shape[1]
        valid = target != IGNORED
        # The pair (truth, prediction) as one number.
        pairs = target[valid] * classes + prediction.argmax(1)[valid]
        matrix = torch.bincount(pairs, minlength=classes**2).reshape(classes, classes).double()
        hits, truth, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
        scores = {
            "iou": hits / (truth + predicted - hits),
            "dice": 2 * hits / (truth + predicted),
            "accuracy": hits / truth,
        }
        return {**scores, "prediction": prediction}
