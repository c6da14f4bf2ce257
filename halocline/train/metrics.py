"""What validation measures of the user's own network: metrics by name, over all classes and by class.

Everything is computed from cut tensors by torch functions, and is therefore the same for every mesh. ``auto`` decides
by the first batch: classes if y holds class numbers, else errors of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, did_you_mean
from ..rules import gather
from ..workloads.metrics import Confusion, Regression
from ..workloads.workload import Batch, Meter
from .imports import called, named
from .settings import Settings

AUTO = "auto"
_CLASSES = ("dice", "iou", "accuracy")
_NUMBERS = ("mse", "mae")
_MOST = 64  # classes that are reported one by one, at most


def meter_maker(settings: Settings) -> Callable[[], Meter] | None:
    """A function that makes a new meter for each validation; None without metrics. Settings are checked now."""
    if not settings.metrics:
        return None
    own: dict[str, Any] = {}
    for name in settings.metrics:
        if ":" in name:
            own[name] = named("metrics", name)
        elif name not in (AUTO, *_CLASSES, *_NUMBERS):
            known = (AUTO, *_CLASSES, *_NUMBERS)
            told = f"metrics = {name!r}{did_you_mean(name, known)}: give {', '.join(known)}"
            raise ConfigError(f"{told}, or a function of your own as 'package.module:name'")
    return partial(Metrics, tuple(settings.metrics), own, tuple(settings.class_names))


class Metrics:
    """The metrics of one validation, over cut tensors. The first batch decides which metrics by name apply.

    Metrics of classes come from one confusion matrix, metrics of numbers from one pass, and functions of the user's own
    are averaged by samples.
    """

    def __init__(self, names: Sequence[str], own: dict[str, Any], class_names: Sequence[str]) -> None:
        self._names, self._class_names = names, class_names
        self._own = [_own_meter(name, each) for name, each in own.items()]
        self._confusion: Confusion | None = None
        self._regression: Regression | None = None
        self._shown: list[str] = []
        self._begun = False

    def update(self, output: Any, batch: Batch) -> None:
        """Add a batch; both arguments may hold cut tensors. Called by all ranks together."""
        if not self._begun:
            self._begin(output, batch["y"])
        if self._confusion is not None:
            self._confusion.update(output, {"y": _classes(output, batch["y"])})
        if self._regression is not None:
            self._regression.update(output, batch)
        for each in self._own:
            each.update(output, batch)

    def _begin(self, output: Any, y: Tensor) -> None:
        """Choose metrics by the first batch. ConfigError for a metric that does not fit output and y.

        ``auto`` stands for the metrics of classes or numbers that fit, and for none if neither does.
        """
        self._begun = True
        of_classes, of_numbers = _no_classes(output, y), _no_numbers(output, y)
        for name in (each for each in self._names if ":" not in each):
            if name == AUTO:
                few = _CLASSES if isinstance(output, Tensor) and output.ndim > 2 else ("accuracy",)
                self._shown += few if not of_classes else _NUMBERS if not of_numbers else ()
                continue
            why = of_classes if name in _CLASSES else of_numbers
            if why:
                raise ConfigError(f"metrics = {name!r}: {why}; give a function of your own as 'package.module:name'")
            self._shown.append(name)
        if set(self._shown) & set(_CLASSES):
            classes, named = output.shape[1], len(self._class_names)
            if named and named != classes:
                raise ConfigError(
                    f"class_names = {list(self._class_names)}: there are {named}, and the network tells {classes} "
                    "classes apart; name them all, the background too"
                )
            self._confusion = Confusion(classes)
        if set(self._shown) & set(_NUMBERS):
            self._regression = Regression()

    def result(self) -> dict[str, float]:
        """Each metric's value over all batches, the same on every rank: ``dice`` and, for each class,
        ``dice/liver``."""
        values: dict[str, float] = {}
        if self._regression is not None:
            values |= {name: value for name, value in self._regression.result().items() if name in self._shown}
        if self._confusion is not None:
            by_class = self._confusion.by_class()
            for name in (each for each in self._shown if each in _CLASSES):
                mean = self._confusion.accuracy if name == "accuracy" else float(by_class[name].nanmean())
                values |= {name: mean, **self._each(name, by_class[name])}
        for own in self._own:
            values |= {key: value for name, each in own.result().items() for key, value in self._told(name, each)}
        return values

    def _told(self, name: str, value: Any) -> list[tuple[str, float]]:
        """The entries of one value: a number, or the mean and a number for each class."""
        if not isinstance(value, Tensor) or value.numel() == 1:
            return [(name, float(value))]
        return [(name, float(value.nanmean())), *self._each(name, value).items()]

    def _each(self, name: str, values: Tensor) -> dict[str, float]:
        """A number for each class; classes that occur neither in truth nor in predictions (NaN) are left out."""
        if len(values) > _MOST:
            return {}
        words = self._class_names or [str(number) for number in range(len(values))]
        return {
            f"{name}/{word}": value
            for word, value in zip(words, values.tolist(), strict=False)
            if value == value  # no NaN
        }


def _own_meter(name: str, target: Any) -> Any:
    """The user's metric: an object of a class with ``update`` and ``result``, or the mean of a function."""
    if isinstance(target, type):
        made = called("metrics", target)
        if not all(hasattr(made, method) for method in ("update", "result")):
            raise ConfigError(f"metrics = {name!r}: a class has the methods update(output, batch) and result()")
        return made
    return _Mean(name.partition(":")[2], target)


class _Mean:
    """A function ``metric(output, y)`` of the user's own, averaged over batches weighted by their samples."""

    def __init__(self, name: str, function: Callable[[Any, Tensor], Any]) -> None:
        self._name, self._function = name, function
        self._total, self._samples = torch.zeros((), dtype=torch.float64), 0

    @torch.no_grad()
    def update(self, output: Any, batch: Batch) -> None:
        """Add a batch. The function may return a number, one for each class, or a row of these for each sample."""
        count = len(batch["y"])
        value = torch.as_tensor(self._function(output, batch["y"]))
        value = gather(value).detach().double().cpu()
        if value.ndim == 2:  # a row for each sample
            value = value.nanmean(0)
        if value.ndim > 1:
            raise ConfigError(
                f"metrics: {self._name} gives a tensor of {list(value.shape)}; a number, or one for each class"
            )
        self._total, self._samples = self._total + value * count, self._samples + count

    def result(self) -> dict[str, Tensor]:
        """The mean, by the function's name."""
        return {self._name: self._total / max(1, self._samples)}


def _classes(output: Tensor, y: Tensor) -> Tensor:
    """Class numbers without the channel dim of size 1 that some losses need."""
    return y.squeeze(1) if y.ndim == output.ndim and y.shape[1] == 1 else y


def _no_classes(output: Any, y: Tensor) -> str:
    """Why metrics of classes do not apply; empty if they do."""
    if not isinstance(output, Tensor):
        return f"the network gives a {type(output).__name__}, not a tensor"
    if y.is_floating_point() or y.is_complex():
        return "y holds no whole numbers (for class numbers stored as floats set data.y.classes = true)"
    if output.ndim < 2 or output.shape[1] < 2:
        return f"the output {list(output.shape)} has no scores of classes along dim 1"
    wanted = [output.shape[0], *output.shape[2:]]
    truth = _classes(output, y)
    return "" if list(truth.shape) == wanted else f"y of {list(y.shape)} does not fit an output of {list(output.shape)}"


def _no_numbers(output: Any, y: Tensor) -> str:
    """Why metrics of numbers do not apply; empty if they do."""
    if not isinstance(output, Tensor):
        return f"the network gives a {type(output).__name__}, not a tensor"
    if output.shape != y.shape or output.is_complex() or y.is_complex():
        return f"y of {list(y.shape)} does not fit an output of {list(output.shape)}"
    return ""
