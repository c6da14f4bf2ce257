"""What ranks tell each other about a checkpoint, as JSON: plans, results and errors. Nothing that arrives is unpickled.

A dict with one key that begins with ``$`` stands for something that JSON lacks: ``$tuple``, ``$size``, ``$dtype``, or
the name of a class of torch.distributed.checkpoint, of which only those in the table below are created.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

import torch
from torch.distributed.checkpoint import metadata, planner, storage

from ..._torch_private import storage_classes

_LAYOUTS = {"strided": torch.strided}
_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}
_PLAIN = (type(None), bool, int, float, str)


@cache
def _classes() -> dict[str, type]:
    """The classes that may be created, by name."""
    known: tuple[type, ...] = (
        metadata.ChunkStorageMetadata,
        metadata.MetadataIndex,
        metadata.TensorProperties,
        planner.SavePlan,
        planner.TensorWriteData,
        planner.WriteItem,
        storage.WriteResult,
        *storage_classes(),
    )
    return {each.__name__: each for each in known}


def to_bytes(value: Any) -> bytes:
    """A value as JSON. TypeError for a type that ranks do not tell each other."""
    return json.dumps(_described(value)).encode()


def from_bytes(data: bytes) -> Any:
    """The value again. ValueError for anything that :func:`to_bytes` does not write."""
    try:
        return _made(json.loads(data))
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"no message of a rank: {error}") from error


def _described(value: Any) -> Any:
    """The value with what JSON lacks replaced."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_described(item) for item in value]
    if kind is dict:
        if any(type(key) is not str or key.startswith("$") for key in value):
            raise TypeError("ranks tell each other dicts with plain strings as keys")
        return {key: _described(item) for key, item in value.items()}
    if kind is torch.Size:  # before tuples, of which it is one
        return {"$size": list(value)}
    if kind is tuple:
        return {"$tuple": [_described(item) for item in value]}
    if kind is torch.dtype:
        return {"$dtype": str(value).removeprefix("torch.")}
    for name, known in (("$layout", _LAYOUTS), ("$format", _FORMATS)):
        if value in known.values():
            return {name: next(key for key, each in known.items() if each == value)}
    if kind is planner.WriteItemType:
        return {"$write": value.name}
    if _classes().get(kind.__name__) is kind:
        return {
            f"${kind.__name__}": {one.name: _described(getattr(value, one.name)) for one in dataclasses.fields(kind)}
        }
    raise TypeError(f"ranks do not tell each other a {kind.__name__}")


def _made(tree: Any) -> Any:
    """The value that a tree describes."""
    if isinstance(tree, list):
        return [_made(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if not any(key.startswith("$") for key in tree):
        return {key: _made(item) for key, item in tree.items()}
    content: Any
    ((name, content),) = tree.items()
    match name:
        case "$tuple":
            return tuple(_made(content))
        case "$size":
            return torch.Size(content)
        case "$dtype":
            return _dtype(content)
        case "$layout":
            return _LAYOUTS[content]
        case "$format":
            return _FORMATS[content]
        case "$write":
            return planner.WriteItemType[content]
    return _classes()[name[1:]](**{key: _made(item) for key, item in content.items()})


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found
