"""What a sweep tries: a target, the settings that vary, and how trials share the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...errors import ConfigError, did_you_mean
from ..config import make_settings, read_toml
from ..settings import Settings
from ..task import defaults_of

MODES = ("experiment", "data", "auto")


@dataclass(frozen=True)
class SweepSpec:
    """A sweep, as its TOML file describes it.

    ``mode``: "experiment" runs as many trials at once as there are ranks, each on one; "data" one after another, each
    on all ranks; "auto" the mix of both that is over first, by the planner's prices on ``machine``.
    """

    target: str  # a workload, or the TOML file of a run
    space: dict[str, dict[str, Any]]  # by setting: {low, high, log} or {choices}
    trials: int = 8
    ranks: int = 2
    mode: str = "experiment"
    metric: str = "loss"  # of the last validation
    direction: str = "minimize"
    sampler: str = "tpe"  # or "random"
    pruner: str = "none"  # or "median": ends trials whose validations are worse than the median of the others'
    seed: int = 0
    restarts: int = 1  # of a trial whose process was killed, from its last checkpoint
    machine: str | None = None  # for mode "auto": its name or file; default: what `halocline calibrate` wrote
    backend: str = "processes"  # of this machine; or "ray": on all machines of a Ray cluster
    settings: list[str] = field(default_factory=list)  # changes for all trials, such as "steps=200"

    def settings_of(self, values: dict[str, Any]) -> Settings:
        """The settings of a trial with these values. Raises ConfigError."""
        changes = [*self.settings, *(f"{key}={_written(value)}" for key, value in values.items())]
        path = Path(self.target)
        if path.suffix == ".toml":
            told = read_toml(path)
            defaults = defaults_of(told["workload"], told.get("scale", "small")) if "workload" in told else {}
            return make_settings(told, changes, defaults, self.target)
        return make_settings({"workload": self.target}, changes, defaults_of(self.target), "the sweep")

    def suggested(self, trial: Any) -> dict[str, Any]:
        """The values that an Optuna trial is to try."""
        return {key: _suggest(trial, key, told) for key, told in self.space.items()}


def _written(value: Any) -> str:
    """A value as ``--set`` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else repr(value)


def _suggest(trial: Any, key: str, told: dict[str, Any]) -> Any:
    if "choices" in told:
        return trial.suggest_categorical(key, told["choices"])
    low, high, log = told["low"], told["high"], bool(told.get("log", False))
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(key, low, high, log=log)
    return trial.suggest_float(key, low, high, log=log)


def read_spec(path: Path) -> SweepSpec:
    """A sweep from its file. Raises ConfigError."""
    told = read_toml(path)
    known = {each.name for each in fields(SweepSpec)}
    unknown = [key for key in told if key not in known]
    if unknown:
        near = did_you_mean(unknown[0], known)
        raise ConfigError(f"{path}: {unknown[0]} is no setting of a sweep{near}; there are {', '.join(sorted(known))}")
    if "target" not in told or not told.get("space"):
        raise ConfigError(f"{path}: give target = a workload or a TOML file, and [space] with the settings that vary")
    spec = SweepSpec(**told)
    if Path(spec.target).suffix == ".toml":  # seen from the sweep's own file
        spec = SweepSpec(**{**told, "target": str((path.parent / spec.target).resolve())})
    _check(spec, path)
    return spec


def _check(spec: SweepSpec, path: Path) -> None:
    choices = {
        "mode": (spec.mode, MODES),
        "direction": (spec.direction, ("minimize", "maximize")),
        "sampler": (spec.sampler, ("tpe", "random")),
        "pruner": (spec.pruner, ("none", "median")),
        "backend": (spec.backend, ("processes", "ray")),
    }
    for key, (value, allowed) in choices.items():
        if value not in allowed:
            raise ConfigError(f"{path}: {key} = {value!r}: choose {', '.join(allowed)}")
    for key, told in spec.space.items():
        if not isinstance(told, dict) or ("choices" in told) == ("low" in told and "high" in told):
            raise ConfigError(
                f"{path}: space.{key}: give {{low = .., high = ..}}, also log = true, or {{choices = [..]}}"
            )
    if spec.trials < 1 or spec.ranks < 1:
        raise ConfigError(f"{path}: trials and ranks are at least 1")
    spec.settings_of(
        {key: (told["choices"][0] if "choices" in told else told["low"]) for key, told in spec.space.items()}
    )
