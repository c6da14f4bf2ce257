"""Statistics of a store, channel by channel: means, deviations, extremes, and how often each class occurs.

They are kept as JSON beside the data: ``universe.h5`` has ``universe.h5.stats.json``, ``x.zarr`` has
``x.zarr.stats.json``, and a folder or list of files has ``<folder>/<dataset or kind>.stats.json``. One such file holds
a record for each dataset.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError
from ...world import Label, Mesh, World
from ..loading.agree import agreed
from ..processes import in_processes
from ..stores.files import FileStore
from ..stores.store import Array, Store
from .moments import COLUMNS, MOST_CLASSES, Survey, all_merged, check_classes, summary

Progress = Callable[[int], None]  # called with the bytes that were read since

_LABEL = Label("statistics", "hc.data")
_METADATA = ("zarr.json", ".zarray")


@dataclass(frozen=True)
class Source:
    """What statistics were taken from. ``sizes``: a digest of the files' names and sizes; ``newest``: the latest time.

    Of a Zarr array only the metadata are looked at, for it may be a million files.
    """

    kind: str
    dataset: str
    dims: str
    shape: tuple[int, ...]
    samples: int
    dtype: str
    files: int
    sizes: str
    newest: float

    @classmethod
    def of(cls, store: Store) -> Source:
        """Describe the files of a store as they are now."""
        seen = [_looked_at(path, dataset_of(store)) for path in getattr(store, "paths", ())]
        sizes = "\n".join(f"{path.name} {status.st_size}" for path, status in seen)
        return cls(
            kind=type(store).__name__,
            dataset=dataset_of(store),
            dims=store.dims,
            shape=store.shape,
            samples=len(store),
            dtype=store.dtype.name,
            files=len(seen),
            sizes=sha256(sizes.encode()).hexdigest()[:16],
            newest=max((status.st_mtime for _, status in seen), default=0.0),
        )

    def compare(self, now: Source, place: Path) -> None:
        """Refuse what describes other data; warn where the files are as large as they were, but newer."""
        for name in ("dataset", "dims", "shape", "samples", "dtype", "files", "sizes"):
            was, is_now = getattr(self, name), getattr(now, name)
            if was != is_now:
                raise DataError(
                    f"{place}: statistics of other data: {name} was {was} and is {is_now}; "
                    "compute them again with `halocline data stats`"
                )
        if now.newest > self.newest:
            warnings.warn(
                f"{place}: files were written since these statistics were taken, and are as large as before; "
                "if they were not only copied, take them again with `halocline data stats`",
                stacklevel=3,
            )


@dataclass(frozen=True)
class Statistics:
    """One entry for each channel (letter C), or a single one. ``std`` divides by the count.

    NaN and infinite values are counted in ``nonfinite``, and left out of all else. ``classes``: how often each value
    of an integer store occurs, where that was asked for.
    """

    count: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    min: tuple[float, ...]
    max: tuple[float, ...]
    nonfinite: tuple[int, ...]
    classes: dict[int, int] | None
    source: Source

    @classmethod
    def of(
        cls,
        store: Store,
        *,
        classes: bool = False,
        jobs: int = 1,
        mesh: Mesh | None = None,
        progress: Progress | None = None,
    ) -> Statistics:
        """Read all once, in portions along the chunks, and in float64.

        By ``jobs`` processes, and by the ranks of a mesh, each its share; the result has the same bits for any number.
        """
        if store.dtype.kind not in "biuf" or (classes and store.dtype.kind == "f"):
            raise DataError(f"{store.name} holds {store.dtype}: statistics are of real numbers, classes of integers")
        survey, world = Survey(store, classes), mesh.world if mesh is not None else None
        table, counts = _surveyed(survey, jobs, world, progress)
        source = Source.of(store)
        if world is not None:  # which may have copies of their own
            newest = torch.tensor([source.newest], dtype=torch.float64)
            source = replace(source, newest=float(world.maximum(newest, tuple(range(world.size)), _LABEL)))
        return cls(**summary(table), classes=dict(sorted(counts.items())) if classes else None, source=source)

    @cached_property
    def frequencies(self) -> dict[int, float]:
        """The share of each class."""
        if self.classes is None:
            raise DataError("no classes were counted; compute the statistics with classes=True (--classes)")
        total = sum(self.classes.values())
        return {value: count / total for value, count in self.classes.items()}

    def class_weights(self, number: int | None = None, ignore: Collection[int] = ()) -> Tensor:
        """1 / sqrt(frequency), scaled to sum 1, for classes 0 to ``number`` - 1: rare classes weigh more.

        A class that never occurs has weight 0. Values in ``ignore`` are no classes (a loss's ``ignore_index``); any
        other outside the range is refused.
        """
        kept = {value: share for value, share in self.frequencies.items() if value not in set(ignore)}
        number = number if number is not None else max(kept, default=-1) + 1
        outside = [value for value in kept if not 0 <= value < number]
        if outside or not kept:
            what = f"value {outside[0]} occurs" if outside else "no class occurs"
            raise DataError(
                f"class weights are for classes 0 to {number - 1}, and {what}; name it in ignore, or recode"
            )
        weights = torch.zeros(number, dtype=torch.float64)
        for value, share in kept.items():
            weights[value] = 1 / math.sqrt(share)
        return (weights / weights.sum()).to(torch.float32)

    def save(self, path: Path) -> None:
        """Into the JSON file, beside the records of other datasets that it may have. One rank should do it."""
        records = _records(path) if path.exists() else {}
        spare = path.with_name(f".{path.name}.{os.getpid()}")
        spare.write_text(json.dumps({**records, self.source.dataset: self.as_json()}, indent=1) + "\n")
        spare.replace(path)

    def as_json(self) -> dict[str, Any]:
        """The entries of the saved file."""
        classes = None if self.classes is None else {str(value): count for value, count in self.classes.items()}
        columns = {
            name: [number if math.isfinite(number) else None for number in getattr(self, name)]
            for name in ("mean", "std", "min", "max")
        }
        return {**asdict(self), **columns, "classes": classes}

    @classmethod
    def load(cls, store: Store, path: Path | None = None) -> Statistics:
        """Those of the store, from beside it. Refused if they are of other data; a warning if the files are newer."""
        path = path or beside(store)
        if not path.exists():
            raise DataError(f"{path} does not exist; compute the statistics with `halocline data stats`")
        records = _records(path)
        if dataset_of(store) not in records:
            raise DataError(f"{path} has no statistics of {dataset_of(store)!r}; it has {', '.join(records)}")
        try:
            statistics = cls._parsed(records[dataset_of(store)])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}: not a record of statistics ({error!r})") from error
        statistics.source.compare(Source.of(store), path)
        return statistics

    @classmethod
    def _parsed(cls, record: dict[str, Any]) -> Statistics:
        """From an entry of the saved file."""
        columns: dict[str, Any] = {
            name: tuple(math.nan if x is None else x for x in record[name])
            for name in ("count", "mean", "std", "min", "max", "nonfinite")
        }
        counts = record["classes"]
        classes = None if counts is None else {int(value): count for value, count in counts.items()}
        source = Source(**{**record["source"], "shape": tuple(record["source"]["shape"])})
        return cls(**columns, classes=classes, source=source)


def beside(store: Store) -> Path:
    """Where the statistics of a store are kept."""
    if not isinstance(store, FileStore):
        raise DataError(f"{store.name}: statistics of data without a file need a path")
    if len(store.paths) == 1:
        return store.paths[0].with_name(store.paths[0].name + ".stats.json")
    folder = Path(os.path.commonpath([path.parent.absolute() for path in store.paths]))
    return folder / f"{(dataset_of(store) or type(store).__name__.lower()).replace('/', '.')}.stats.json"


def dataset_of(store: Store) -> str:
    """Its name in the files: of an HDF5 dataset, or a Zarr array in a group."""
    return str(getattr(store, "dataset", "") or getattr(store, "array", ""))


def _looked_at(path: Path, dataset: str) -> tuple[Path, os.stat_result]:
    metadata = (path / dataset / name for name in _METADATA)
    return path, next((file for file in metadata if file.exists()), path).stat()


def _records(path: Path) -> dict[str, Any]:
    """All entries of a saved file, by dataset."""
    try:
        records = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is not a JSON file ({error}); delete it and compute the statistics again") from error
    if not isinstance(records, dict):
        raise DataError(f"{path} does not hold statistics; delete it and compute them again")
    return records


def _surveyed(survey: Survey, jobs: int, world: World | None, progress: Progress | None) -> tuple[Array, Counter[int]]:
    """This rank's groups, then those of all ranks: merged in the order of the groups, whichever rank did them."""
    groups = survey.groups.parts
    size, rank = (world.size, world.rank) if world is not None else (1, 0)
    tables, counts = np.zeros((groups, survey.channels, COLUMNS)), Counter[int]()
    errors: dict[int, BaseException] = {}
    try:
        for portion in in_processes(survey.group, range(rank, groups, size), jobs):
            tables[portion.group] = portion.table
            counts.update(portion.classes)
            check_classes(len(counts))
            if progress is not None:
                progress(portion.bytes)
    except Exception as error:
        if world is None:
            raise
        errors[0] = error
    if world is not None:
        tables, counts = _over_ranks(world, tables, counts, errors)
    return all_merged(tables, survey.channels), counts


def _over_ranks(
    world: World, tables: Array, counts: Counter[int], errors: dict[int, BaseException]
) -> tuple[Array, Counter[int]]:
    """Every rank has all tables; what one could not read, all raise."""
    everyone = tuple(range(world.size))
    for error in agreed(world, errors, 1).values():
        raise error
    tables = world.sum(torch.from_numpy(tables), everyone, _LABEL).numpy()  # a group is some rank's, and zero elsewhere
    # Pairs of value and count, in rows of each rank's own.
    rows = torch.zeros(world.size, MOST_CLASSES, 2, dtype=torch.int64)
    for place, pair in enumerate(sorted(counts.items())):
        rows[world.rank, place] = torch.tensor(pair)
    rows = world.sum(rows, everyone, _LABEL)
    together = Counter[int]()
    for value, count in rows.flatten(0, 1).tolist():
        together[value] += count
    together = Counter({value: count for value, count in together.items() if count})
    check_classes(len(together))
    return tables, together
