"""Settings that changed since a run began: named in the log when it resumes, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .settings import Settings

#: Beginnings of keys that do not change what is learned.
_HARMLESS = (
    "mesh.", "guard.", "log_every", "validate_every", "checkpoint_every", "keep", "trace", "deadline", "multiple",
    "data.memory", "data.readers", "data.prefetch",
)  # fmt: skip


def check_optimizer(told: Mapping[str, Any], now: Settings) -> None:
    """Raise ConfigError if a resumed run has another optimizer: the saved state would not fit."""
    before = told["optimizer"]["name"]
    if before != now.optimizer.name:
        raise ConfigError(
            f"optimizer.name = {now.optimizer.name!r}: this run was begun with {before!r}; go on with that, or start "
            "anew in another folder"
        )


def changed(told: Mapping[str, Any], now: Settings) -> str:
    """The changes that matter, such as ``optimizer.lr = 0.001 (was 0.01)``; empty if there are none."""
    before, after = _flat(told), _flat(now.as_dict())
    differ = [key for key in sorted({*before, *after}) if before.get(key) != after.get(key)]
    said = [key for key in differ if not key.startswith(_HARMLESS)]
    return ", ".join(f"{key} = {after.get(key)} (was {before.get(key)})" for key in said)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted keys; tuples as lists, as TOML has them."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = list(value) if isinstance(value, tuple) else value
    return flat
