"""A run that is gone on with under other settings than before: said, or refused where it would be no run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .settings import Settings

#: What changes nothing of what is learned.
_HARMLESS = (
    "mesh.", "guard.", "log_every", "validate_every", "checkpoint_every", "keep", "trace", "deadline", "multiple",
    "data.memory", "data.readers", "data.prefetch",
)  # fmt: skip


def check_optimizer(told: Mapping[str, Any], now: Settings) -> None:
    """What an optimizer remembers is of no use to another."""
    before = told["optimizer"]["name"]
    if before != now.optimizer.name:
        raise ConfigError(
            f"optimizer.name = {now.optimizer.name!r}: this run was begun with {before!r}; go on with that, or start "
            "anew in another folder"
        )


def changed(told: Mapping[str, Any], now: Settings) -> str:
    """``optimizer.lr = 0.001 (was 0.01)``, and so on; empty where all that matters is as it was."""
    before, after = _flat(told), _flat(now.as_dict())
    differ = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    said = [key for key in differ if not key.startswith(_HARMLESS)]
    return ", ".join(f"{key} = {after.get(key)} (was {before.get(key)})" for key in said)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat
