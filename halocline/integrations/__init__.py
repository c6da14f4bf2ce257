"""Other tools: trackers that a run reports to, networks of MONAI bundles, and PyTorch Lightning, which runs it.

Each needs its own package, which is imported when it is used: the extras ``wandb``, ``mlflow``, ``zoo-monai``,
``lightning``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # found on first use at run time: each needs another package
    from .lightning import HaloclineStrategy as HaloclineStrategy
    from .monai import monai_bundle as monai_bundle
    from .trackers import MLflow as MLflow
    from .trackers import WandB as WandB

_HOMES = {"HaloclineStrategy": "lightning", "MLflow": "trackers", "WandB": "trackers", "monai_bundle": "monai"}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
