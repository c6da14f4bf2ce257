"""What a run is told: a few groups of settings, each with a default. Plain data, which a program can make too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal

from ..errors import HaloclineError

Precision = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]
OptimizerName = Literal["adam", "adamw", "sgd", "larc"]
ScheduleName = Literal["constant", "linear", "cosine"]
Policy = Literal["raise", "warn"]

#: Letters of the data's dims, and the axes of the mesh that they are cut along.
AXES = {"N": "data", "C": "channels", "T": "time", "D": "depth", "H": "height", "W": "width"}


class ConfigError(HaloclineError, ValueError):
    """A setting that is unknown, of another type, or out of range. Names the key, the value and what is allowed."""


@dataclass(frozen=True)
class FieldSettings:
    """Where a field lies in the data's file: a dataset or array, and its dims by letter, as they lie."""

    dataset: str | None = None
    dims: str | None = None
    path: str | None = None  # another file than the others'
    fill: float = 0
    normalize: Literal["none", "standard", "minmax"] = "none"


@dataclass(frozen=True)
class DataSettings:
    """``path`` for data of your own; without it a workload makes its own, by ``arguments``."""

    path: str | None = None
    x: FieldSettings = FieldSettings()
    y: FieldSettings = FieldSettings()
    samples: int = 64  # that a workload makes for training
    validation: int = 16  # samples for validation: made, or the last of the file
    seed: int = 0
    memory: str = "0"  # of the in-memory store, a rank: 8 GiB
    readers: int = 1
    prefetch: int = 2
    flip: str = ""  # letters
    rotate: str = ""  # two letters of a plane
    shift: dict[str, int] = field(default_factory=dict)
    wrap: bool = False  # of shifts: periodic
    crop: dict[str, int] = field(default_factory=dict)
    on_bad_sample: Literal["raise", "skip"] = "raise"
    arguments: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        at_least("data.samples", self.samples, 1)
        at_least("data.validation", self.validation, 0)
        at_least("data.readers", self.readers, 1)
        at_least("data.prefetch", self.prefetch, 1)


@dataclass(frozen=True)
class OptimizerSettings:
    name: OptimizerName = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.9  # of sgd
    betas: tuple[float, float] = (0.9, 0.999)
    trust: float = 0.002  # larc: how much of a weight's norm a step may be
    mode: Literal["clip", "scale"] = "clip"  # larc

    def check(self) -> None:
        above("optimizer.lr", self.lr, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        at_least("optimizer.momentum", self.momentum, 0)
        above("optimizer.trust", self.trust, 0)
        for beta in self.betas:
            if not 0 <= beta < 1:
                raise ConfigError(f"optimizer.betas = {list(self.betas)}: each is 0 or more, and less than 1")


@dataclass(frozen=True)
class ScheduleSettings:
    """The learning rate rises over ``warmup`` steps, then falls towards ``final`` of itself, where the run ends."""

    name: ScheduleName = "constant"
    warmup: int = 0
    final: float = 0.0

    def check(self) -> None:
        at_least("schedule.warmup", self.warmup, 0)
        at_least("schedule.final", self.final, 0)


@dataclass(frozen=True)
class GradientSettings:
    """How gradients are averaged over the ranks."""

    overlap: Literal["backward", "next-forward"] = "backward"  # how far sums may go on; the result is the same
    lag: Literal[0, 1] = 0  # 1: applied one step late, which is another algorithm
    wire: Literal["same", "fp32", "bf16", "fp16"] = "same"  # rounded on the way
    rings: str = "usual"  # how a sum travels: usual, flat, auto, levels

    def check(self) -> None:
        if self.lag and self.overlap == "next-forward":
            raise ConfigError("gradients.lag = 1 hides all sums already; leave gradients.overlap = 'backward'")
        if self.overlap == "next-forward" and self.wire == "fp16":
            raise ConfigError("gradients.wire = 'fp16' goes with overlap = 'backward'; with next-forward use 'bf16'")
        if self.rings not in ("usual", "flat", "auto", "levels", "doubling") and not self.rings.startswith("leaders:"):
            raise ConfigError(f"gradients.rings = {self.rings!r}: usual, flat, auto, levels, doubling or leaders:K")

    def arguments(self, optimizer: Any) -> dict[str, Any]:
        """Of hc.distribute."""
        ahead = {"overlap": self.overlap, "optimizer": optimizer} if self.overlap == "next-forward" else {}
        return {"lag": self.lag, "wire": None if self.wire == "same" else self.wire, "rings": self.rings, **ahead}


@dataclass(frozen=True)
class GuardSettings:
    """What is watched while training goes on."""

    nan: Policy = "raise"  # a loss that is NaN or infinite
    drift: Policy = "raise"  # ranks whose weights are no longer the same
    drift_every: int = 50  # steps; 0: never
    slow: float = 5.0  # times the median of the others: a rank that is named

    def check(self) -> None:
        at_least("guard.drift_every", self.drift_every, 0)
        above("guard.slow", self.slow, 1)


@dataclass(frozen=True)
class Settings:
    """One run. ``workload``, or ``model`` and ``loss`` of your own as ``package.module:name``."""

    workload: str | None = None
    model: str | None = None
    loss: str | None = None
    scale: Literal["small", "full"] = "small"
    network: dict[str, Any] = field(default_factory=dict)  # arguments of the model's factory
    data: DataSettings = DataSettings()
    mesh: dict[str, int] = field(default_factory=dict)  # parts by letter, such as {N = 2, D = 2}
    steps: int = 100
    batch: int = 1
    accumulate: int = 1
    precision: Precision = "fp32"
    clip: float | None = None  # of the gradients' global norm
    seed: int = 0
    multiple: int = 1  # cuts lie on multiples of the network's total stride
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    gradients: GradientSettings = GradientSettings()
    guard: GuardSettings = GuardSettings()
    validate_every: int = 0  # steps; 0: at the end
    log_every: int = 1
    checkpoint_every: int = 50
    keep: int = 3  # checkpoints
    trace: bool = False  # a few steps, for Perfetto
    deadline: float = 600.0  # seconds that a rank waits for another

    def check(self) -> Settings:
        if (self.workload is None) == (self.model is None):
            raise ConfigError("give workload = one of the known ones, or model = 'package.module:factory'; not both")
        if self.model is not None and (self.loss is None or self.data.path is None):
            raise ConfigError("a model of your own needs loss = 'package.module:function' and data = 'path.h5'")
        for name in ("steps", "batch", "accumulate", "log_every", "keep", "multiple"):
            at_least(name, getattr(self, name), 1)
        for name in ("validate_every", "checkpoint_every"):
            at_least(name, getattr(self, name), 0)
        if self.clip is not None:
            above("clip", self.clip, 0)
        above("deadline", self.deadline, 0)
        _check_mesh(self.mesh)
        _check_told("network", self.network)
        _check_told("data.arguments", self.data.arguments)
        for group in (self.data, self.optimizer, self.schedule, self.gradients, self.guard):
            group.check()
        return self

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def from_dict(values: Mapping[str, Any], kind: Any = None) -> Any:
    """Settings that were checked when they were written down."""
    kind, found = kind or Settings, dict[str, Any]()
    for each in fields(kind):
        if each.name in values:
            value, default = values[each.name], each.default
            inner = is_dataclass(default) and not isinstance(default, type)
            found[each.name] = from_dict(value, type(default)) if inner else value
    return kind(**found)


def _check_mesh(mesh: dict[str, int]) -> None:
    for letter, parts in mesh.items():
        if letter not in AXES:
            raise ConfigError(f"mesh.{letter} = {parts}: letters are {', '.join(AXES)} (N: samples side by side)")
        at_least(f"mesh.{letter}", parts, 1)


def _check_told(key: str, arguments: Mapping[str, Any]) -> None:
    """Settings are written as TOML, which has no None: what goes on from there would go on without it."""
    for name, value in arguments.items():
        if value is None:
            raise ConfigError(f"{key}.{name} = None: settings have no None; leave {name} out for its default")


def at_least(key: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{key} = {value}: it is {least} or more")


def above(key: str, value: float, limit: float) -> None:
    if not value > limit:
        raise ConfigError(f"{key} = {value}: it is greater than {limit}")


def keys_of(settings: Any, prefix: str = "") -> list[str]:
    """Every key there is, with dots."""
    found: list[str] = []
    for each in fields(settings):
        value = getattr(settings, each.name)
        name = f"{prefix}{each.name}"
        found += keys_of(value, f"{name}.") if is_dataclass(value) else [name]
    return found
