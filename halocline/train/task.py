"""From settings to what is trained: a network, its loss, what is measured, and the fields of its batches."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..data import Crop, Field, Flip, Normalize, Rotate90, Shift, Statistics, Store, open_store
from ..data.stores.part import Part
from ..errors import HaloclineError, RankFailure
from ..geometry import Interval
from ..workloads import WORKLOADS
from ..workloads.workload import Meter
from ..world import Label, Mesh, World
from .settings import AXES, ConfigError, DataSettings, FieldSettings, Settings
from .step import Loss

#: What the dims of a field are where nobody names them, by how many there are.
_INPUTS = {3: "NCW", 4: "NCHW", 5: "NCDHW"}


Made = TypeVar("Made")
_LABEL = Label("start", "the training loop", "control")


@dataclass(frozen=True)
class Task:
    make_model: Callable[[], nn.Module]
    loss: Loss
    make_meter: Callable[[], Meter] | None
    training: dict[str, Field]
    validation: dict[str, Field] | None
    letters: str  # dims that are cut first where the mesh does not say


def make_task(settings: Settings, dtype: torch.dtype) -> Task:
    return _of_workload(settings, dtype) if settings.workload is not None else _of_user(settings, dtype)


def together(world: World, make: Callable[[], Made]) -> Made:
    """What each rank makes. One that cannot, for want of a file, say, ends all, and none waits for it in vain."""
    failed, made, mine = torch.zeros(world.size), [], None
    try:
        made.append(make())
    except HaloclineError as error:
        failed[world.rank], mine = 1, error
    if world.size > 1:
        failed = world.maximum(failed, tuple(range(world.size)), _LABEL)
    if mine is not None:
        raise mine
    if failed.any():
        first = int(failed.argmax())
        raise RankFailure(f"rank {world.rank}: rank {first} has not what it needs to begin; its own output says what")
    return made[0]


def defaults_of(workload: str, scale: str = "small") -> dict[str, Any]:
    """A workload's own settings, over which the user's go."""
    _known("workload", workload, WORKLOADS)
    _known("scale", scale, ("small", "full"))
    training = dict(getattr(WORKLOADS[workload], scale).training)
    training.pop("cut", None)
    told: dict[str, Any] = {"workload": workload, "scale": scale}
    optimizer = {key: training.pop(key) for key in ("lr", "weight_decay") if key in training}
    if "optimizer" in training:
        optimizer["name"] = training.pop("optimizer")
    data = {key: training.pop(key) for key in ("samples", "validation") if key in training}
    if isinstance(training.get("schedule"), str):
        training["schedule"] = {"name": training["schedule"]}
    return {**told, "optimizer": optimizer, "data": data, **training}


def _known(key: str, value: object, there: Iterable[str]) -> None:
    names = list(there)
    if value not in names:
        near = difflib.get_close_matches(str(value), names, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{key} = {value!r}: {hint}there are {', '.join(names)}")


def called(key: str, maker: Callable[..., Made], *given: Any, **arguments: Any) -> Made:
    """What it makes of these arguments, which stand in the settings under ``key``."""
    name = getattr(maker, "__name__", type(maker).__name__)
    try:
        expected = inspect.signature(maker)
    except (TypeError, ValueError):  # written in C
        return maker(*given, **arguments)
    try:
        expected.bind(*given, **arguments)
    except TypeError as error:
        allowed = ", ".join(list(expected.parameters)[len(given) :]) or "no arguments"
        raise ConfigError(f"{key} = {arguments}: {error}; {name} takes {allowed}") from error
    return maker(*given, **arguments)


def _of_workload(settings: Settings, dtype: torch.dtype) -> Task:
    _known("workload", settings.workload, WORKLOADS)
    workload = WORKLOADS[settings.workload or ""]
    scale = getattr(workload, settings.scale)
    data = settings.data
    for key, value in (("data.path", data.path), ("loss", settings.loss)):
        if value is not None:
            raise ConfigError(
                f"{key} = {value!r}: workload = {settings.workload!r} has its own; for other data or another loss give "
                "model = 'package.module:name', loss and data in place of a workload"
            )

    def fields(samples: int, seed: int) -> dict[str, Field]:
        made = called("data.arguments", workload.data, samples, seed, **{**scale.data, **data.arguments})
        return {name: _as(each, dtype) for name, each in made.items()}

    held_out = fields(data.validation, data.seed + 1) if data.validation else None
    arguments = {**scale.network, **settings.network}
    letters = "".join(scale.training.get("cut", ("D", "H", "W")))
    return Task(
        lambda: called("network", workload.factory, **arguments),
        workload.loss,
        workload.meter,
        fields(data.samples, data.seed),
        held_out,
        letters,
    )


def _as(field: Field, dtype: torch.dtype) -> Field:
    """Numbers that are not whole in the run's own dtype."""
    return replace(field, dtype=dtype) if field.tensor_dtype.is_floating_point else field


def _of_user(settings: Settings, dtype: torch.dtype) -> Task:
    if settings.data.arguments:
        raise ConfigError(f"data.arguments = {settings.data.arguments}: they are for data that a workload makes")
    factory, loss = named("model", settings.model or ""), named("loss", settings.loss or "")
    x, y = (_opened(settings.data, which) for which in ("x", "y"))
    if len(x) != len(y):
        raise ConfigError(f"data: x has {len(x)} samples and y has {len(y)}")
    kept = settings.data.validation
    if kept >= len(x):
        raise ConfigError(
            f"data.validation = {kept}: the data have {len(x)} samples, and some must be left to train on"
        )
    both = {"x": _as_field(x, settings.data.x, dtype), "y": _as_field(y, settings.data.y, dtype)}
    letters = "".join(letter for letter in x.dims if letter in "DHW")
    return Task(
        lambda: called("network", factory, **settings.network),
        lambda output, batch: loss(output, batch["y"]),
        None,
        _some(both, Interval(0, len(x) - kept)),
        _some(both, Interval(len(x) - kept, len(x))) if kept else None,
        letters,
    )


def named(key: str, target: str) -> Callable[..., Any]:
    """``package.module:name``, imported from where the command runs too."""
    module, colon, name = target.partition(":")
    if not colon:
        raise ConfigError(f"{key} = {target!r}: give package.module:name")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{key} = {target!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ConfigError(f"{key} = {target!r} is {type(found).__name__}, and cannot be called")
    return found


def _opened(data: DataSettings, which: str) -> Store:
    told: FieldSettings = getattr(data, which)
    path = told.path or data.path or ""
    dataset = told.dataset if told.dataset is not None else which
    try:
        if told.dims is not None:
            return open_store(path, told.dims, dataset)
        return _guessed(path, dataset, which)
    except HaloclineError as error:
        raise ConfigError(f"data.{which}: {error}") from error


def _guessed(path: str, dataset: str, which: str) -> Store:
    """The dims that the file names, or those that such data usually have."""
    from ..data.stores.contents import contents
    from ..data.stores.open import files_of

    paths, _ = files_of(path)
    there = {each.name: each for each in contents(paths[0])}
    found = there.get(dataset)
    if found is None:
        raise ConfigError(
            f"{paths[0]} has no dataset {dataset!r}; there: {', '.join(there)}; name it with dataset = ..."
        )
    dims = found.dims or (_INPUTS.get(len(found.shape)) if which == "x" else _target_dims(there, found.shape))
    if dims is None:
        raise ConfigError(f"{paths[0]} does not name the dims of {dataset!r} {list(found.shape)}; give dims = 'NCDHW'")
    return open_store(path, dims, dataset)


def _target_dims(there: Mapping[str, Any], shape: tuple[int, ...]) -> str | None:
    """Of labels beside an input: a number, a vector, a volume of classes, or channels of the input's size."""
    inputs = _INPUTS.get(len(there["x"].shape), "") if "x" in there else ""
    choices = {1: "N", 2: "NC", len(inputs) - 1: inputs.replace("C", ""), len(inputs): inputs}
    return choices.get(len(shape)) or None


def _as_field(store: Store, told: FieldSettings, dtype: torch.dtype) -> Field:
    whole = store.dtype.kind in "biu"
    values = [_normalizing(store, told.normalize)] if told.normalize != "none" else []
    wanted = torch.int64 if whole and not values and _is_label(store) else dtype
    return Field(store, dtype=wanted, values=values, fill=told.fill)


def _is_label(store: Store) -> bool:
    """Whole numbers without channels are classes."""
    return "C" not in store.dims


def _normalizing(store: Store, how: str) -> Normalize:
    statistics = Statistics.load(store)
    return Normalize.standard(statistics) if how == "standard" else Normalize.minmax(statistics)


def _some(fields: Mapping[str, Field], samples: Interval) -> dict[str, Field]:
    return {name: replace(each, store=Part(each.store, samples)) for name, each in fields.items()}


def augmentations(data: DataSettings) -> list[Any]:
    found: list[Any] = []
    if data.flip:
        found.append(Flip(*data.flip))
    if data.shift:
        found.append(Shift(wrap=data.wrap, **data.shift))
    if data.crop:
        found.append(Crop(centre=False, **data.crop))
    if data.rotate:
        if len(data.rotate) != 2:
            raise ConfigError(f"data.rotate = {data.rotate!r}: two letters of a plane, such as HW")
        found.append(Rotate90(*data.rotate))
    return found


def make_mesh(settings: Settings, letters: str, ranks: int) -> tuple[Mesh, dict[str, str]]:
    """The mesh, and which letters of the data are cut along which of its axes."""
    parts = dict(settings.mesh) or spread(ranks, letters)
    count = 1
    for number in parts.values():
        count *= number
    if count != ranks:
        told = ", ".join(f"{letter} = {number}" for letter, number in parts.items())
        raise ConfigError(f"mesh: {told} are {count} ranks, and there are {ranks}; let them multiply to that")
    mesh = Mesh(**{AXES[letter]: number for letter, number in (parts or {"N": 1}).items()})
    return mesh, {letter: AXES[letter] for letter in parts}


def spread(ranks: int, letters: str) -> dict[str, int]:
    """Ranks over dims, a factor at a time, the first dim first.

    >>> spread(4, "DH"), spread(12, "DHW"), spread(3, "H"), spread(2, "")
    ({'D': 2, 'H': 2}, {'D': 3, 'H': 2, 'W': 2}, {'H': 3}, {'N': 2})
    """
    letters = letters or "N"
    parts = dict.fromkeys(letters, 1)
    for turn, factor in enumerate(reversed(_factors(ranks))):
        parts[letters[turn % len(letters)]] *= factor
    return {letter: number for letter, number in parts.items() if number > 1} or {letters[0]: 1}


def _factors(number: int) -> list[int]:
    """Primes, the smallest first."""
    found, factor = [], 2
    while number > 1:
        while number % factor:
            factor += 1
        found.append(factor)
        number //= factor
    return found
