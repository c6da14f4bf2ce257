"""Losses and metrics: torch's own, those of segmentation (:mod:`.segmentation`), and those of MONAI 1.6.1.

The prediction is cut, and the target with it. A metric has no gradient, so that its prediction is returned beside it,
and there is a gradient to compare.

Left out of MONAI's: what needs weights to download (PerceptualLoss) or other packages (MetricsReloaded), and what takes
boxes or features in place of volumes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import Zoo, ZooEntry
from .segmentation import (
    IGNORED,
    ConfusionScores,
    CorrelationLoss,
    FocalLoss,
    LovaszLoss,
    OverlapLoss,
    SoftCrossEntropy,
)

LOGITS, SPACE = (2, 3, 16, 12, 10), (16, 12, 10)


def _drawn(make: Callable[..., Tensor], *args: Any) -> Tensor:
    """Fixed random numbers: every rank has the same targets."""
    return make(*args, generator=torch.Generator().manual_seed(7))


CLASSES = _drawn(torch.randint, 0, 3, (2, *SPACE))
LABELS = CLASSES.unsqueeze(1)
# A tenth of the voxels does not count.
WITH_IGNORED = CLASSES.masked_fill(_drawn(torch.rand, (2, *SPACE)) < 0.1, IGNORED)
# Targets of regression, and of probabilities.
VALUES, SHARES = _drawn(torch.randn, LOGITS), _drawn(torch.rand, LOGITS)
SIGNS = _drawn(torch.randint, 0, 2, LOGITS) * 2 - 1
# A field of displacements has a component for each dim.
ONE_CHANNEL, FIELD = (2, 1, *SPACE), (2, 3, *SPACE)
HOT: dict[str, Any] = {"to_onehot_y": True, "softmax": True}
# Of the classes.
WEIGHTS = torch.tensor([0.2, 0.3, 0.5])


class Activated(nn.Module):
    """A loss that takes probabilities, or their logarithms, together with what makes them of logits."""

    def __init__(self, activation: Callable[[Tensor], Tensor], loss: nn.Module) -> None:
        super().__init__()
        self.activation, self.loss = activation, loss

    def forward(self, prediction: Tensor, *targets: Tensor) -> Tensor:
        """The loss of the activated prediction."""
        value: Tensor = self.loss(self.activation(prediction), *targets)
        return value


class Metric(nn.Module):
    """A metric of MONAI: its values by sample and class. To aggregate them, MONAI gathers over all ranks by itself."""

    def __init__(self, metric: Any, read: Callable[[Tensor], Tensor] = lambda prediction: prediction) -> None:
        super().__init__()
        self.metric, self.read = metric, read

    def forward(self, prediction: Tensor, target: Tensor) -> dict[str, Any]:
        """The metric, and the prediction, whose gradient can be compared."""
        value = self.metric(self.read(prediction.detach()), self.read_target(target))
        return {"metric": value, "prediction": prediction}

    def read_target(self, target: Tensor) -> Tensor:
        """The target as the metric takes it."""
        return target


class ClassMetric(Metric):
    """A metric of one-hot predictions and targets, as MONAI's ``AsDiscrete`` makes them."""

    def __init__(self, metric: Any) -> None:
        super().__init__(metric, lambda prediction: self.one_hot(prediction.argmax(1)))

    def one_hot(self, classes: Tensor) -> Tensor:
        """A channel for each class."""
        return nn.functional.one_hot(classes, 3).movedim(-1, 1)

    def read_target(self, target: Tensor) -> Tensor:
        """The target as one-hot channels."""
        return self.one_hot(target.squeeze(1))


def own(name: str, loss: Callable[[], nn.Module], *targets: Tensor, prediction: tuple[int, ...] = LOGITS) -> ZooEntry:
    """An entry for a loss that needs nothing of MONAI. ``targets`` are fixed tensors, the same on all ranks."""
    return ZooEntry(name, lambda monai: loss(), (prediction, *targets))


def monai_loss(name: str, *targets: Any, prediction: tuple[int, ...] = LOGITS, **options: Any) -> ZooEntry:
    """An entry for a loss of MONAI by its name."""
    return ZooEntry(name, lambda monai: getattr(monai.losses, name)(**options), (prediction, *(targets or (LABELS,))))


def metric(name: str, *, kind: type[Metric] = ClassMetric, target: Tensor = LABELS, **options: Any) -> ZooEntry:
    """An entry for a metric of MONAI by its name."""
    return ZooEntry(name, lambda monai: kind(getattr(monai.metrics, name)(**options)), (LOGITS, target))


def log_softmax(prediction: Tensor) -> Tensor:
    """Over the classes."""
    return prediction.log_softmax(1)


# What torch.nn offers, each by its rule or written out.
TORCH = (
    own("CrossEntropyLoss", nn.CrossEntropyLoss, CLASSES),
    own("CrossEntropyLoss(weights)", lambda: nn.CrossEntropyLoss(WEIGHTS.double(), label_smoothing=0.1), CLASSES),
    own("CrossEntropyLoss(ignore)", lambda: nn.CrossEntropyLoss(ignore_index=IGNORED), WITH_IGNORED),
    own("CrossEntropyLoss(shares)", nn.CrossEntropyLoss, SHARES / SHARES.sum(1, keepdim=True)),
    own("NLLLoss", lambda: Activated(log_softmax, nn.NLLLoss(ignore_index=IGNORED)), WITH_IGNORED),
    own("BCELoss", lambda: Activated(torch.sigmoid, nn.BCELoss()), SHARES),
    own("BCEWithLogitsLoss", lambda: nn.BCEWithLogitsLoss(pos_weight=WEIGHTS.double().view(3, 1, 1, 1)), SHARES),
    own("MultiLabelSoftMarginLoss", nn.MultiLabelSoftMarginLoss, (SHARES > 0.5).double()),
    own("KLDivLoss", lambda: Activated(log_softmax, nn.KLDivLoss(reduction="batchmean")), SHARES),
    own("L1Loss", nn.L1Loss, VALUES),
    own("MSELoss", nn.MSELoss, VALUES),
    own("SmoothL1Loss", nn.SmoothL1Loss, VALUES),
    own("HuberLoss", lambda: nn.HuberLoss(delta=0.5), VALUES),
    own("SoftMarginLoss", nn.SoftMarginLoss, SIGNS),
    own("HingeEmbeddingLoss", nn.HingeEmbeddingLoss, SIGNS),
    own("MarginRankingLoss", lambda: nn.MarginRankingLoss(0.1), VALUES, SIGNS),
    own("PoissonNLLLoss", nn.PoissonNLLLoss, SHARES),
    own("GaussianNLLLoss", nn.GaussianNLLLoss, VALUES, SHARES + 0.1),
    own("TripletMarginLoss", lambda: nn.TripletMarginLoss(0.5), VALUES, SHARES),
)
# As the libraries of the field write them: one-hot targets, masks, sorts.
SEGMENTATION = (
    own("dice", lambda: OverlapLoss("dice"), CLASSES),
    own("dice(ignore)", lambda: OverlapLoss("dice", IGNORED), WITH_IGNORED),
    own("jaccard", lambda: OverlapLoss("jaccard"), CLASSES),
    own("tversky(ignore)", lambda: OverlapLoss("tversky", IGNORED), WITH_IGNORED),
    own("focal(ignore)", FocalLoss, WITH_IGNORED),
    own("lovasz", LovaszLoss, CLASSES),
    own("lovasz(ignore)", lambda: LovaszLoss(IGNORED), WITH_IGNORED),
    own("soft cross entropy(ignore)", SoftCrossEntropy, WITH_IGNORED),
    own("correlation", CorrelationLoss, CLASSES),
    own("confusion scores", ConfusionScores, WITH_IGNORED),
)
# Losses first, then metrics.
MONAI = (
    monai_loss("DiceLoss", **HOT),
    monai_loss("DiceCELoss", **HOT),
    monai_loss("DiceFocalLoss", **HOT),
    monai_loss("GeneralizedDiceLoss", **HOT),
    monai_loss("GeneralizedDiceFocalLoss", **HOT),
    monai_loss("GeneralizedWassersteinDiceLoss", dist_matrix=1 - torch.eye(3)),
    monai_loss("TverskyLoss", **HOT),
    monai_loss("FocalLoss", to_onehot_y=True, use_softmax=True),
    monai_loss("MCCLoss", **HOT),
    monai_loss("MaskedDiceLoss", LABELS, (_drawn(torch.rand, ONE_CHANNEL) > 0.3).double(), **HOT),
    monai_loss("AsymmetricUnifiedFocalLoss", to_onehot_y=True, num_classes=3),
    monai_loss("NACLLoss", CLASSES, classes=3, dim=3),
    monai_loss("SoftclDiceLoss", **HOT),
    monai_loss("SoftDiceclDiceLoss", **HOT),
    monai_loss("HausdorffDTLoss", **HOT),
    monai_loss("SSIMLoss", VALUES, spatial_dims=3, win_size=5),
    monai_loss("LocalNormalizedCrossCorrelationLoss", VALUES[:, :1], prediction=ONE_CHANNEL),
    monai_loss("GlobalMutualInformationLoss", VALUES[:, :1], prediction=ONE_CHANNEL),
    monai_loss("JukeboxLoss", VALUES, spatial_dims=3),
    ZooEntry("BendingEnergyLoss", lambda monai: monai.losses.BendingEnergyLoss(), (FIELD,)),
    ZooEntry("DiffusionLoss", lambda monai: monai.losses.DiffusionLoss(), (FIELD,)),
    ZooEntry(
        "DeepSupervisionLoss",
        lambda monai: monai.losses.DeepSupervisionLoss(monai.losses.DiceCELoss(**HOT)),
        (LOGITS, LABELS),
    ),
    metric("DiceMetric"),
    metric("MeanIoU"),
    metric("GeneralizedDiceScore"),
    metric("ConfusionMatrixMetric", metric_name="f1 score"),
    metric("FBetaScore"),
    metric("HausdorffDistanceMetric"),
    metric("SurfaceDistanceMetric"),
    metric("MSEMetric", kind=Metric, target=VALUES),
    metric("MAEMetric", kind=Metric, target=VALUES),
    metric("RMSEMetric", kind=Metric, target=VALUES),
    metric("PSNRMetric", kind=Metric, target=VALUES, max_val=4.0),
    metric("SSIMMetric", kind=Metric, target=VALUES, spatial_dims=3, win_size=5),
)
ZOO = Zoo("losses", "monai", (*TORCH, *SEGMENTATION, *MONAI), extra="zoo-monai")
