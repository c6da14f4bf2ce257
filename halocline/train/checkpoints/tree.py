"""A nested state split into tensors by name, and a JSON tree from which the rest is restored exactly.

In the tree, a dict with one key that begins with ``$`` stands for something that JSON lacks: ``$tensor``, ``$tuple``,
``$dict`` (keys that are no strings), ``$float`` (infinities and NaN), ``$numpy``, ``$size``, ``$state_dict``. Types
beyond these are refused, since pickling them would run code when a checkpoint is loaded.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...rules.dtensor import to_dtensor
from ...tensor import ShardedTensor, Sharding
from ...world import placement_of
from .peers import CheckpointError, Mismatch

Tree = Any  # what JSON can hold; a dict with a key such as "$tensor" or "$tuple" stands for something else
_PLAIN = (type(None), bool, int, str)  # JSON's own


class Parts:
    """A nested state taken apart, to be saved: ``tensors`` by name, and a ``tree`` that says where each belongs.

    Tensors that this rank holds a part of are named by the part, such as ``model/weight@depth=1``.
    """

    def __init__(
        self,
        value: Any,
        take: Callable[[Tensor], Tensor],
        place: Callable[[Tensor, str], str] = lambda *_: "",
        as_dtensors: bool = True,
    ) -> None:
        """``take`` copies a tensor, or not. ``place(tensor, path)`` names the part that this rank holds; "": all.

        With ``as_dtensors`` sharded tensors become DTensors, so that any other layout can load them: by all ranks
        together.
        """
        self.tensors: dict[str, Tensor] = {}
        self.cut: dict[str, Sharding] = {}  # of those that are cut: how they lie on the mesh
        self.alike: list[str] = []  # a line per tensor: facts that must be the same on every rank
        self._take, self._place, self._as_dtensors = take, place, as_dtensors
        self.tree = self._described(value, "")

    def _described(self, value: Any, path: str) -> Tree:
        """The tree of a value; ``path`` names it in errors, and its tensors."""
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if type(value) is list:
            return self._items(value, path)
        if type(value) is tuple:
            return {"$tuple": self._items(value, path)}
        return _leaf(value, path)

    def _items(self, values: list[Any] | tuple[Any, ...], path: str) -> list[Tree]:
        return [self._described(value, f"{path}/{index}") for index, value in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Tree:
        """The tree of a dict: plain where keys are strings, else a list of pairs. Order is kept."""
        pairs = [(key, self._described(item, f"{path}/{key}")) for key, item in value.items()]
        tree: Tree = {"$dict": [[self._described(key, f"{path} (a key)"), item] for key, item in pairs]}
        if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
            tree = dict(pairs)
        versions = getattr(value, "_metadata", None)  # a module's state_dict carries the versions of its layers
        if isinstance(value, OrderedDict) and isinstance(versions, Mapping):
            return {"$state_dict": tree, "metadata": self._described(dict(versions), f"{path} (metadata)")}
        return tree

    def _tensor(self, tensor: Tensor, path: str) -> Tree:
        """Take a tensor; its tree holds the name, the stride where it is not contiguous, and axes it is cut on."""
        name = path.lstrip("/")
        while name in self.tensors:  # keys 0 and "0", or a key with a slash
            name += "'"
        if isinstance(tensor, ShardedTensor) and self._as_dtensors:
            self.cut[name] = tensor.sharding
            tensor = to_dtensor(tensor.detach())
        _check_kind(tensor, path)
        place, axes = self._place(tensor, name), sorted(placement_of(tensor))
        taken = self.tensors[at(name, place)] = self._take(tensor)
        self.alike.append(f"{name} {taken.dtype} {axes if place else tuple(taken.shape)}")
        usual = torch.empty(taken.shape, device="meta").stride()
        tree: Tree = {"$tensor": name}
        if not isinstance(taken, DTensor | ShardedTensor) and taken.stride() != usual:
            tree["stride"] = list(taken.stride())
        return {**tree, "axes": axes} if place else tree


def at(name: str, place: str) -> str:
    """The name in a checkpoint of the part of a tensor that ranks at one place of the mesh hold."""
    return f"{name}@{place}" if place else name


def located(tree: Tree, coordinates: Mapping[str, int]) -> Tree:
    """The tree for the rank at these coordinates of the mesh: names of its own parts of tensors that are not whole."""
    if isinstance(tree, list):
        return [located(item, coordinates) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" not in tree or "axes" not in tree:
        return {key: located(item, coordinates) for key, item in tree.items()}
    missing = [axis for axis in tree["axes"] if axis not in coordinates]
    if missing:
        raise Mismatch(f"{tree['$tensor']} is not whole on axis {missing[0]!r}; load it on a mesh that has this axis")
    place = ",".join(f"{axis}={coordinates[axis]}" for axis in tree["axes"])
    return {key: item for key, item in {**tree, "$tensor": at(tree["$tensor"], place)}.items() if key != "axes"}


def host_copy(tensor: Tensor) -> Tensor:
    """A copy in host memory; of a DTensor, this rank's shard."""
    own = tensor.detach()
    if not isinstance(own, DTensor):
        own = own.resolve_conj().resolve_neg()
    return own.to("cpu", copy=True)


def uncopied(tensor: Tensor) -> Tensor:
    """The tensor itself, where no copy is needed."""
    return tensor


def named_tensors(value: Any) -> dict[str, Tensor]:
    """The tensors of a nested state by the names that a checkpoint gives them. They are not copied."""
    return Parts(value, uncopied, as_dtensors=False).tensors


def assembled(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """The state that a tree describes, with these tensors in it. The inverse of :class:`Parts`.

    CheckpointError for a key that begins with ``$`` and is not known, as a later version might write.
    """
    match tree:
        case list():
            return [assembled(item, tensors) for item in tree]
        case {"$tensor": name}:
            return tensors[name]
        case {"$tuple": items}:
            return tuple(assembled(items, tensors))
        case {"$size": sizes}:
            return torch.Size(sizes)
        case {"$float": bits}:
            return struct.unpack(">d", bytes.fromhex(bits))[0]
        case {"$numpy": dtype, "shape": shape, "data": data}:
            flat = np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype))
            return flat[0] if shape is None else flat.reshape(shape).copy()
        case {"$dict": pairs}:
            return {assembled(key, tensors): assembled(item, tensors) for key, item in pairs}
        case {"$state_dict": items, "metadata": versions}:
            state: Any = OrderedDict(assembled(items, tensors))
            state._metadata = OrderedDict(assembled(versions, tensors))
            return state
        case dict():
            unknown = next((key for key in tree if key.startswith("$")), None)
            if unknown is not None:  # Parts writes no such key: it would be inside a $dict
                raise CheckpointError(f"the state holds {unknown}, which this version cannot read")
            return {key: assembled(item, tensors) for key, item in tree.items()}
    return tree


def leaves(tree: Tree) -> dict[str, list[int] | None]:
    """The name of every tensor in a tree, with its stride where it is not contiguous."""
    names: dict[str, list[int] | None] = {}
    if isinstance(tree, dict) and "$tensor" in tree:
        return {tree["$tensor"]: tree.get("stride")}
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        names |= leaves(item)
    return names


# ---- leaves ----


def _leaf(value: Any, path: str) -> Tree:
    """The tree of a value that holds no others. CheckpointError for types that JSON cannot restore exactly."""
    if type(value) in _PLAIN:
        return value
    if type(value) is float:  # JSON's digits restore a float exactly, but it has no infinities and no NaN
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}
    if type(value) is torch.Size:
        return {"$size": list(value)}
    if isinstance(value, np.generic | np.ndarray) and not value.dtype.hasobject:
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {"$numpy": value.dtype.str, "shape": shape, "data": base64.b64encode(value.tobytes()).decode("ascii")}
    raise CheckpointError(
        f"{path.lstrip('/') or 'the state'} is of type {type(value).__name__}, which a checkpoint does not hold; make "
        "it a tensor, a number, a string, None, or a list, tuple or dict of these"
    )


def _check_kind(tensor: Tensor, path: str) -> None:
    """Raise CheckpointError for a tensor that cannot be saved: cut, sparse, quantized, or without values."""
    kind = type(tensor.detach()) if isinstance(tensor, torch.nn.Parameter) else type(tensor)
    known = kind is Tensor or issubclass(kind, DTensor | ShardedTensor)
    if not known or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise CheckpointError(
            f"{path.lstrip('/')} is a {kind.__name__} ({tensor.layout}, on {tensor.device}); a checkpoint holds dense "
            "plain tensors and DTensors; gather a cut tensor first, or leave it out"
        )
