"""The user's own data: files opened, dims found or given, images paired with labels, samples held out.

Nothing here reads values beyond headers and saved statistics: fields describe where samples lie, and the loader reads
them. What cannot be decided safely, such as dims of an unusual array, is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..data import Field, Normalize, Statistics, Store, open_store
from ..data.stores.contents import contents
from ..data.stores.derived import Labels, OneChannel, SampleRange
from ..data.stores.files import FileStore
from ..data.stores.open import dims_example, files_of
from ..errors import ConfigError, DataError, HaloclineError
from ..geometry import Interval
from .inputs import Input
from .settings import DataSettings, FieldSettings, Settings

#: Dims of x, by their number, if neither the file nor the settings name them.
_INPUTS = {3: "NCW", 4: "NCHW", 5: "NCDHW"}


@dataclass(frozen=True)
class OwnData:
    """The user's data: fields x and y for training and validation, and a description of the network's input."""

    training: dict[str, Field]
    validation: dict[str, Field] | None
    input: Input
    words: str  # which samples are for training and which for validation, in words


@dataclass(frozen=True)
class _Opened:
    """One field with the files that it comes from."""

    field: Field
    store: FileStore  # the files, before a channel was added
    stored: str | None  # dims that were given or guessed; None: the file names them
    dataset: str


def own_data(data: DataSettings, dtype: torch.dtype) -> OwnData:
    """The fields x and y of all samples, with the last samples held out for validation. Raises ConfigError.

    Files are opened and their headers read, so that samples which do not pair up are found before training starts.
    """
    x, y = _opened(data, "x", dtype), _opened(data, "y", dtype)
    _check_pairs(x, y)
    _check_shapes(x.field.store, y.field.store)
    samples = len(x.store)
    kept = data.held_out(samples)
    if kept >= samples:
        raise ConfigError(
            f"data.validation = {data.validation:g}: the data have {samples} samples, and some must be left to train on"
        )
    both = {"x": x.field, "y": y.field}
    letters = "".join(letter for letter in x.field.dims if letter in "DHW")
    return OwnData(
        _some(both, Interval(0, samples - kept)),
        _some(both, Interval(samples - kept, samples)) if kept else None,
        Input.of(x.field, letters, x.field.store is not x.store, x.stored, x.dataset or None),
        _words(x, y, samples, kept, data.validation),
    )


def check_paths(settings: Settings) -> None:
    """Raise ConfigError if a path of the user's own data names nothing. Opens no file."""
    if settings.workload is not None:
        return
    for which in ("x", "y"):
        path = getattr(settings.data, which).path or settings.data.path
        if path is not None:
            try:
                files_of(path)
            except DataError as error:
                raise ConfigError(f"data.{which}: {error}") from error


def _words(x: _Opened, y: _Opened, samples: int, kept: int, told: float) -> str:
    """One sentence for log and terminal: shapes of x and y, and which samples are for what."""
    fields = "; ".join(f"{name}: {_described(each.field)}" for name, each in (("x", x), ("y", y)))
    if not kept:
        return f"{fields}; all {samples} samples for training, none for validation (data.validation = 0)"
    last = f"the last {kept if kept > 1 else 'one'} ({_names(x.store, samples - kept, samples)})"
    return (
        f"{fields}; {samples} samples: the first {samples - kept} for training, {last} for validation "
        f"(data.validation = {told:g})"
    )


def _described(field: Field) -> str:
    """Shape, dims and dtype of a field in words."""
    sizes = " x ".join(str(size) for size in field.store.shape) or "one number"
    return f"{sizes} ({field.dims or 'a number'}) as {str(field.tensor_dtype).removeprefix('torch.')}"


def _names(store: FileStore, first: int, end: int) -> str:
    """The files, or indices, of samples ``first`` to ``end`` in words."""
    if len(store.paths) == len(store):
        names = [path.name for path in store.paths[first:end]]
        return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"index {first}" if end - first == 1 else f"index {first} to {end - 1}"


# -- one field


def _opened(data: DataSettings, which: str, dtype: torch.dtype) -> _Opened:
    """Open one field; ``which`` is "x" or "y". Errors name the setting."""
    told: FieldSettings = getattr(data, which)
    path = told.path or data.path
    if path is None:
        raise ConfigError(f"data.{which}.path is not given, and there is no data.path for all fields")
    try:
        store, stored, dataset = _store(path, told, which)
        field = _as_field(store, told, which, dtype)
    except HaloclineError as error:
        raise ConfigError(f"data.{which}: {error}") from error
    return _Opened(field, store, stored, dataset)


def _store(path: str, told: FieldSettings, which: str) -> tuple[FileStore, str | None, str]:
    """The store, the dims that were given or guessed (None: the file names them), and the dataset's name."""
    paths, _ = files_of(path)
    there = {each.name: each for each in contents(paths[0])}
    dataset = _dataset(paths[0], there, told, which)
    if told.dims is not None:
        return open_store(path, told.dims, dataset or None), told.dims, dataset
    content = there[dataset]
    if content.dims is not None:
        return open_store(path, content.dims, dataset or None), None, dataset
    guessed = _INPUTS.get(len(content.shape)) if which == "x" else _target_dims(there, content.shape)
    if guessed is None:
        raise DataError(
            f"{paths[0]} does not name the dims of {repr(dataset) if dataset else 'its array'} {list(content.shape)}; "
            f"give them, such as data.{which}.dims = {dims_example(len(content.shape), len(paths))!r}"
        )
    return open_store(path, guessed, dataset or None), guessed, dataset


def _dataset(path: Path, there: Mapping[str, Any], told: FieldSettings, which: str) -> str:
    """The dataset's name in the file: as given, the only one, or the field's own; empty where arrays have no name."""
    if told.dataset is not None:
        wanted = told.dataset.strip("/")
    elif set(there) == {""} or (len(there) == 1 and told.path is not None):
        wanted = next(iter(there))
    else:
        wanted = which
    if wanted not in there:
        raise DataError(
            f"{path} has no dataset {wanted!r}; there: {', '.join(filter(None, there)) or 'one array without a name'}; "
            f"name it with data.{which}.dataset"
        )
    return wanted


def _target_dims(there: Mapping[str, Any], shape: tuple[int, ...]) -> str | None:
    """Dims of labels beside an input: a number, a vector, class numbers in space, or channels of the input's size."""
    inputs = _INPUTS.get(len(there["x"].shape), "") if "x" in there else ""
    choices = {1: "N", 2: "NC", len(inputs) - 1: inputs.replace("C", ""), len(inputs): inputs}
    return choices.get(len(shape)) or None


def _as_field(store: Store, told: FieldSettings, which: str, dtype: torch.dtype) -> Field:
    """A field with its values normalised, class numbers as int64, and a channel dim added where wanted."""
    values = []
    if told.normalize != "none":
        make = Normalize.standard if told.normalize == "standard" else Normalize.minmax
        values = [make(Statistics.load(store))]
    integers = store.dtype.kind in "biu" and "C" not in store.dims
    classes = told.classes if told.classes is not None else which == "y" and integers and not values
    if classes and values:
        raise DataError(f"normalize = {told.normalize!r} and classes = true: class numbers are not normalised")
    if classes:
        store = Labels(store)
    space = {"C", "T"}.isdisjoint(store.dims) and bool(store.dims)
    if told.channel if told.channel is not None else which == "x" and space:
        store = OneChannel(store)
    return Field(store, dtype=torch.int64 if classes else dtype, values=values, fill=told.fill)


def _some(fields: Mapping[str, Field], samples: Interval) -> dict[str, Field]:
    """The same fields over some of their samples."""
    return {name: replace(each, store=SampleRange(each.store, samples)) for name, each in fields.items()}


# -- do x and y belong together?


def _check_pairs(of_x: _Opened, of_y: _Opened) -> None:
    """Raise ConfigError unless each x has its y, by number and, for a file per sample, by similar names."""
    x, y = of_x.store, of_y.store
    if len(x) != len(y):
        several = {"x": of_x, "y": of_y}.items()
        dims = [
            f"data.{n}.dims = {o.stored!r}" for n, o in several if "N" in (o.stored or "") and len(o.store.paths) > 1
        ]
        hint = f"; or is N in {' or '.join(dims)} another dim, such as C?" if dims else ""
        raise ConfigError(
            f"data: x has {len(x)} samples ({x.name}) and y has {len(y)} ({y.name}); each x needs its y, in the same "
            f"order of names{hint}"
        )
    if x.paths == y.paths or not len(x.paths) == len(y.paths) == len(x):
        return
    x_keys, y_keys = _keys(x.paths), _keys(y.paths)
    if x_keys == y_keys or not set(x_keys) & set(y_keys):  # names that have nothing in common cannot be compared
        return
    odd = next(place for place, (a, b) in enumerate(zip(x_keys, y_keys, strict=True)) if a != b)
    raise ConfigError(
        f"data: sample {odd} has x {x.paths[odd].name} and y {y.paths[odd].name}, which do not belong together by "
        "their names; give files whose sorted names pair up"
    )


def _keys(paths: Sequence[Path]) -> list[str]:
    """File names without their common beginning and end, which leaves what tells samples apart."""
    names = [path.name for path in paths]
    start = _alike(names)
    end = _alike([name[start:][::-1] for name in names])
    return [name[start : len(name) - end] for name in names]


def _alike(words: Sequence[str]) -> int:
    """The length of the longest common prefix."""
    return next(
        (place for place, letters in enumerate(zip(*words, strict=False)) if len(set(letters)) > 1),
        min(map(len, words)),
    )


def _check_shapes(x: Store, y: Store) -> None:
    """Raise ConfigError if x and y differ in depth, height or width."""
    for letter in "DHW":
        if letter in x.dims and letter in y.dims and x.size(letter) != y.size(letter):
            sizes = ", ".join(f"{name} {list(each.shape)} ({each.dims})" for name, each in (("x", x), ("y", y)))
            raise ConfigError(
                f"data: {letter} has {x.size(letter)} in x and {y.size(letter)} in y: {sizes}; are the dims in the "
                "order in which the files store them (data.x.dims, data.y.dims)?"
            )
