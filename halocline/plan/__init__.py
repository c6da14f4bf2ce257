"""Which cut, will it fit, and how long will a step take: ``hc.plan(...)``.

The room carries the name of its function, so the module itself can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableRoom(ModuleType):
    """The room ``halocline.plan`` is also the function ``hc.plan``, which a plain module cannot be."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :func:`halocline.plan.api.plan`."""
        from .api import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableRoom
