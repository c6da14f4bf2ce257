"""A recorded forward as data: values, and the operations that make them, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...geometry import Box, whole
from ...random.functions import KERNELS
from ...rules import Recipe
from ...tree import map_leaves


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor among recorded arguments: the number of its value."""

    value: int


def fill(value: Any, tensor_of: Callable[[Ref], Any]) -> Any:
    """The same structure with tensors in the places of references."""
    return map_leaves(Ref, tensor_of, value)


Fill = Callable[[Mapping[int, Any]], Any]


def filler(value: Any) -> Fill | None:
    """A function that puts tensors, by the numbers of their values, in the places of references; None without any.

    For arguments that are filled often: the structure is walked once, and what holds no reference is not copied.
    """
    if isinstance(value, Ref):
        number = value.value
        return lambda tensors: tensors[number]
    if isinstance(value, dict):
        return _filler_of(value.values(), lambda items: type(value)(zip(value, items, strict=True)))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _filler_of(value, lambda items: type(value)(*items))
    if isinstance(value, (tuple, list)):
        return _filler_of(value, type(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in dataclasses.fields(value) if each.init]
        items = [getattr(value, name) for name in names]
        return _filler_of(items, lambda items: dataclasses.replace(value, **dict(zip(names, items, strict=True))))
    return None


def _filler_of(parts: Iterable[Any], rebuilt: Callable[[list[Any]], Any]) -> Fill | None:
    pairs = [(part, filler(part)) for part in parts]
    if not any(fill for _, fill in pairs):
        return None
    return lambda tensors: rebuilt([part if fill is None else fill(tensors) for part, fill in pairs])


@dataclass
class Value:
    """A tensor of the program: a result, an input of the model, or ``outside`` of it (weights, buffers, constants)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tiled: tuple[int, ...]  # dims that may be computed in parts
    outside: Tensor | None = None
    requires_grad: bool = False

    @property
    def bytes(self) -> int:
        """Of the whole tensor, in the recorded dtype."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def box(self) -> Box:
        """All of it."""
        return tuple(whole(size) for size in self.shape)


@dataclass
class Operation:
    """One call. With a recipe it can be computed box by box; without one it runs whole, as it was called."""

    name: str
    place: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    recipe: Recipe | None = None
    #: Autograd is on here; inside ``torch.no_grad`` of the model's own it is not.
    differentiable: bool = True
    #: Seed and number of the call in the library's generator, of operations that draw.
    drawn: tuple[int, int] | None = None
    #: The autocast that was on: device type and dtype.
    autocast: tuple[str, torch.dtype] | None = None
    #: The first operand is written to. Only of operations that run whole: recipes say it themselves.
    inplace: bool = False
    #: The state of torch's generator, for draws of torch's own in whole work. Set by the first run.
    moment: list[Tensor] = field(default_factory=list)

    @property
    def draws(self) -> bool:
        """Does it draw from torch's own generator?"""
        return self.recipe is None and self.drawn is None and self.function in KERNELS

    @property
    def reduces(self) -> bool:
        """Is it a norm, whose statistics run over tiles?"""
        return self.recipe is not None and self.recipe.reduces is not None


@dataclass
class Trace:
    """The operations of one forward, in order. ``answer`` is what the model returned, with references for tensors."""

    values: list[Value]
    operations: list[Operation]
    inputs: list[int]
    outputs: list[int]
    answer: Any
    draws: int
    device: torch.device

    def key(self) -> tuple[Any, ...]:
        """Equal for traces that can share a plan of segments and tiles."""
        return (
            tuple((v.shape, v.dtype, v.tiled, v.requires_grad) for v in self.values),
            tuple((o.name, o.place, o.operands, o.results, o.reduces) for o in self.operations),
        )
