"""A vision transformer for the segmentation of volumes: patches are tokens, cut in space, and heads, cut over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from .metrics import Confusion
from .transformer import TransformerBlock, block_layout
from .unet3d import CLASSES, loss
from .volumes import volumes
from .workload import Workload, WorkloadSize

SHAPES = ((1, 1, 16, 16, 16),)


def fit(shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Arguments of a small network that takes volumes of these shapes."""
    return {"size": tuple(shapes[0][2:]), "channels_in": shapes[0][1], "patch": 4, "width": 16, "heads": 4, "layers": 2}


class ViT3d(nn.Module):
    """Patches to tokens by a convolution, transformer blocks, and tokens to the voxels of their patch.

    The defaults are the sizes of ViT-B on volumes of 128 voxels a side.
    """

    def __init__(
        self,
        size: int | Sequence[int] = 128,
        channels_in: int = 1,
        patch: int = 16,
        width: int = 768,
        heads: int = 12,
        layers: int = 12,
        classes: int = CLASSES,
    ) -> None:
        super().__init__()
        sides = (size,) * 3 if isinstance(size, int) else tuple(size)
        self.patch = patch
        self.tokens = nn.Conv3d(channels_in, width, patch, patch)
        self.places = nn.Embedding(sides[0] // patch * (sides[1] // patch) * (sides[2] // patch), width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.ConvTranspose3d(width, classes, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        """[N, channels, D, H, W] to logits of the same size; sides must be multiples of the patch."""
        if any(size % self.patch for size in x.shape[2:]):
            raise ValueError(f"a volume of {list(x.shape[2:])} has no whole patches; use multiples of {self.patch}")
        x = self.tokens(x)
        grid = x.shape[2:]
        x = x.flatten(2).transpose(1, 2) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).transpose(1, 2).unflatten(2, grid))


def layout(axis: str = "model") -> dict[str, dict[int, str]]:
    """Blocks by heads and hidden units."""
    return block_layout(axis)


WORKLOAD = Workload(
    factory=ViT3d,
    shapes=SHAPES,
    fit=fit,
    loss=loss,
    meter=partial(Confusion, CLASSES),
    data=volumes,
    small=WorkloadSize(
        network={"size": 32, "patch": 4, "width": 48, "heads": 4, "layers": 2},
        data={"size": 32},
        training={"batch": 2, "steps": 200, "lr": 2e-3, "optimizer": "adam", "cut": ("D", "H", "W")},
    ),
    full=WorkloadSize(
        network={},
        data={"size": 128},
        training={"batch": 2, "steps": 20_000, "lr": 3e-4, "optimizer": "adam", "cut": ("D", "H", "W")},
    ),
    layout=layout,
)
