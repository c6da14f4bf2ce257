"""Which cut, will it fit, and how long will a step take: ``hc.plan(...)``, ``hc.plan.load(file)``.

The room carries the name of its function, so the module itself can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableRoom(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :func:`halocline.plan.api.make_plan`."""
        from .api import make_plan

        return make_plan(*args, **kwargs)

    @staticmethod
    def load(*args: Any, **kwargs: Any) -> Any:
        """See :func:`halocline.plan.api.load`."""
        from .api import load

        return load(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableRoom
