"""Replacing functions for as long as a script runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any


class Patches(ExitStack):
    """Attributes that are replaced until the context ends."""

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Set ``owner.name`` to ``make(what it was)``, and back again at the end."""
        before = getattr(owner, name)
        setattr(owner, name, make(before))
        self.callback(setattr, owner, name, before)
