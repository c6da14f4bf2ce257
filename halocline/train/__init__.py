"""Training runs: settings, steps, checkpoints, predictions.

    settings = hc.train.load_settings(Path("run.toml"), ["optimizer.lr=1e-3"])
    result = hc.train.Trainer(settings, Path("runs/a")).train()    # on every rank

The parts serve loops of your own too: ``training_step``, ``Checkpoints``, ``export_weights``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # found on first use at run time: a command that reads settings needs no network
    from .checkpoints import Checkpoints as Checkpoints
    from .config import load_settings as load_settings
    from .config import make_settings as make_settings
    from .config import read_settings as read_settings
    from .export import export_weights as export_weights
    from .export import import_weights as import_weights
    from .optimizers import LARC as LARC
    from .optimizers import place_optimizer_state as place_optimizer_state
    from .precision import Precision as Precision
    from .predict import Predictor as Predictor
    from .reporting import write_report as write_report
    from .result import Result as Result
    from .settings import ConfigError as ConfigError
    from .settings import Settings as Settings
    from .step import training_step as training_step
    from .trainer import Trainer as Trainer

#: The module of each public name.
_HOMES = {
    "Checkpoints": "checkpoints",
    "ConfigError": "settings",
    "LARC": "optimizers",
    "Precision": "precision",
    "Predictor": "predict",
    "Result": "result",
    "Settings": "settings",
    "Trainer": "trainer",
    "export_weights": "export",
    "import_weights": "export",
    "load_settings": "config",
    "make_settings": "config",
    "place_optimizer_state": "optimizers",
    "read_settings": "config",
    "training_step": "step",
    "write_report": "reporting",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            return getattr(import_module(f".{_HOMES[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if error.name not in ("pydantic", "annotated_types"):
                raise
            raise ImportError(f"hc.train.{name} needs pydantic: pip install 'halocline[train]'") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
