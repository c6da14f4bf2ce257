"""The user's own code that a run calls: when it starts, after steps and validations, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from .imports import called, named

EVENTS = ("on_start", "on_step", "on_validation", "on_end")


class Callbacks:
    """The user's callbacks: one object of each class named in the settings, on every rank.

    A class has any of these methods:

    - ``on_start(trainer)``: before the first step, with the model, optimizer and loaders made
    - ``on_step(trainer, step, loss)``: after each step, with its number, from 0, and its loss
    - ``on_validation(trainer, metrics)``: after each validation
    - ``on_end(trainer, result)``: after the last step and validation

    All ranks call them together, so they may compute with cut tensors.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._objects = [called("callbacks", named("callbacks", target)) for target in targets]
        for target, each in zip(targets, self._objects, strict=True):
            if not any(hasattr(each, event) for event in EVENTS):
                raise ConfigError(f"callbacks = {target!r} has none of the methods {', '.join(EVENTS)}")

    def __call__(self, event: str, *arguments: Any) -> None:
        for each in self._objects:
            method = getattr(each, event, None)
            if method is not None:
                method(*arguments)
