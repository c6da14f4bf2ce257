"""What ``bench gpu`` trains: networks at their published widths, at cubes below and above 2^31 elements a tensor.

MONAI's are taken at the smallest cube (of the sizes they accept) at which some tensor of the forward has 2^31 elements,
as long as a step is likely to fit the memory of one large card.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halocline.errors import HaloclineError
from halocline.tree import tensors_in
from halocline.workloads.cosmoflow import CosmoFlow
from halocline.workloads.unet3d import MULTIPLE, UNet3d

CLASSES = 3  # of the U-Net
PARAMETERS = 4  # of the universe, which CosmoFlow estimates
MONAI = "monai"  # stands for all its networks


@dataclass(frozen=True)
class Data:
    """Of one sample: the volume, and what the loss compares the output with."""

    volume: Tensor
    target: Tensor | None = None


@dataclass(frozen=True)
class GpuNetwork:
    """A network. ``sizes``: sides of its cubes, the most telling first; it takes multiples of ``multiple``.

    ``loss`` may return the output itself, for a layer without a loss: it is then sent back as its own gradient.
    """

    name: str
    build: Callable[[int], nn.Module]
    sizes: tuple[int, ...]
    loss: Callable[[Any, Data], Tensor]
    channels: int = 1
    multiple: int = 1
    trains: bool = True
    package: str = ""
    target: Callable[[int, torch.Generator], Tensor] | None = None

    def model(self, size: int) -> nn.Module:
        """With the same weights at each call, and in training mode."""
        torch.manual_seed(0)
        return self.build(size).train()

    def shape(self, size: int) -> tuple[int, ...]:
        return (1, self.channels, size, size, size)

    def data(self, size: int, device: str, layout: torch.memory_format) -> Data:
        """The same at each call; drawn on the device, which is quick there."""
        generator = torch.Generator(device).manual_seed(1)
        volume = torch.randn(self.shape(size), generator=generator, device=device).contiguous(memory_format=layout)
        return Data(volume, self.target(size, generator) if self.target else None)

    @property
    def installed(self) -> bool:
        return not self.package or importlib.util.find_spec(self.package) is not None

    def check_size(self, size: int) -> None:
        if size < 1 or size % self.multiple:
            raise HaloclineError(f"{self.name} takes cubes whose side is a multiple of {self.multiple}, not {size}")


def labels(size: int, generator: torch.Generator) -> Tensor:
    return torch.randint(CLASSES, (1, size, size, size), generator=generator, device=generator.device)


def cosmology(size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(1, PARAMETERS, generator=generator, device=generator.device)


def cross_entropy(output: Tensor, data: Data) -> Tensor:
    assert data.target is not None
    return F.cross_entropy(output, data.target)


def squared_error(output: Tensor, data: Data) -> Tensor:
    assert data.target is not None
    return F.mse_loss(output, data.target)


def mean_square(output: Any, data: Data) -> Tensor:
    """Of every tensor that the network returns. In float32, or the losses of two ways could not be told apart."""
    return torch.stack([tensor.float().square().mean() for tensor in tensors_in(output)]).sum()


def no_loss(output: Tensor, data: Data) -> Tensor:
    return output


def monai(name: str, size: int, multiple: int, build: Callable[[Any], nn.Module]) -> GpuNetwork:
    def built(_: int) -> nn.Module:
        return build(importlib.import_module("monai.networks.nets"))

    return GpuNetwork(name, built, (size,), mean_square, multiple=multiple, package=MONAI)


OWN = (
    GpuNetwork(
        "unet3d",
        lambda _: UNet3d(classes=CLASSES),
        (256, 320, 384, 192, 128),
        cross_entropy,
        multiple=MULTIPLE,
        target=labels,
    ),
    GpuNetwork(
        "cosmoflow",
        lambda size: CosmoFlow(size=size, parameters=PARAMETERS),
        (512, 384, 256, 128),
        squared_error,
        channels=4,
        target=cosmology,
    ),
    # Alone, so that its own cost is seen: a loss would read and write more than the convolution does.
    GpuNetwork("conv", lambda _: nn.Conv3d(4, 16, 3, padding=1), (512,), no_loss, channels=4, trains=False),
)

# Without dropout: two ways would draw different numbers. SegResNet's own group norms are float32 under autocast, and
# would not leave the step room on one card.
OF_MONAI = (
    monai("BasicUNet", 336, 16, lambda n: n.BasicUNet(3, 1, 2)),
    monai("DynUNet", 352, 32, lambda n: n.DynUNet(3, 1, 3, [3] * 6, [1, 2, 2, 2, 2, 2], [2] * 5)),
    monai("SegResNet", 512, 8, lambda n: n.SegResNet(3, 16, 1, 3, norm="batch")),
    monai(
        "UNet",
        832,
        16,
        lambda n: n.UNet(3, 1, 2, (16, 32, 64, 128, 256), (2, 2, 2, 2), num_res_units=2, norm="batch"),
    ),
    monai("FlexibleUNet", 448, 32, lambda n: n.FlexibleUNet(1, 2, "resnet18", spatial_dims=3)),
    monai("AttentionUnet", 336, 16, lambda n: n.AttentionUnet(3, 1, 2, (32, 64, 128, 256, 512), (2, 2, 2, 2))),
    monai("SwinUNETR", 256, 32, lambda n: n.SwinUNETR(1, 2, feature_size=48, spatial_dims=3)),
    monai("BasicUNetPlusPlus", 256, 16, lambda n: n.BasicUNetPlusPlus(3, 1, 2)),
    monai("VNet", 416, 16, lambda n: n.VNet(3, 1, 2, dropout_prob_down=None, dropout_prob_up=(None, 0.0))),
)

SUBJECTS = {subject.name: subject for subject in (*OWN, *OF_MONAI)}


def chosen(names: list[str]) -> list[GpuNetwork]:
    """By name, in the order given; ``monai`` stands for all of MONAI's."""
    wanted = [one for name in names for one in ([s.name for s in OF_MONAI] if name == MONAI else [name])]
    unknown = [name for name in wanted if name not in SUBJECTS]
    if unknown:
        raise HaloclineError(f"no subject {unknown[0]!r}; there are {', '.join([*SUBJECTS, MONAI])}")
    return [SUBJECTS[name] for name in dict.fromkeys(wanted)]
