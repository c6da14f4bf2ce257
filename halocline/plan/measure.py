"""Times of a network's own operations at its own local shapes, measured on the device at hand.

A step is run on meta tensors; every operation that differs in name, dtype, shapes or work is then run on real tensors
of these shapes. Needs torch and numpy alone.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from .._torch_private import TorchDispatchMode
from ..program.record import computed, is_free
from ..rules import planning
from ..world import this_world
from .cost import Key, key_of

LEAST = 0.02  # seconds that an operation is timed for, at least
REPEATS = 5


class Catalogue(TorchDispatchMode):
    """Collects one call of every kind of operation that runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self._world = this_world()
        self.calls: dict[Key, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not planning() and not is_free(function):
            key = key_of(computed(self._world, function, args, result))
            self.calls.setdefault(key, (function, args, dict(kwargs or {})))
        return result


def measure(calls: dict[Key, Any], known: dict[Key, float], device: torch.device) -> None:
    """Add to ``known`` the seconds of each call that it lacks: the median of a few timings."""
    for key, (function, args, kwargs) in calls.items():
        if key not in known:
            known[key] = time_call(function, args, kwargs, device)


def time_call(function: Any, args: Any, kwargs: Any, device: torch.device) -> float:
    real_args, real_kwargs = materialized(args, device), materialized(kwargs, device)
    with torch.no_grad():
        function(*real_args, **real_kwargs)
        once = _timed(function, real_args, real_kwargs, device, 1)
        repeat = max(1, int(LEAST / max(once, 1e-7) / REPEATS))
        return statistics.median(_timed(function, real_args, real_kwargs, device, repeat) for _ in range(REPEATS))


def _timed(function: Any, args: Any, kwargs: Any, device: torch.device, repeat: int) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(repeat):
        function(*args, **kwargs)
    _synchronize(device)
    return (time.perf_counter() - start) / repeat


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def materialized(value: Any, device: torch.device) -> Any:
    """The same arguments with real tensors in the places of those without values."""
    if isinstance(value, Tensor):
        return _real(value, device)
    if isinstance(value, torch.device):
        return device
    if isinstance(value, tuple | list):
        return type(value)(materialized(item, device) for item in value)
    if isinstance(value, dict):
        return {name: materialized(item, device) for name, item in value.items()}
    return value


def _real(tensor: Tensor, device: torch.device) -> Tensor:
    """Of the same shape, dtype and strides. Integers are zeros, so that they are legal indices."""
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.zeros(extent, dtype=tensor.dtype, device=device)
    if memory.is_floating_point():
        memory.uniform_(0.1, 1.0)
    return memory.as_strided(tensor.shape, tensor.stride())
