"""Switches chunking on: on a GPU when something large comes in sight, elsewhere only on request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch_private import TorchDispatchMode, constant_in_graphs, tracing, transforming
from ..errors import HaloclineError
from ..tree import tensors_in
from .replace import install, installed
from .sizes import LARGEST, NEVER, Sizes, forced, sizes

#: Elements of a tensor in forward from which on some operand of the step might be too large.
LARGE = LARGEST // 4
_MOST_KINDS = 256
_GPU = torch.device("cuda")


def keep_fast() -> None:
    """From now on, work on a GPU that is too large for torch's fast kernels goes to them in chunks."""
    if torch.backends.cuda.is_built():
        install("CUDA")


@contextmanager
def chunked(elements: int | None) -> Iterator[None]:
    """Inside, kernels get at most about ``elements`` elements at a time, on the CPU too; with None nothing is cut.

    Results and gradients are the same to rounding. For tests, measurements and cards with less memory: the sizes
    that suit the card are chosen automatically. It holds for the whole process, since backward has threads of its own.
    """
    if elements is not None and elements < 1:
        raise HaloclineError(f"hc.chunked({elements}): give a positive number of elements, or None")
    keep_fast()
    install("CPU")
    with forced(NEVER if elements is None else Sizes(elements, elements)):
        yield


class LargeTensorMode(TorchDispatchMode):
    """A dispatch mode that sees every tensor of a forward first, and installs the kernels before a large one."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        least = sizes(_GPU, "norm").whole if "_norm" in function.name() else LARGE
        if not installed("CUDA") and any(_matters(tensor, least) for tensor in tensors_in((args, kwargs))):
            keep_fast()
        result = function(*args, **(kwargs or {}))
        if not installed("CUDA") and any(_matters(tensor, LARGE) for tensor in tensors_in(result)):
            keep_fast()
        return result


def _matters(tensor: Tensor, least: int) -> bool:
    """Norms are slow long before anything else is, but not with channels last."""
    return tensor.is_cuda and tensor.numel() > least and (least == LARGE or tensor.is_contiguous())


@constant_in_graphs
def _while_compiling() -> None:
    """Runs while a model is compiled, outside the compiled graph, which cannot be watched: installs the kernels now."""
    keep_fast()


class SizeWatch:
    """Hooks round a model's forward: the first forward with inputs of a kind is looked through for something large.

    If there was nothing, later ones of that kind run on torch's kernels alone, at no cost. Once something was, this
    process's kernels are replaced, and there is nothing left to watch.
    """

    __name__ = "halocline.kernels.SizeWatch"  # torch asks hooks for it

    def __init__(self) -> None:
        self._small: set[Any] = set()
        self._open = threading.local()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A hook before forward."""
        if torch.compiler.is_compiling():
            _while_compiling()
            return
        kind = None
        if torch.backends.cuda.is_built() and not installed("CUDA") and tracing() is None:
            kind = self._kind(module, args, kwargs)
        mode = LargeTensorMode() if kind is not None and kind not in self._small else None
        if mode is not None:
            mode.__enter__()
        # A stack, since a model may be part of another one that is watched too.
        self._stack().append((mode, kind))

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A hook after forward, also where it failed."""
        if torch.compiler.is_compiling():
            return
        stack = self._stack()
        if not stack:
            return
        mode, kind = stack.pop()
        if mode is None:
            return
        mode.__exit__(None, None, None)
        if output is not None and not installed("CUDA"):  # a forward that failed has not shown everything
            if len(self._small) >= _MOST_KINDS:
                self._small.clear()
            self._small.add(kind)

    def _stack(self) -> list[Any]:
        stack: list[Any] = self._open.__dict__.setdefault("stack", [])
        return stack

    def _kind(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """None where it cannot be told: then kernels are replaced, to be safe."""
        if not transforming():
            try:
                values = (*args, *kwargs.values())
                shapes = tuple([value.shape if type(value) is Tensor else self._outline(value) for value in values])
                kind = (shapes, module.training, torch.is_grad_enabled())
                hash(kind)
                return kind
            except (TypeError, RuntimeError):  # symbolic or nested shapes
                pass
        keep_fast()
        return None

    def _outline(self, value: Any) -> Any:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors_in(value))
        return shapes or repr(value)

    def __deepcopy__(self, memo: object) -> SizeWatch:
        return SizeWatch()

    def __reduce__(self) -> tuple[Any, ...]:
        return SizeWatch, ()
