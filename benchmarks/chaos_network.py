"""The network and the data of the trials of ``bench chaos``: as small as they can be, so that a trial is cheap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor, nn

SAMPLES, SIZE = 8, 16
SETTINGS = (
    'model="benchmarks.chaos_network:SmallNetwork"', 'loss="benchmarks.chaos_network:loss"', 'data.x.dims="NCDHW"',
    'data.y.dims="NCDHW"', "data.validation=0",
)  # fmt: skip


class SmallNetwork(nn.Module):
    """Three convolutions with a norm, which exchange halos and statistics."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, channels, 3, padding=1), nn.BatchNorm3d(channels), nn.ReLU(),
            nn.Conv3d(channels, channels, 3, padding=1), nn.Dropout(0.1), nn.Conv3d(channels, 1, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """The answer, of the input's size."""
        made: Tensor = self.layers(x)
        return made


def loss(output: Tensor, y: Tensor) -> Tensor:
    """The mean squared error."""
    return nn.functional.mse_loss(output, y)


def write_data(folder: Path) -> tuple[str, ...]:
    """Write samples to files; returns the settings that name them."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((SAMPLES, 1, SIZE, SIZE, SIZE)).astype(np.float32)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", np.roll(x, 1, -1) * 0.5)
    return (*SETTINGS, f'data.x.path="{folder / "x.npy"}"', f'data.y.path="{folder / "y.npy"}"')
