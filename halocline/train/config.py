"""Settings from a TOML file and from ``--set key=value``, checked by pydantic; and written down again."""

from __future__ import annotations

import datetime
import difflib
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from ..errors import ConfigError
from .settings import Settings

CONFIG = "config.toml"


def load_settings(path: Path, changes: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> Settings:
    """The file's settings over ``defaults``, and ``changes`` such as ``optimizer.lr=1e-3`` over both."""
    try:
        told = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # TOML's, or that of a file that is no text
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return make_settings(told, changes, defaults, str(path))


def make_settings(
    told: Mapping[str, Any],
    changes: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    where: str = "the settings",
) -> Settings:
    """Settings from a dict, with ``changes`` such as ``optimizer.lr=1e-3``; raises ConfigError."""
    return _checked(merge(defaults or {}, with_changes(told, changes)), where)


def with_changes(told: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """What is told, with changes such as ``optimizer.lr=1e-3`` over it; nothing is checked."""
    merged = _with_path(told)
    for change in changes:
        merged = merge(merged, _with_path(_change(change)))
    return merged


#: A string in place of a group of settings stands for this one of its keys.
_SHORT = {"data": "path", "optimizer": "name", "schedule": "name"}


def _with_path(told: Mapping[str, Any]) -> dict[str, Any]:
    """Short forms written out: ``data = "file.h5"``, ``optimizer = "adamw"``, ``data.x = "images"``."""
    written = dict(told)
    for group, key in _SHORT.items():
        if isinstance(written.get(group), str):
            written[group] = {key: written[group]}
    data = written.get("data")
    if isinstance(data, Mapping):
        short = {name: {"path": data[name]} for name in ("x", "y") if isinstance(data.get(name), str)}
        written["data"] = {**data, **short}
    for name in ("metrics", "callbacks", "class_names"):
        if isinstance(written.get(name), str):
            written[name] = [written[name]]
    return written


def _change(text: str) -> dict[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text}: give key=value, such as optimizer.lr=1e-3")
    nested: Any = _value(value.strip())
    for part in reversed(key.strip().split(".")):
        nested = {part: nested}
    return dict(nested)


#: As Python and JSON write them: as strings, arguments of a network would be taken for true, all of them.
_WORDS = {"True": True, "False": False, "None": None, "none": None, "null": None}


def _value(text: str) -> Any:
    """As TOML reads it; a bare word is a string, and so is a date, which no setting is.

    >>> _value("1e-3"), _value("[1, 2]"), _value("False"), _value("bf16"), _value("2026-01-31")
    (0.001, [1, 2], False, 'bf16', '2026-01-31')
    """
    if text in _WORDS:
        return _WORDS[text]
    try:
        parsed = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if isinstance(parsed, (datetime.date, datetime.time)) else parsed


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One nested dict over another."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _checked(values: Mapping[str, Any], where: str, extra: Literal["forbid", "ignore"] = "forbid") -> Settings:
    try:
        return TypeAdapter(Settings).validate_python(dict(values), extra=extra)
    except ValidationError as error:
        raise ConfigError(f"{where}: " + "; ".join(_told(each) for each in error.errors())) from None


#: What other tools call a setting.
_SYNONYMS = {
    "learning_rate": "optimizer.lr", "batch_size": "batch", "max_steps": "steps", "num_steps": "steps",
    "iterations": "steps", "epochs": "steps", "max_epochs": "steps", "num_epochs": "steps", "criterion": "loss",
    "loss_fn": "loss", "loss_function": "loss", "loss_args": "loss_options", "net": "model",
    "model_args": "network", "model_options": "network", "model_kwargs": "network", "grad_clip": "clip",
    "clip_norm": "clip", "gradient_clip_val": "clip", "max_grad_norm": "clip", "accumulate_grad_batches": "accumulate",
    "gradient_accumulation_steps": "accumulate", "num_workers": "data.readers", "workers": "data.readers",
    "prefetch_factor": "data.prefetch", "dtype": "precision", "amp": "precision", "scheduler": "schedule",
    "lr_scheduler": "schedule", "warmup_steps": "schedule.warmup", "wd": "optimizer.weight_decay",
    "random_seed": "seed", "checkpoint": "weights", "pretrained": "weights", "val_split": "data.validation",
    "validation_split": "data.validation", "val": "data.validation", "inputs": "data.x", "images": "data.x",
    "image": "data.x", "input": "data.x", "labels": "data.y", "label": "data.y", "targets": "data.y",
    "target": "data.y", "timeout": "deadline", "save_every": "checkpoint_every", "eval_every": "validate_every",
    "stride": "multiple",
}  # fmt: skip
_ADVICE = {"epochs": "a run is as long as its steps", "amp": "such as precision = 'bf16'"}


def _told(error: Any) -> str:
    """Key, value, and what is allowed."""
    key = ".".join(str(part) for part in error["loc"] if part != "[key]")
    if error["type"] == "unexpected_keyword_argument":
        return f"{key} is unknown{_meant(key)}"
    if error["type"] == "value_error":  # of our own validators, whose text names the key unless the group is given
        text = str(error["ctx"]["error"])
        return text if is_dataclass(error["input"]) or isinstance(error["input"], str) else f"{key}.{text}"
    return f"{key} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def keys_of(kind: Any, prefix: str = "") -> list[str]:
    """Every key there is, with dots."""
    keys: list[str] = []
    for each in fields(kind):
        inner = is_dataclass(each.default)
        keys += keys_of(each.default, f"{prefix}{each.name}.") if inner else [f"{prefix}{each.name}"]
    return keys


def _meant(key: str) -> str:
    """Which setting may be meant: one of that name in another group, what other tools call so, one spelled alike."""
    keys, last = keys_of(Settings), key.rpartition(".")[2].lower()
    same = [each for each in keys if each.rpartition(".")[2] == last]
    meant = _SYNONYMS.get(last) or (same[0] if same else None)
    if meant is None:
        near = difflib.get_close_matches(key, keys, 1, 0.6) or difflib.get_close_matches(
            last, [each.rpartition(".")[2] for each in keys], 1, 0.6
        )
        meant = next((each for each in keys if near and (each == near[0] or each.endswith(f".{near[0]}"))), None)
    if meant is None:
        return "; docs/settings.md lists all: " + ", ".join(sorted(keys))
    advice = next((f" ({words})" for name, words in _ADVICE.items() if name in last), "")
    return f"; did you mean {meant}?{advice}"


def read_settings(folder: Path) -> Settings:
    """Of a run, as :func:`write_settings` left them."""
    path = folder / CONFIG
    try:
        return _checked(tomllib.loads(path.read_text("utf-8")), str(path), extra="ignore")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {error}; give one of `halocline train`") from error


def write_settings(settings: Settings, path: Path) -> None:
    """As TOML, every key with its value; those that are None are left out."""
    lines, tables = _lines(settings.as_dict()), []
    for name, value in settings.as_dict().items():
        if isinstance(value, dict):
            tables += _table(name, value)
    beside = path.with_name(f".{path.name}.part")
    beside.write_text("\n".join([*lines, *tables]) + "\n", "utf-8")
    beside.replace(path)  # whole or as it was: the run cannot go on without it


def _table(name: str, values: Mapping[str, Any]) -> list[str]:
    lines = ["", f"[{name}]", *_lines(values)]
    for key, value in values.items():
        if isinstance(value, dict):
            lines += _table(f"{name}.{_key(key)}", value)
    return lines


def _lines(values: Mapping[str, Any]) -> list[str]:
    plain = ((key, value) for key, value in values.items() if value is not None and not isinstance(value, dict))
    return [f"{_key(key)} = {_text(value)}" for key, value in plain]


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(value: Any) -> str:
    """Most of JSON's strings, numbers, lists and truths are TOML's too; tables inside lists are written in line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(each) for each in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # nan, inf and -inf, which JSON has not
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON's pairs for others are no TOML
