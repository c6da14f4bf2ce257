"""From settings to what is trained: a network, its loss, its metrics, and the fields of its batches.

A task comes from a workload of the library, or from the user's own model, loss and data. All ranks make the same task;
nothing is read but headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from ..arrangement import Arrangement
from ..data import Crop, Field, Flip, Rotate90, Shift
from ..errors import ConfigError, did_you_mean
from ..workloads import WORKLOADS
from ..workloads.workload import Meter, Workload
from ..world import Label
from .elastic import check_ranks
from .imports import called, named
from .inputs import Input
from .losses import make_loss
from .metrics import AUTO, meter_maker
from .own import own_data
from .settings import AXES, DataSettings, Settings
from .step import Loss

Made = TypeVar("Made")
START = Label("start", "the training loop", "control")


@dataclass(frozen=True)
class TrainingTask:
    """What is trained: the model's maker, loss and metrics, and the fields of both data sets.

    Models are made by a function since a dry run makes one on meta tensors first.
    """

    make_model: Callable[[], nn.Module]
    loss: Loss
    make_meter: Callable[[], Meter] | None
    training: dict[str, Field]
    validation: dict[str, Field] | None
    input: Input
    words: str  # which samples are for training and which for validation, for the log
    loss_module: nn.Module | None = None  # the loss, if it is a module: its buffers move to the device

    @property
    def letters(self) -> str:
        """Dims that are cut first where the mesh does not say."""
        return self.input.letters


def make_task(settings: Settings, dtype: torch.dtype) -> TrainingTask:
    """The task that the settings describe, the same on every rank. Raises ConfigError or DataError.

    Data files are opened, and user code is imported; no network is made yet.
    """
    return _of_workload(settings, dtype) if settings.workload is not None else _of_user(settings, dtype)


def defaults_of(workload: str, scale: str = "small") -> dict[str, Any]:
    """A workload's own settings at a scale, as a nested dict over which the user's settings go."""
    _known("workload", workload, WORKLOADS)
    _known("scale", scale, ("small", "full"))
    training = dict(getattr(WORKLOADS[workload], scale).training)
    training.pop("cut", None)
    told: dict[str, Any] = {"workload": workload, "scale": scale}
    optimizer = {key: training.pop(key) for key in ("lr", "weight_decay") if key in training}
    if "optimizer" in training:
        optimizer["name"] = training.pop("optimizer")
    data = {"validation": 16, **{key: training.pop(key) for key in ("samples", "validation") if key in training}}
    if isinstance(training.get("schedule"), str):
        training["schedule"] = {"name": training["schedule"]}
    return {**told, "optimizer": optimizer, "data": data, **training}


def _known(key: str, value: object, there: Iterable[str]) -> None:
    """Raise ConfigError unless ``value`` is one of those, with a hint at a similar one."""
    names = list(there)
    if value not in names:
        raise ConfigError(f"{key} = {value!r}{did_you_mean(str(value), names)}; there are {', '.join(names)}")


def _of_workload(settings: Settings, dtype: torch.dtype) -> TrainingTask:
    """The task of a workload. Settings that only make sense for the user's own data are refused.

    Training and validation samples are made with different seeds.
    """
    workload = known_workload(settings.workload or "")
    scale = getattr(workload, settings.scale)
    data = settings.data
    for key, value in (("data.path", data.path), ("data.x.path", data.x.path), ("loss", settings.loss)):
        if value is not None:
            raise ConfigError(
                f"{key} = {value!r}: workload = {settings.workload!r} has its own; for other data or another loss give "
                "model = 'package.module:name', loss and data in place of a workload"
            )

    def fields(samples: int, seed: int) -> dict[str, Field]:
        made = called("data.arguments", workload.data, samples, seed, **{**scale.data, **data.arguments})
        floating = {
            name: replace(each, dtype=dtype) for name, each in made.items() if each.tensor_dtype.is_floating_point
        }
        return {**made, **floating}

    kept = data.held_out(data.samples)
    training = fields(data.samples, data.seed)
    letters = "".join(scale.training.get("cut", ("D", "H", "W")))
    meter = workload.meter if AUTO in settings.metrics else meter_maker(settings)
    return TrainingTask(
        model_maker(settings),
        workload.loss,
        meter,
        training,
        fields(kept, data.seed + 1) if kept else None,
        Input.of(training["x"], letters),
        f"synthetic data: {data.samples} samples for training, {kept} others for validation",
    )


def _of_user(settings: Settings, dtype: torch.dtype) -> TrainingTask:
    """The task of the user's own model, loss and data."""
    if settings.data.arguments:
        raise ConfigError(f"data.arguments = {settings.data.arguments}: they are for data that a workload makes")
    loss = make_loss(settings.loss or "", settings.loss_options)
    data = own_data(settings.data, dtype)
    return TrainingTask(
        model_maker(settings),
        lambda output, batch: loss(output, batch["y"]),
        meter_maker(settings),
        data.training,
        data.validation,
        data.input,
        data.words,
        loss if isinstance(loss, nn.Module) else None,
    )


def model_maker(settings: Settings) -> Callable[[], nn.Module]:
    """A function that makes the network; needs no data. Raises ConfigError now if the model cannot be imported."""
    if settings.workload is not None:
        workload = known_workload(settings.workload)
        arguments = {**getattr(workload, settings.scale).network, **settings.network}
        return lambda: called("network", workload.factory, **arguments)
    factory = named("model", settings.model or "")
    if isinstance(factory, type) and not issubclass(factory, nn.Module):
        raise ConfigError(f"model = {settings.model!r} is no torch.nn.Module, and is not called")

    def make() -> nn.Module:
        made = called("network", factory, **settings.network)
        if not isinstance(made, nn.Module):
            raise ConfigError(f"model = {settings.model!r} gives a {type(made).__name__}, not a torch.nn.Module")
        return made

    return make


def known_workload(name: str) -> Workload:
    """A workload by name, or an error that lists them."""
    _known("workload", name, WORKLOADS)
    return WORKLOADS[name]


def augmentations(data: DataSettings) -> list[Any]:
    """The augmentations that the settings ask for."""
    moves: list[Any] = []
    if data.flip:
        moves.append(Flip(*data.flip))
    if data.shift:
        moves.append(Shift(wrap=data.wrap, **data.shift))
    if data.crop:
        moves.append(Crop(centre=False, **data.crop))
    if data.rotate:
        if len(data.rotate) != 2:
            raise ConfigError(f"data.rotate = {data.rotate!r}: two letters of a plane, such as HW")
        moves.append(Rotate90(*data.rotate))
    return moves


MODEL = "model"  # the mesh axis over which weights are cut


@dataclass(frozen=True)
class MeshLayout:
    """How a run is arranged on its ranks, and which letters of the data's dims are cut along which mesh axes."""

    arrangement: Arrangement
    cut: Mapping[str, str]

    @property
    def points(self) -> dict[str, tuple[int, ...]]:
        """Cut points by letter, where they are not even."""
        return self.arrangement.letter_points()


def planned_layout(arrangement: Arrangement) -> MeshLayout:
    """The layout of a plan."""
    return MeshLayout(arrangement, arrangement.cut_letters())


def make_layout(settings: Settings, letters: str, ranks: int) -> MeshLayout:
    """The layout of the settings: the mesh that they give, or one that cuts ``letters``. Raises ConfigError."""
    check_ranks(settings, ranks)
    parts = dict(settings.mesh) or spread(ranks // settings.model_parts, letters)
    sizes = {AXES[letter]: number for letter, number in (parts or {"N": 1}).items()}
    sizes |= {MODEL: settings.model_parts} if settings.model_parts > 1 else {}
    arrangement = Arrangement(sizes, multiple=settings.multiple, layout=_cut_weights(settings, parts))
    return MeshLayout(arrangement, {letter: AXES[letter] for letter in parts})


def _cut_weights(settings: Settings, parts: Mapping[Any, int]) -> dict[str, dict[int, str]]:
    """Which weights are cut over the axis model: those of the settings, or of the workload. A workload's tables of
    sparse lookups are cut over the axis of samples."""
    if settings.model_parts == 1 and not settings.layout:
        return {name: {0: AXES["N"]} for name in tables_of(settings)} if parts.get("N", 1) > 1 else {}
    own = WORKLOADS[settings.workload].layout if settings.workload is not None else None
    if not settings.layout and own is None:
        raise ConfigError(
            f"model_parts = {settings.model_parts}: name the weights to cut, such as layout.'*.fc1.weight' = "
            "{0 = 'model'}; this network has no layout of its own"
        )
    try:
        named = {name: {int(dim): axis for dim, axis in dims.items()} for name, dims in settings.layout.items()}
    except ValueError as error:
        raise ConfigError(f"layout: {error}; give the number of each dim that is cut") from error
    return named or own(MODEL)  # type: ignore[misc]


def tables_of(settings: Settings) -> tuple[str, ...]:
    """Parameters of a workload's own network that only sparse lookups use."""
    return WORKLOADS[settings.workload].tables if settings.workload is not None and settings.model is None else ()


def spread(ranks: int, letters: str) -> dict[str, int]:
    """Distribute ranks over dims, one prime factor at a time, largest first, starting with the first dim.

    >>> spread(4, "DH"), spread(12, "DHW"), spread(3, "H"), spread(2, "")
    ({'D': 2, 'H': 2}, {'D': 3, 'H': 2, 'W': 2}, {'H': 3}, {'N': 2})
    """
    letters = letters or "N"
    parts = dict.fromkeys(letters, 1)
    for turn, factor in enumerate(reversed(_factors(ranks))):
        parts[letters[turn % len(letters)]] *= factor
    return {letter: number for letter, number in parts.items() if number > 1} or {letters[0]: 1}


def _factors(number: int) -> list[int]:
    """Prime factors, the smallest first."""
    factors, factor = [], 2
    while number > 1:
        while number % factor:
            factor += 1
        factors.append(factor)
        number //= factor
    return factors
