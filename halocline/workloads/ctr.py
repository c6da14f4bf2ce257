"""Click-through rate from categories: a table far larger than the network above it (as HeterPS and Parallax train).

Every sample names one category in each of several fields; the table has a row for each category of each field. Lookups
are ``sparse``: only rows that a batch names travel and are updated, each on the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Field, Generated
from ..geometry import Box
from ..random.draw import Draw
from ..random.generator import GlobalBox
from .metrics import RocCurve
from .workload import Batch, Workload, WorkloadSize

FIELDS, CATEGORIES = 8, 2_000  # of the small size: fields, and categories of each
SHAPES = ((6, FIELDS),)
TABLE = "table.weight"


def fit(shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Arguments of a small network that takes categories of these shapes."""
    return {"fields": shapes[0][1], "categories": 50, "width": 4, "hidden": 8}


class RowTable(nn.Embedding):
    """A table with small rows, so that products of two begin near nothing."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.05)


class ClickNet(nn.Module):
    """Rows of the table, their pairwise products summed (a factorization machine), and two hidden layers.

    The first column of the table is the category's own weight. The defaults are of the size of Criteo's terabyte: 26
    fields, 188 million rows of 64 floats, 48 GB.
    """

    first: Tensor

    def __init__(self, fields: int = 26, categories: int = 7_240_000, width: int = 64, hidden: int = 512) -> None:
        super().__init__()
        self.table = RowTable(fields * categories, width + 1, sparse=True)
        self.deep = nn.Sequential(
            nn.Linear(fields * width, hidden), nn.ReLU(), nn.Linear(hidden, hidden // 2), nn.ReLU(),
            nn.Linear(hidden // 2, 1),
        )  # fmt: skip
        self.bias = nn.Parameter(torch.empty(1))
        self.register_buffer("first", torch.empty(fields, dtype=torch.int64), persistent=False)
        self.categories = categories
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The bias, and the first row of each field."""
        with torch.no_grad():
            self.bias.zero_()
            self.first.copy_(torch.arange(len(self.first), device=self.first.device) * self.categories)

    def forward(self, categories: Tensor) -> Tensor:
        """Categories [N, fields], each counted in its own field, to the logits of a click [N]."""
        rows = self.table(categories.long() + self.first)
        own, vectors = rows[..., 0].sum(1), rows[..., 1:]
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        logits: Tensor = own + pairs + self.deep(vectors.flatten(1)).squeeze(1) + self.bias
        return logits


@dataclass(frozen=True)
class Clicks:
    """Draws categories, small numbers far more often, and clicks from hidden weights of categories and their pairs."""

    seed: int
    fields: int
    categories: int
    answers: bool

    def __call__(self, sample: int, box: Box) -> npt.NDArray[Any]:
        numbers = _uniform((self.fields + 1,), self.seed, sample)
        chosen = np.minimum((self.categories * numbers[:-1] ** 3).astype(np.int64), self.categories - 1)
        if not self.answers:
            return chosen[box[0].lo : box[0].hi]
        # Hidden vectors of a category, from a hash of its number: two factors and a weight.
        hidden = np.stack([_hidden(chosen, np.arange(self.fields), factor) for factor in range(3)])
        pairs = (hidden[:2].sum(1) ** 2 - (hidden[:2] ** 2).sum(1)).sum() / 2
        score = 3.0 * hidden[2].sum() / np.sqrt(self.fields) + 3.0 * pairs / self.fields
        return np.array([numbers[-1] < 1 / (1 + np.exp(-score))], dtype=np.float32)


def _uniform(shape: tuple[int, ...], seed: int, sample: int) -> npt.NDArray[np.float64]:
    draw = Draw(GlobalBox.all_of(shape), torch.device("cpu"), (seed, sample))
    return draw.uniform(torch.float64).numpy()


def _hidden(chosen: npt.NDArray[np.int64], field: npt.NDArray[np.int64], factor: int) -> npt.NDArray[np.float64]:
    """Numbers from -1 to 1 that look random, by category, field and factor."""
    wave = np.sin(12.9898 * (chosen + 1) + 78.233 * (field + 1) + 37.719 * (factor + 1)) * 43758.5453
    return 2 * (wave - np.floor(wave)) - 1


def clicks(samples: int, seed: int = 0, fields: int = FIELDS, categories: int = CATEGORIES) -> dict[str, Field]:
    """``x``: the category in each field; ``y``: whether it was clicked on."""
    return {
        "x": Field(Generated(Clicks(seed, fields, categories, answers=False), samples, (fields,), "T", "int64")),
        "y": Field(Generated(Clicks(seed, fields, categories, answers=True), samples, (1,), "C", "float32")),
    }


def loss(output: Tensor, batch: Batch) -> Tensor:
    """Binary cross entropy over the whole batch."""
    return F.binary_cross_entropy_with_logits(output, batch["y"].flatten().to(output.dtype))


class ClickRoc(RocCurve):
    """The ROC curve of samples."""

    def update(self, output: Tensor, batch: Batch) -> None:
        """Add a batch; every rank calls it."""
        self.add(output, batch["y"].flatten())


def layout(axis: str = "model") -> dict[str, dict[int, str]]:
    """The table by rows."""
    return {TABLE: {0: axis}}


WORKLOAD = Workload(
    factory=ClickNet,
    shapes=SHAPES,
    fit=fit,
    loss=loss,
    meter=ClickRoc,
    data=clicks,
    small=WorkloadSize(
        network={"fields": FIELDS, "categories": CATEGORIES, "width": 8, "hidden": 32},
        data={},
        training={"batch": 256, "steps": 600, "samples": 200_000, "validation": 4_096, "cut": ("N",),
                  "lr": 0.05, "optimizer": "torch.optim:Adagrad"},
    ),
    full=WorkloadSize(
        network={},
        data={"fields": 26, "categories": 7_240_000},
        training={"batch": 65_536, "steps": 60_000, "samples": 4_000_000_000, "validation": 1_000_000, "cut": ("N",),
                  "lr": 0.02, "optimizer": "torch.optim:Adagrad"},
    ),
    tokens=50,
    layout=layout,
    tables=(TABLE,),
)  # fmt: skip
