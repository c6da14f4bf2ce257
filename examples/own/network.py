"""A small network that finds shells in noise."""

from torch import Tensor, nn


class Finder(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, width, 3, padding=1),
            nn.BatchNorm3d(width),
            nn.ReLU(),
            nn.Conv3d(width, width, 3, padding=1),
            nn.BatchNorm3d(width),
            nn.ReLU(),
            nn.Conv3d(width, 2, 1),
        )

    def forward(self, volume: Tensor) -> Tensor:
        return self.layers(volume)
