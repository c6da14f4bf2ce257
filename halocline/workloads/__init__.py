"""Scientific workloads: networks as their papers have them, in plain PyTorch, with small defaults to try them out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from . import cosmoflow, unet3d


@dataclass(frozen=True)
class Workload:
    """A network that commands know by name. ``fit`` gives arguments of a small one for inputs of given shapes."""

    factory: Callable[..., nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    fit: Callable[[Sequence[Sequence[int]]], dict[str, Any]]


WORKLOADS = {
    "unet3d": Workload(unet3d.UNet3d, unet3d.SHAPES, unet3d.fit),
    "cosmoflow": Workload(cosmoflow.CosmoFlow, cosmoflow.SHAPES, cosmoflow.fit),
}

__all__ = ["WORKLOADS", "Workload"]
