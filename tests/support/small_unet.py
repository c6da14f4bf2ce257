"""A small U-Net to plan for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halocline.plan.recording import Subject

SIDE = 24


class SmallUNet(nn.Module):
    """Two levels and a skip connection."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv3d(1, width, 3, padding=1)
        self.down = nn.Conv3d(width, 2 * width, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm3d(2 * width)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.leave = nn.Conv3d(2 * width, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.enter(x).relu()
        coarse = self.norm(self.down(fine)).relu()
        return self.leave(torch.cat([fine, self.up(coarse)], 1))


def subject(**changes: object) -> Subject:
    told = {"make_model": SmallUNet, "loss": lambda y: y.square().mean(), "shapes": ((1, 1, SIDE, SIDE, SIDE),)}
    return Subject(**{**told, **changes})
