"""The one walk over inputs and outputs of any kind: tensors in tuples, lists, mappings, named tuples, dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same structure with ``function`` applied to every tensor; what is no tensor stays."""
    return map_leaves(Tensor, function, value)


def map_leaves(kind: type | tuple[type, ...], function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with ``function`` applied to every instance of ``kind``; what is none stays."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Mapping):
        return _rebuilt(value, {key: map_leaves(kind, function, item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(kind, function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)([map_leaves(kind, function, item) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: map_leaves(kind, function, getattr(value, name)) for name in names})
    return value


def _rebuilt(like: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of the same kind; a kind that cannot be made of a dict becomes one."""
    try:
        return type(like)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a structure, in order; nothing is built anew."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [tensor for each in dataclasses.fields(value) for tensor in tensors_in(getattr(value, each.name))]
    return []
