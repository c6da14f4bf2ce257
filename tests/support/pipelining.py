"""Networks for pipelines, and one step of a pipeline beside the untouched model with the same micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halocline as hc
from halocline.tensor import ShardedTensor
from halocline.workloads import WORKLOADS, transformer

SEED = 5


class Chain(nn.Module):
    """Linear layers, with dropout and a connection over two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        return self.d(self.drop(F.relu(self.c(F.relu(self.b(x))))) + x)


class UNet(nn.Module):
    """Two levels, a skip over all stages, batch norm."""

    def __init__(self, width: int = 3) -> None:
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


class Residual(nn.Module):
    """Blocks as in ResNets: writes in place right after a border."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(blocks))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(blocks))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.blocks, self.norms, strict=True):
            y = norm(conv(x))
            y += x
            x = F.relu(y, inplace=True)
        return self.head(x.mean((2, 3)))


class Tokens(nn.Module):
    """A small transformer, whose embedding is its last layer too."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(11, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.rise = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(2))
        self.fall = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(2))
        self.out = nn.Linear(width, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for norm, qkv, rise, fall in zip(self.norms, self.qkv, self.rise, self.fall, strict=True):
            parts = qkv(norm(x)).view(*x.shape[:2], 3, self.heads, -1).unbind(2)
            attended = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts))
            x = x + attended.transpose(1, 2).reshape(x.shape)
            x = x + fall(F.gelu(rise(x)))
        return self.out(x).transpose(1, 2)


@dataclass(frozen=True)
class Subject:
    """A network with its batch."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    targets: Callable[[], Tensor]
    loss: Callable[..., Tensor] = F.mse_loss
    cuts: dict[str, list[dict[int, str]]] = field(default_factory=dict)  # by axis: of inputs and targets
    layout: dict[str, dict[int, str]] = field(default_factory=dict)


def _normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape, dtype=torch.float64)


def _classes(*shape: int, count: int = 11) -> Callable[[], Tensor]:
    return lambda: torch.randint(count, shape)


SUBJECTS = {
    "chain": Subject(Chain, _normal(8, 6), _normal(8, 3), cuts={"data": [{0: "data"}] * 2},
                     layout={"b.weight": {0: "model"}, "b.bias": {0: "model"}, "c.weight": {1: "model"}}),
    "unet": Subject(UNet, _normal(4, 1, 6, 4, 4), _normal(4, 2, 6, 4, 4),
                    cuts={"data": [{0: "data"}] * 2, "depth": [{2: "depth"}] * 2}),
    "residual": Subject(Residual, _normal(8, 2, 6, 5), _classes(8, count=3), F.cross_entropy,
                        cuts={"data": [{0: "data"}] * 2, "depth": [{2: "depth"}]}),
    "tokens": Subject(Tokens, _classes(4, 6), _classes(4, 6), F.cross_entropy, cuts={"data": [{0: "data"}] * 2},
                      layout={"rise.*": {0: "model"}, "fall.*.weight": {1: "model"}}),
}  # fmt: skip


def _workload(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    """A built-in network with norms drawn anew: those that begin at zero would hide the gradients behind them."""

    def make() -> nn.Module:
        model = WORKLOADS[name].factory(**arguments)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.uniform_(module.bias, -0.5, 0.5)
        return model

    return make


def _workload_loss(name: str, row: bool = False) -> Callable[..., Tensor]:
    loss = WORKLOADS[name].loss
    return lambda output, truth: loss(output, {"y": truth[:, None] if row else truth})


#: Workloads in small. Batches divide into 1, 2, 3, 4 or 6 micro-batches, each over two ranks of data.
NETWORKS = {
    "unet3d": Subject(_workload("unet3d", width=1), _normal(12, 1, 16, 8, 8), _classes(12, 16, 8, 8, count=3),
                      _workload_loss("unet3d"),
                      cuts={"data": [{0: "data"}] * 2, "depth": [{2: "depth"}, {1: "depth"}]}),
    "resnet50": Subject(_workload("resnet50", width=2, classes=5), _normal(12, 3, 40, 40), _classes(12, count=5),
                        _workload_loss("resnet50", row=True),
                        cuts={"data": [{0: "data"}] * 2, "depth": [{2: "depth"}]}),
    "transformer": Subject(_workload("transformer", vocabulary=11, length=8, width=8, heads=2, layers=4),
                           _classes(12, 8), _classes(12, 8), _workload_loss("transformer"),
                           cuts={"data": [{0: "data"}] * 2}, layout=transformer.layout()),
}  # fmt: skip
SUBJECTS_AND_NETWORKS = SUBJECTS | NETWORKS


@dataclass
class Case:
    """A step to compare, with the model and the answer of one rank."""

    subject: Subject
    microbatches: int
    model: nn.Module
    batch: tuple[Tensor, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, name: str, microbatches: int) -> Case:
        """The untouched model on one rank."""
        subject = SUBJECTS_AND_NETWORKS[name]
        torch.manual_seed(0)
        model, batch = subject.make().double(), (subject.inputs(), subject.targets())
        one = copy.deepcopy(model)
        loss = one_rank(one, subject.loss, batch, microbatches)
        gradients = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
        return cls(subject, microbatches, model, batch, loss, gradients, dict(one.named_buffers()))

    def cuts(self, mesh: hc.Mesh) -> list[dict[int, str]]:
        """Of inputs and targets, along the axes that the mesh has."""
        merged: list[dict[int, str]] = [{}, {}]
        for axis, cuts in self.subject.cuts.items():
            for place, cut in enumerate(cuts):
                merged[place] |= cut if axis in mesh.sizes else {}
        return merged

    def layout(self, mesh: hc.Mesh) -> dict[str, dict[int, str]]:
        return self.subject.layout if "model" in mesh.sizes else {}

    def pipeline(self, mesh: hc.Mesh, **options: Any) -> hc.PipelinedModel:
        """Of a copy of the model."""
        hc.random.seed(SEED)
        told = {"cuts": self.cuts(mesh), "layout": self.layout(mesh), "microbatches": self.microbatches}
        return hc.pipeline(
            copy.deepcopy(self.model), mesh, loss=self.subject.loss, example=self.batch, **told | options
        )

    def error(self, pipe: hc.PipelinedModel, loss: Tensor, times: float = 1.0) -> float:
        """The largest difference of loss, gradients and buffers from those of one rank."""
        worst = abs(float(loss) - float(self.loss))
        for name, parameter in pipe.named_parameters():
            if parameter.grad is None:
                assert name not in self.gradients
                continue
            worst = max(worst, float((whole(parameter.grad) - times * self.gradients[name]).abs().max()))
        for name, buffer in pipe.part.named_buffers():
            worst = max(worst, float((buffer - self.buffers[name]).abs().max()))
        return worst


def one_rank(model: nn.Module, loss: Callable[..., Tensor], batch: tuple[Tensor, Tensor], microbatches: int) -> Tensor:
    """Adds gradients up over micro-batches; the mean loss."""
    total = torch.zeros((), dtype=torch.float64)
    with hc.random.reproducible(SEED):
        for x, y in zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True):
            share = loss(model(x), y) / microbatches
            share.backward()
            total += share.detach()
    return total


def whole(tensor: Tensor) -> Tensor:
    return hc.gather(tensor) if isinstance(tensor, ShardedTensor) else tensor
