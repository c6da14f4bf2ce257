"""Stand before torch's own kernels: what is small goes through to them, what is too large goes to them in chunks.

The replacement lies below autograd, so a graph, its saved tensors, second derivatives, checkpoints and compiled code
are torch's own; and below autocast, so dtypes are settled. It holds for every tensor of the process, a rank's tiles
too. Once made it stays: torch's dispatcher may not be changed back while another thread is in it. A call that goes
through pays 10 us or so, which is why it is made only when something large is in sight.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from .._torch_private import no_torch_functions, run_eagerly

Kernel = Callable[..., Any]
_log = logging.getLogger("halocline")


class Replacement(NamedTuple):
    """``instead(original, *args)`` runs where ``when(*args)`` says so."""

    when: Callable[..., bool]
    instead: Kernel


_table: dict[str, Replacement] = {}
_installed: dict[str, torch.library.Library] = {}
_lock = threading.Lock()
_taken = 0


def kernel(name: str, when: Callable[..., bool]) -> Callable[[Kernel], Kernel]:
    """The function is to run in place of the ATen operator of this name, when its arguments are too large."""

    def enter(function: Kernel) -> Kernel:
        _table[name] = Replacement(when, function)
        return function

    return enter


def taken() -> int:
    """How many calls have gone another way so far."""
    return _taken


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


def installed(key: str) -> bool:
    """Are the kernels of this dispatch key replaced?"""
    return key in _installed


def install(key: str) -> None:
    """Replace kernels for tensors of this dispatch key ("CUDA", "CPU"), once and for good."""
    with _lock:
        if key not in _installed:
            _installed[key] = _replaced(key)
            _log.info(
                "torch's %s kernels for convolutions, pools, pads, resampling and norms are replaced in this process: "
                "operands too large for their fast paths go to them in chunks",
                key,
            )


def _replaced(key: str) -> torch.library.Library:
    """Register our kernels for this dispatch key; they live as long as the library object."""
    library = torch.library.Library("aten", "IMPL")
    calls = dict(_calls(key))
    with warnings.catch_warnings():  # torch says that a kernel is replaced: so it is
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name in calls:
            library.impl(name, _standing_before(name, calls), key, with_keyset=True, allow_override=True)
    return library


def _calls(key: str) -> Iterator[tuple[str, Kernel]]:
    """torch's own kernels by name, as they were before the replacement."""
    for name in _table:
        try:
            yield name, torch.library.get_kernel(f"aten::{name}", key).call_boxed
        except RuntimeError:  # there is none: cuDNN's, for the CPU
            continue


def _standing_before(name: str, calls: dict[str, Kernel]) -> Kernel:
    """The kernel that torch's dispatcher calls: it passes small work on to torch's own."""
    when, instead = _table[name]
    call = calls[name]

    def run(keys: Any, *args: Any) -> Any:
        # Nearly all calls: one comparison of sizes, then torch's own kernel.
        if not when(*args):
            return call(keys, *args)
        global _taken
        _taken += 1
        with no_torch_functions():  # what is done here is no part of the user's program
            return instead(Original(calls, keys, name), *args)

    run_eagerly(run)
    return run
