"""Finds the module that is running, from the call stack. It costs nothing until it is asked."""

from __future__ import annotations

from torch import nn

from .._torch_private import running_modules

_PATH = "_halocline_path"


def watch(model: nn.Module) -> None:
    """Let every module of ``model`` know its path."""
    for name, module in model.named_modules():
        # Not by setattr: a module must not take the path for state.
        module.__dict__.setdefault(_PATH, name or type(model).__name__)


def here() -> str:
    """The path of the innermost watched module now running."""
    for module in running_modules():
        path: str | None = module.__dict__.get(_PATH)
        if path is not None:
            return path
    return "code outside the model"


def current_module() -> nn.Module | None:
    """That module itself."""
    return next((module for module in running_modules() if _PATH in module.__dict__), None)
