"""Stand before torch's own kernels: what is small goes through to them, what is too large goes to them in chunks.

The replacement lies below autograd, so a graph, its saved tensors, second derivatives, checkpoints and compiled code
are torch's own; and below autocast, so dtypes are settled. It holds for every tensor of the process, a rank's tiles
too.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._torch_private import no_torch_functions

Kernel = Callable[..., Any]

_table: dict[str, Kernel] = {}
_installed: dict[str, torch.library.Library] = {}
_lock = threading.Lock()


class Original:
    """torch's own kernel, as the call under way would have met it."""

    __slots__ = ("_calls", "_keys", "_name")

    def __init__(self, calls: dict[str, Kernel], keys: Any, name: str) -> None:
        self._calls, self._keys, self._name = calls, keys, name

    def __call__(self, *args: Any) -> Any:
        return self._calls[self._name](self._keys, *args)

    def of(self, name: str) -> Original:
        """That of another operator, for the same kind of tensors."""
        return Original(self._calls, self._keys, name)


def kernel(name: str) -> Callable[[Kernel], Kernel]:
    """``function(original, *args)`` is to stand before the ATen operator of this name."""

    def enter(function: Kernel) -> Kernel:
        _table[name] = function
        return function

    return enter


def install(key: str) -> None:
    """For tensors of this dispatch key ("CUDA", "CPU"), once and for good: it costs some 10 us a call."""
    with _lock:
        if key in _installed:
            return
        library = torch.library.Library("aten", "IMPL")
        calls = dict(_calls(key))
        with warnings.catch_warnings():  # torch says that a kernel is replaced: so it is
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for name in calls:
                library.impl(
                    name, _standing_before(name, _table[name], calls), key, with_keyset=True, allow_override=True
                )
        _installed[key] = library


def _calls(key: str) -> Iterator[tuple[str, Kernel]]:
    for name in _table:
        try:
            yield name, torch.library.get_kernel(f"aten::{name}", key).call_boxed
        except RuntimeError:  # there is none: cuDNN's, for the CPU
            continue


def _standing_before(name: str, function: Kernel, calls: dict[str, Kernel]) -> Kernel:
    def run(keys: Any, *args: Any) -> Any:
        with no_torch_functions():  # what is done here is no part of the user's program
            return function(Original(calls, keys, name), *args)

    return run
