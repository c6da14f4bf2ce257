"""How much work a training step is, counted on meta tensors: nothing is computed, and no device is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from halocline.program.work import FORMULAS
from halocline.tree import tensors_in

from .gpu_networks import SUBJECTS, Data, GpuNetwork

LIMIT = 2**31  # elements of one tensor: from here on cuDNN's fast ways are gone
HALF, FULL = 2, 4  # bytes of an element

aten = torch.ops.aten


@dataclass(frozen=True)
class StepCounts:
    """Of a training step of one network at one size.

    ``flops``: twice the multiplications of every convolution and matrix product, forward, input gradient and weight
    gradient, as autograd asks for them (so the first layer has no input gradient). ``elements``: what these products
    read and write if each reads its operands once and writes its result once. ``largest``: elements of the forward's
    largest tensor. ``kept``: bytes kept from forward to backward if all activations are in bf16.
    """

    flops: float
    elements: int
    largest: int
    kept: int

    def floors(self, ceilings: Mapping[str, float], full: bool = False) -> dict[str, float]:
        """Milliseconds that no program goes below where all but the products is free; ``full``: float32 and TF32."""
        rate = ceilings["tf32_tflops" if full else "bf16_tflops"]
        return {
            "flops_ms": self.flops / (rate * 1e12) * 1e3,
            "bytes_ms": self.elements * (FULL if full else HALF) / (ceilings["copy_tb_s"] * 1e12) * 1e3,
        }


class _Tally(TorchDispatchMode):
    """Adds up what comes past, forward and backward alike; the largest tensor is the forward's."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.elements, self.largest, self.forward = 0.0, 0, 0, True

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        formula = FORMULAS.get(function)
        if formula is not None:
            self.flops += formula(args, output)
            self.elements += operand_elements(function, args, output)
        if self.forward:
            self.largest = max([self.largest, *(tensor.numel() for tensor in tensors_in(output))])
        return output


def operand_elements(function: Any, args: tuple[Any, ...], output: Any) -> int:
    """Read and written once each; a convolution's backward is two products, each of which reads the gradient."""
    if function is aten.convolution_backward.default:
        gradient, volume, weight, *_, wanted = args
        return (bool(wanted[0]) + bool(wanted[1])) * sum(t.numel() for t in (gradient, volume, weight))
    return sum(tensor.numel() for tensor in (*tensors_in(args), output))


class _Kept:
    """Tensors that autograd saves: each storage once, parameters not at all."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {tensor.untyped_storage()._cdata for tensor in model.parameters()}
        self._tensors: dict[int, Tensor] = {}  # held, so that no storage's number is given twice

    def pack(self, tensor: Tensor) -> Tensor:
        number = tensor.untyped_storage()._cdata
        if number not in self._parameters:
            self._tensors[number] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        return sum(stored_bytes(tensor) for tensor in self._tensors.values())


def stored_bytes(tensor: Tensor) -> int:
    size = tensor.element_size()
    return tensor.untyped_storage().nbytes() // size * (HALF if tensor.is_floating_point() else size)


def count(subject: GpuNetwork, size: int) -> StepCounts:
    """Built on the CPU, for some networks compute while they are built, and run on meta tensors."""
    model = subject.model(size).to("meta")
    target = subject.target(size, torch.Generator()).to("meta") if subject.target else None
    volume = torch.empty(subject.shape(size), device="meta")
    return count_step(model, Data(volume, target), subject.loss)


def count_step(model: nn.Module, data: Data, loss: Callable[[Any, Data], Tensor]) -> StepCounts:
    kept = _Kept(model)
    with _Tally() as tally:
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            value = loss(model(data.volume), data)
        tally.forward = False
        value.backward(None if value.dim() == 0 else value.detach())
    return StepCounts(tally.flops, tally.elements, max(tally.largest, data.volume.numel()), kept.bytes)


def count_all(pairs: list[tuple[str, int]]) -> list[dict[str, Any] | None]:
    """None where a network cannot be run on meta tensors, or is not there: the figures are then left out."""
    return [_count_one(SUBJECTS[name], size) for name, size in pairs]


def _count_one(subject: GpuNetwork, size: int) -> dict[str, Any] | None:
    try:
        return asdict(count(subject, size))
    except (RuntimeError, ImportError, NotImplementedError):
        return None
