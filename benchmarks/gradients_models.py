"""What ``bench gradients`` trains: a real ResNet-18, and the parameters of larger networks under emulated compute.

A network is emulated layer by layer. A layer holds the parameters of the real one (a convolution with the norm behind
it, or a linear map) and sleeps for its share of the step's time, as its multiplications are of the network's: a third
of it in forward, the rest in backward. An accelerator is like that to the processor: time passes, and gradients come.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from halocline.errors import HaloclineError
from halocline.workloads.unet3d import UNet3d

FORWARD = 1 / 3  # of a layer's time; backward computes the gradients of both its operands
CLASSES = 1000
NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)
TRANSPOSED = (nn.ConvTranspose2d, nn.ConvTranspose3d)
Shape = tuple[int, ...]


# ---- the plain networks ----


class Residual(nn.Module):
    """A block of ResNet: two 3x3 convolutions, or as a bottleneck 1x1, 3x3, 1x1 (stride in the 3x3) to 4 times."""

    def __init__(self, channels_in: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        out = 4 * width if bottleneck else width
        kernels = ((width, 1, 1), (width, 3, stride), (out, 1, 1)) if bottleneck else ((out, 3, stride), (out, 3, 1))
        self.body = nn.Sequential()
        source = channels_in
        for channels, kernel, step in kernels:
            self.body.extend([*_convolution(source, channels, kernel, step), nn.ReLU(inplace=True)])
            source = channels
        del self.body[-1]  # the last comes after the sum
        same = stride == 1 and channels_in == out
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(channels_in, out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _convolution(channels_in: int, channels_out: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(channels_out)]


class BenchResNet(nn.Module):
    """He et al. 2015, with the stride of a bottleneck in its 3x3 convolution, as everybody trains it now."""

    def __init__(self, blocks: Sequence[int], bottleneck: bool, width: int = 64, classes: int = CLASSES) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.Sequential()
        source, expansion = width, 4 if bottleneck else 1
        for level, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if level and not number else 1
                self.stages.append(Residual(source, width << level, stride, bottleneck))
                source = (width << level) * expansion
        self.head = nn.Linear(source, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


# ---- the subjects ----


@dataclass(frozen=True)
class GradientsModel:
    """A network by name. An emulated one is never computed: its layers are read off on meta tensors."""

    build: Callable[[], nn.Module]
    shape: Shape  # of the input
    emulated: bool
    like_resnet: bool
    classes: int = CLASSES


#: The longest last: it is what a run that is short of time leaves out.
SUBJECTS: Mapping[str, GradientsModel] = {
    "resnet24mb": GradientsModel(
        partial(BenchResNet, (3, 4, 6, 3), True, 30), (1, 3, 224, 224), emulated=True, like_resnet=True
    ),
    "unet3d": GradientsModel(partial(UNet3d, 26), (1, 1, 64, 64, 64), emulated=True, like_resnet=False),
    "resnet18": GradientsModel(
        partial(BenchResNet, (2, 2, 2, 2), False), (2, 3, 64, 64), emulated=False, like_resnet=True
    ),
    "resnet50": GradientsModel(
        partial(BenchResNet, (3, 4, 6, 3), True), (1, 3, 224, 224), emulated=True, like_resnet=True
    ),
}


def check_models(names: Sequence[str]) -> None:
    for name in names:
        if name not in SUBJECTS:
            raise HaloclineError(f"no model {name!r}; the models are {', '.join(SUBJECTS)}")
    if not names:
        raise HaloclineError(f"no model to measure; the models are {', '.join(SUBJECTS)}")


@cache
def layers_of(name: str) -> tuple[Layer, ...]:
    subject = SUBJECTS[name]
    with torch.device("meta"):
        return record_layers(subject.build(), torch.empty(subject.shape))


def bytes_of(name: str, dtype: torch.dtype = torch.float32) -> int:
    return sum(layer.elements for layer in layers_of(name)) * dtype.itemsize


def tensors_of(name: str) -> int:
    return sum(len(layer.shapes) for layer in layers_of(name))


# ---- what a layer is ----


@dataclass(frozen=True)
class Layer:
    """Parameters that come together, and the multiplications of one sample."""

    name: str
    shapes: tuple[Shape, ...]
    multiplications: int

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def record_layers(model: nn.Module, sample: Tensor) -> tuple[Layer, ...]:
    """In the order of forward. The network runs once, on meta tensors if it is there."""
    layers: list[Layer] = []

    def ran(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        shapes = tuple(tuple(parameter.shape) for parameter in module.parameters())
        if isinstance(module, NORMS):  # too short to sleep for: it shares the layer before it
            before = layers.pop()
            layers.append(Layer(before.name, before.shapes + shapes, before.multiplications))
        else:
            at = inputs[0] if isinstance(module, TRANSPOSED) else output  # the kernel is laid on each place of it
            layers.append(Layer(name, shapes, math.prod(shapes[0]) * math.prod(at.shape[2:])))

    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(partial(ran, name))
    model(sample)
    return tuple(layers)


# ---- emulation ----


def sleep_until(moment: float) -> None:
    """By ``time.perf_counter``."""
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


class Emulation(torch.autograd.Function):
    """A layer that takes its time. Gradients are fresh tensors, made within that time, as a real backward's are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: EmulatedLayer, *parameters: Tensor) -> Tensor:
        until = time.perf_counter() + layer.seconds * FORWARD
        ctx.layer = layer
        sleep_until(until)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        layer: EmulatedLayer = ctx.layer
        until = time.perf_counter() + layer.seconds * (1 - FORWARD)
        scale = gradient.sum().item() * layer.factor
        made = [
            torch.full(parameter.shape, scale / (1 + index), dtype=parameter.dtype)
            for index, parameter in enumerate(layer.weights)
        ]
        sleep_until(until)
        return gradient, None, *made


class EmulatedLayer(nn.Module):
    """``factor`` tells its gradients from those of other layers."""

    def __init__(self, layer: Layer, seconds: float, factor: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in layer.shapes)
        self.seconds, self.factor = seconds, factor

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            weight.detach()  # a real layer reads them, and waits for those that are still to be updated
        return Emulation.apply(x, self, *self.weights)


def emulated(layers: Sequence[Layer], seconds: float) -> nn.Sequential:
    """A network of these layers whose forward and backward take ``seconds``."""
    total = sum(layer.multiplications for layer in layers)
    return nn.Sequential(
        *(
            EmulatedLayer(layer, seconds * layer.multiplications / total, 1 / (1 + index))
            for index, layer in enumerate(layers)
        )
    )
