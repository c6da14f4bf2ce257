"""Trackers as callbacks of a run: rank 0 sends settings, losses and metrics to them.

    callbacks = ["halocline.integrations:WandB", "halocline.integrations:MLflow"]

Projects, names and addresses come from the trackers' own environment variables. Nothing is sent over a network unless
they say so: W&B runs offline by default, and MLflow writes into a local database.
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..train.result import Result
    from ..train.trainer import Trainer


def _package(name: str, extra: str) -> Any:
    """Import a tracker. Raises ConfigError, which says how to install it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"callbacks: this tracker needs {error.name}; pip install 'halocline[{extra}]'") from error


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted names, without those that are empty."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            flat[f"{prefix}{name}"] = value
    return flat


class WandB:
    """Weights & Biases, offline unless ``WANDB_MODE`` says otherwise; files go to ``RUN/wandb``.

    ``WANDB_PROJECT``, ``WANDB_NAME`` and ``WANDB_ENTITY`` have their usual meaning. A resumed run keeps its id, which
    stands in ``RUN/wandb-id``. Send an offline run later with ``wandb sync``.
    """

    def __init__(self) -> None:
        self._package = _package("wandb", "wandb")
        self._run: Any = None

    def on_start(self, trainer: Trainer) -> None:
        """Begin, or go on with, the run of this folder."""
        if trainer.mesh.rank != 0:
            return
        kept = Path(trainer.folder) / "wandb-id"
        if not kept.exists():
            kept.write_text(uuid4().hex[:12])
        self._run = self._package.init(
            id=kept.read_text().strip(),
            resume="allow",
            dir=str(trainer.folder),
            project=os.environ.get("WANDB_PROJECT", "halocline"),
            name=os.environ.get("WANDB_NAME", Path(trainer.folder).name),
            mode=os.environ.get("WANDB_MODE", "offline"),
            config=_flat(trainer.settings.as_dict()),
        )

    def on_step(self, trainer: Trainer, step: int, loss: float) -> None:
        """Log loss and learning rate."""
        if self._run is not None:
            self._run.log({"loss": loss, "lr": trainer.optimizer.param_groups[0]["lr"]}, step=step)

    def on_validation(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Log metrics."""
        if self._run is not None:
            self._run.log({f"validation/{name}": value for name, value in metrics.items()}, step=trainer.step)

    def on_end(self, trainer: Trainer, result: Result) -> None:
        """End the run."""
        if self._run is not None:
            self._run.finish()


class MLflow:
    """MLflow, with a local database, ``./mlflow.db``, unless ``MLFLOW_TRACKING_URI`` names another.

    ``MLFLOW_EXPERIMENT_NAME`` and ``MLFLOW_RUN_NAME`` have their usual meaning. A resumed run keeps its id, which
    stands in ``RUN/mlflow-id.json``. ``mlflow ui`` of the full package shows it.
    """

    def __init__(self) -> None:
        self._package = _package("mlflow", "mlflow")
        self._client: Any = None
        self._id = ""

    def on_start(self, trainer: Trainer) -> None:
        """Begin, or go on with, the run of this folder."""
        if trainer.mesh.rank != 0:
            return
        uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{Path('mlflow.db').absolute()}")
        self._client = self._package.MlflowClient(tracking_uri=uri)
        kept = Path(trainer.folder) / "mlflow-id.json"
        if kept.exists():
            self._id = json.loads(kept.read_text())["run"]
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "halocline")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        title = os.environ.get("MLFLOW_RUN_NAME", Path(trainer.folder).name)
        self._id = self._client.create_run(experiment, run_name=title).info.run_id
        kept.write_text(json.dumps({"run": self._id, "experiment": experiment}))
        for key, value in _flat(trainer.settings.as_dict()).items():
            self._client.log_param(self._id, key, str(value)[:500])

    def on_step(self, trainer: Trainer, step: int, loss: float) -> None:
        """Log loss and learning rate."""
        if self._client is not None:
            self._log({"loss": loss, "lr": trainer.optimizer.param_groups[0]["lr"]}, step)

    def on_validation(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Log metrics."""
        if self._client is not None:
            self._log({f"validation/{name}": value for name, value in metrics.items()}, trainer.step)

    def on_end(self, trainer: Trainer, result: Result) -> None:
        """End the run, as finished or as stopped."""
        if self._client is not None:
            self._client.set_terminated(self._id, "KILLED" if result.stopped else "FINISHED")

    def _log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)
