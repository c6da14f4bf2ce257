"""Where in the model are we? Kept by hooks on the user's modules, so that errors can name the place."""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

_stack = threading.local()


def _entries() -> list[tuple[str, nn.Module]]:
    if not hasattr(_stack, "entries"):
        _stack.entries = []
    return _stack.entries


def here() -> str:
    """The path of the innermost module now running."""
    entries = _entries()
    return entries[-1][0] if entries else "code outside the model"


def current_module() -> nn.Module | None:
    entries = _entries()
    return entries[-1][1] if entries else None


class _Enter:
    """Notes that a module begins. A class, so that a watched model can be pickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self, module: nn.Module, args: Any) -> None:
        _entries().append((self.path, module))


def _leave(module: nn.Module, args: Any, output: Any) -> None:
    _entries().pop()


def watch(model: nn.Module) -> None:
    """Keep track of the running module of ``model``; a second call on the same model does nothing."""
    for name, module in model.named_modules():
        if getattr(module, "_halocline_watched", False):
            continue
        module._halocline_watched = True
        module.register_forward_pre_hook(_Enter(name or type(model).__name__), prepend=True)
        module.register_forward_hook(_leave, always_call=True)
