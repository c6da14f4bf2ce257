"""Old names of a module, kept for one release."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from warnings import warn


def renamed(module: str, names: dict[str, Any]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that gives the new class for each old name, with a DeprecationWarning."""

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn(f"{module}.{name} is now {module}.{names[name].__name__}", DeprecationWarning, stacklevel=2)
        return names[name]

    return __getattr__
