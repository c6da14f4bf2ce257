"""What the demo trains: synthetic volumes, a small 3D U-Net, and the same training step on one rank and on many."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..distribute import distribute, no_sync
from ..rules import gather, shard
from ..tensor import ShardedTensor, unwrap
from ..testing.memory import peak_bytes
from ..workloads.unet3d import UNet3d
from ..world import Mesh, Traffic

SIZE, WIDTH = 32, 6
ATTEMPTS = 24  # at placing an object; a third or so succeed
RANKS = 2
CLASSES = ("background", "ball", "shell")
NOISE, RATE, MOMENTUM = 0.2, 0.07, 0.9
UNSEEN = 10_150  # number of a volume that no training step uses; a ball and a shell in it cross the cut


def make_volume(number: int, size: int) -> tuple[Tensor, Tensor]:
    """A noisy volume [1, 1, D, H, W] of solid balls and hollow shells, and the class of each voxel [1, D, H, W]."""
    generator = torch.Generator().manual_seed(number)
    labels = torch.zeros(size, size, size, dtype=torch.int64)
    grid = torch.stack(torch.meshgrid(*[torch.arange(size)] * 3, indexing="ij")).float()
    for attempt in range(ATTEMPTS):
        centre = torch.rand(3, generator=generator) * (size - 10) + 5
        radius = 4 + 3 * torch.rand((), generator=generator)
        distance = (grid - centre.view(3, 1, 1, 1)).square().sum(0).sqrt()
        if labels[distance < radius + 1].any():
            continue  # objects do not touch
        hollow = attempt % 2 == 1
        labels[(distance < radius) & (distance >= (radius - 2 if hollow else 0))] = 2 if hollow else 1
    noise = NOISE * torch.randn(labels.shape, generator=generator)
    return ((labels > 0) + noise)[None, None], labels[None]


class Training:
    """With a mesh the sample is cut over it; without, nothing of the library is in the way."""

    def __init__(self, size: int, width: int, dtype: torch.dtype, mesh: Mesh | None = None) -> None:
        torch.manual_seed(0)
        model = UNet3d(width, 1, len(CLASSES)).to(dtype)
        self.size, self.dtype, self.mesh = size, dtype, mesh
        self.model = model if mesh is None else distribute(model, mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM)

    def sample(self, number: int) -> tuple[Tensor, Tensor]:
        volume, labels = make_volume(number, self.size)
        volume = volume.to(self.dtype)
        if self.mesh is None:
            return volume, labels
        return shard(volume, self.mesh, {2: "depth"}), shard(labels, self.mesh, {1: "depth"})

    def loss(self, number: int) -> Tensor:
        volume, labels = self.sample(number)
        return F.cross_entropy(self.model(volume), labels)

    def step(self, number: int) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(number)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def gradients(self) -> dict[str, Tensor]:
        self.loss(0).backward()
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def predict(self) -> Tensor:
        """Classes of a volume that was not trained on."""
        with torch.no_grad():
            return gather(self.model(self.sample(UNSEEN)[0])).argmax(1)


@dataclass
class Held:
    """What one rank held and moved in one training step."""

    tile_bytes: int
    peak_bytes: int
    moved_bytes: int
    summed_bytes: int
    messages: int


def measure(training: Training, number: int) -> Held:
    """A step to count traffic, and a forward and backward with the allocator watched.

    Gradients stay allocated and are not averaged meanwhile: they and their buckets are no activations.
    """
    traffic = training.mesh.world.traffic if training.mesh else Traffic()
    traffic.clear()
    training.step(number)
    counted = replace(traffic)
    training.model.zero_grad(set_to_none=False)
    with no_sync(training.model) if training.mesh else nullcontext():
        peak = peak_bytes(lambda: training.loss(number).backward()).peak
    volume, _ = training.sample(number)
    tile = unwrap(volume) if isinstance(volume, ShardedTensor) else volume
    return Held(tile.nbytes, peak, counted.moved_bytes, counted.summed_bytes, counted.messages)


# ---- on the ranks: a training that is kept from one call to the next ----

_kept: list[Training] = []


def start_on_rank(size: int, width: int, dtype: torch.dtype) -> None:
    peak_bytes(lambda: None)  # counting starts before the first tensor that is counted
    _kept[:] = [Training(size, width, dtype, Mesh(depth=RANKS))]


def step_on_rank(number: int) -> float:
    return _kept[0].step(number)


def gradients_on_rank() -> dict[str, Tensor]:
    return _kept[0].gradients()


def predict_on_rank() -> Tensor:
    return _kept[0].predict()


def measure_on_rank(number: int) -> Held:
    return measure(_kept[0], number)
