"""Settings read from TOML files and ``--set key=value``, checked by pydantic, and written as TOML.

Three layers are merged before the check: defaults (of a workload), the file, and changes of the command line. An
unknown key is an error with a hint, since a misspelt setting would otherwise be ignored.
"""

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

from ..errors import ConfigError, did_you_mean
from .log import write_whole
from .settings import AXES, Settings

CONFIG = "config.toml"


def load_settings(path: Path, changes: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> Settings:
    """Settings of a file over ``defaults``, with ``changes`` such as ``optimizer.lr=1e-3`` over both. Raises
    ConfigError."""
    return make_settings(read_toml(path), changes, defaults, str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as nested dicts. ConfigError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        where = f" in {Path.cwd()}" if isinstance(error, FileNotFoundError) and not path.is_absolute() else ""
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}{where}") from error
    except (ValueError, RecursionError) as error:  # not TOML, or not text
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def make_settings(
    told: Mapping[str, Any],
    changes: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    where: str = "the settings",
) -> Settings:
    """Settings from a dict, with ``changes`` such as ``optimizer.lr=1e-3``; raises ConfigError."""
    return _checked(merge(defaults or {}, with_changes(told, changes)), where, changes=changes)


def with_changes(told: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """A dict of settings with changes such as ``optimizer.lr=1e-3`` over it. Values are not checked."""
    merged = _with_path(told)
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {change}: give key=value, such as optimizer.lr=1e-3")
        nested: Any = _value(value.strip())
        for part in reversed(key.strip().split(".")):
            nested = {part: nested}
        merged = merge(merged, _with_path(nested))
    return merged


#: In place of a group of settings, a string is short for this key of the group.
_SHORT = {"data": "path", "optimizer": "name", "schedule": "name"}


def _with_path(told: Mapping[str, Any]) -> dict[str, Any]:
    """Write short forms out: ``data = "file.h5"``, ``optimizer = "adamw"``, ``data.x = "images"``."""
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


#: Words of Python and JSON. As strings they would all count as true where a network takes them as arguments.
_WORDS = {"True": True, "False": False, "None": None, "none": None, "null": None}


def _value(text: str) -> Any:
    """A value as TOML reads it. A bare word is a string, and so is a date, since no setting is a date.

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
    """One nested dict over another; values of ``above`` win, dicts are merged."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _checked(
    values: Mapping[str, Any],
    where: str,
    extra: Literal["forbid", "ignore"] = "forbid",
    changes: Sequence[str] = (),
) -> Settings:
    """Settings from nested dicts. ConfigError lists everything that pydantic objects to, after its source: a change, or
    else ``where``."""
    try:
        return TypeAdapter(Settings).validate_python(dict(values), extra=extra)
    except ValidationError as error:
        found: dict[str, list[str]] = {}
        for each in error.errors():
            found.setdefault(_change_of(_key_of(each), changes) or where, []).append(_told(each))
        raise ConfigError("; ".join(f"{source}: {'; '.join(texts)}" for source, texts in found.items())) from None


def _change_of(key: str, changes: Sequence[str]) -> str | None:
    """The option by which a key was set; None: the file or a default says it."""
    return next((f"--set {change}" for change in reversed(changes) if _holds(with_changes({}, [change]), key)), None)


def _holds(values: Any, key: str) -> bool:
    """Do nested dicts hold a key such as ``optimizer.lr``, or in place of a part of it a value that is no dict?"""
    for part in key.split("."):
        if not isinstance(values, Mapping):
            return True
        if part not in values:
            return False
        values = values[part]
    return True


def _key_of(error: Any) -> str:
    """The key that an error of pydantic is about."""
    return ".".join(str(part) for part in error["loc"] if part != "[key]")


#: Names that other tools use for a setting.
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
    """An error of pydantic in our words: key, value, and what is allowed."""
    key = _key_of(error)
    if error["type"] == "unexpected_keyword_argument":
        return f"{key} is unknown{_meant(key)}"
    if error["type"] == "value_error":  # of our own validators, whose text names the key unless a dict is checked
        text = str(error["ctx"]["error"])
        named = is_dataclass(error["input"]) or isinstance(error["input"], str) or text.startswith(f"{key}.")
        return text if named else f"{key}.{text}"
    near = ""
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        near = did_you_mean(error["input"], re.findall(r"'([^']+)'", error["ctx"]["expected"]))
    said = f"{error['msg'][0].lower()}{error['msg'][1:]}"
    if error["loc"] and error["loc"][-1] == "[key]":
        group, _, last = key.rpartition(".")
        letter = next((letter for letter, axis in AXES.items() if axis == last), None)
        near = f" (write {group}.{letter}: {last} is {letter})" if letter is not None else near
        return f"{key} is unknown{near}: the key{said.removeprefix('input')}"
    return f"{key} = {error['input']!r}{near}: {said}"


def keys_of(kind: Any, prefix: str = "") -> list[str]:
    """Every key of a class of settings, such as ``optimizer.lr``."""
    keys: list[str] = []
    for each in fields(kind):
        inner = is_dataclass(each.default)
        keys += keys_of(each.default, f"{prefix}{each.name}.") if inner else [f"{prefix}{each.name}"]
    return keys


def _meant(key: str) -> str:
    """A hint at the setting that was meant: a synonym, the same name in another group, or a similar spelling."""
    keys, last = keys_of(Settings), key.rpartition(".")[2].lower()
    same = [each for each in keys if each.rpartition(".")[2] == last]
    meant = _SYNONYMS.get(last) or (same[0] if same else None)
    if meant is None:
        near = difflib.get_close_matches(key, keys, 1, 0.6) or difflib.get_close_matches(
            last, [each.rpartition(".")[2] for each in keys], 1, 0.6
        )
        meant = next((each for each in keys if near and (each == near[0] or each.endswith(f".{near[0]}"))), None)
    if meant is None:
        return "; the settings are " + ", ".join(sorted(keys))
    advice = next((f" ({words})" for name, words in _ADVICE.items() if name in last), "")
    return f"; did you mean {meant}?{advice}"


def read_settings(folder: Path) -> Settings:
    """The settings of a run, from its folder. Unknown keys, of other versions, are ignored."""
    path = folder / CONFIG
    try:
        return _checked(tomllib.loads(path.read_text("utf-8")), str(path), extra="ignore")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {error}; give one of `halocline train`") from error


def write_settings(settings: Settings, path: Path) -> None:
    """Write settings as TOML, every key with its value. Keys that are None are left out, since TOML has no None."""
    write_whole(path, "\n".join(_lines(settings.as_dict())) + "\n")  # a run cannot be resumed from half a file


def _lines(values: Mapping[str, Any], table: str = "") -> list[str]:
    """Lines of TOML; ``table`` is the name of the table that the values are in."""
    lines = [f"{_key(k)} = {_text(v)}" for k, v in values.items() if v is not None and not isinstance(v, dict)]
    for key, value in values.items():
        if isinstance(value, dict):
            name = f"{table}.{_key(key)}" if table else _key(key)
            lines += ["", f"[{name}]", *_lines(value, name)]
    return lines


def _key(name: str) -> str:
    """A key of TOML, quoted where it is not a bare word."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(value: Any) -> str:
    """A value as TOML, which shares strings, numbers, lists and booleans with JSON. Dicts become inline tables."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(key)} = {_text(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(each) for each in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # nan, inf and -inf, which JSON lacks
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    # TOML wants the character DEL escaped, and does not know JSON's surrogate pairs.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
