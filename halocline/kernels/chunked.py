"""Switch it on: on a GPU while a model's inputs are large, on anything else while asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import run_eagerly
from ..errors import HaloclineError
from .replace import hold, release, taken
from .sizes import NEVER, Sizes, forced

_MOST_KINDS = 256


class _Asker:
    """Somebody who wants kernels replaced."""


@contextmanager
def chunked(elements: int | None) -> Iterator[None]:
    """Inside, kernels get at most about ``elements`` elements at a time, on the CPU too; with None nothing is cut.

    Results and gradients are the same to rounding. For tests, measurements and cards with less memory: the sizes
    that suit the card are found by themselves. It holds for the whole process, since backward has threads of its own.
    """
    if elements is not None and elements < 1:
        raise HaloclineError(f"hc.chunked({elements}): give a positive number of elements, or None")
    asker = _Asker()
    for key in _keys():
        hold(key, asker)
    try:
        with forced(NEVER if elements is None else Sizes(elements, elements)):
            yield
    finally:
        for key in _keys():
            release(key, asker)


def _keys() -> tuple[str, ...]:
    return ("CPU", "CUDA") if torch.backends.cuda.is_built() else ("CPU",)


class WhileLarge:
    """A hook before a model's forward: replaces the GPU's kernels while the inputs are such that it matters.

    The first step with inputs of a kind is watched, from one forward to the next. If nothing in it was too large,
    later steps of that kind run on torch's kernels alone, at no cost.
    """

    def __init__(self, tensors_in: Callable[[Any], list[Tensor]]) -> None:
        self._tensors_in = tensors_in
        self._known: dict[Any, bool] = {}
        self._watched: Any = None
        self._before = 0

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._watched is not None:
            self._known[self._watched] = taken() > self._before
            self._watched = None
        kind = self._kind(module, args, kwargs)
        large = self._known.get(kind)
        if large is None:
            self._watch(kind)
        if torch.backends.cuda.is_built():
            (release if large is False else hold)("CUDA", self)

    def _watch(self, kind: Any) -> None:
        if len(self._known) >= _MOST_KINDS:
            self._known.clear()
        self._watched, self._before = kind, taken()

    def _kind(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        shapes = [(tensor.shape, tensor.dtype) for tensor in self._tensors_in((args, kwargs))]
        return (*shapes, module.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cuda"))

    def __deepcopy__(self, memo: object) -> WhileLarge:
        return WhileLarge(self._tensors_in)

    def __reduce__(self) -> tuple[Any, ...]:
        return WhileLarge, (self._tensors_in,)


run_eagerly(WhileLarge.__call__)
