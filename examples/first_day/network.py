"""A small network for volumes of classes, in plain PyTorch; nothing in it knows of Halocline."""

import torch
from torch import Tensor, nn


class Segmenter(nn.Module):
    def __init__(self, classes: int = 3, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm3d(1)  # Hounsfield units to numbers around zero
        self.down = nn.Sequential(nn.Conv3d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2))
        self.bottom = nn.Sequential(nn.Conv3d(width, 2 * width, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.head = nn.Conv3d(width + 1, classes, 3, padding=1)

    def forward(self, volume: Tensor) -> Tensor:
        x = self.norm(volume)
        rough = self.up(self.bottom(self.down(x)))
        return self.head(torch.cat([rough, x], 1))
