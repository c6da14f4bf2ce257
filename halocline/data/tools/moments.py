"""Counts, means and squared deviations of many numbers, merged from parts without losing digits (Chan's formulas)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ...errors import DataError
from ...geometry import Box, Partition, shape_of, whole
from ..stores.store import Array, Store, portions

#: Columns of a table of moments: a row for each channel. The mean is in two parts, an origin near it and the rest, so
#: that a mean much larger than the spread costs no digits of the spread.
COUNT, ORIGIN, OFFSET, SQUARES, MIN, MAX, NONFINITE = range(COLUMNS := 7)

MOST_CLASSES = 1024
_ELEMENTS = 1 << 22  # read at a time
_BLOCK = 1 << 16  # of each channel computed at a time, in the cache of a core
_MOST_GROUPS = 1024


def no_moments(channels: int) -> Array:
    """The table of no numbers at all."""
    table = np.zeros((channels, COLUMNS))
    table[:, MIN], table[:, MAX] = np.inf, -np.inf
    return table


def moments_of(rows: Array) -> Array:
    """The moments of each row. Numbers that are none are counted, and left out of the others."""
    blocks = (rows[:, start : start + _BLOCK] for start in range(0, rows.shape[1], _BLOCK))
    return all_merged((_moments_of_block(block) for block in blocks), len(rows))


def _moments_of_block(rows: Array) -> Array:
    """Moments of a block that fits in a core's cache, in float64."""
    table = no_moments(len(rows))
    for moments, numbers in zip(table, rows, strict=True):
        row = numbers.astype(np.float64)
        finite = np.isfinite(row)
        values = row if finite.all() else row[finite]
        moments[COUNT], moments[NONFINITE] = values.size, row.size - values.size
        if values.size:
            moments[ORIGIN], moments[MIN], moments[MAX] = values.mean(), values.min(), values.max()
            values = values - moments[ORIGIN]
            moments[OFFSET] = values.mean()
            moments[SQUARES] = np.square(values - moments[OFFSET]).sum()
    return table


def merged(first: Array, second: Array) -> Array:
    """The moments of both together."""
    table = np.empty_like(first)
    count = first[:, COUNT] + second[:, COUNT]
    share = second[:, COUNT] / np.maximum(count, 1)
    table[:, ORIGIN] = origin = np.where(first[:, COUNT] > 0, first[:, ORIGIN], second[:, ORIGIN])
    # The distance of the means, from two differences that are each exact enough.
    apart = (second[:, ORIGIN] - origin) + (second[:, OFFSET] - first[:, OFFSET])
    table[:, COUNT] = count
    table[:, OFFSET] = first[:, OFFSET] + apart * share
    table[:, SQUARES] = first[:, SQUARES] + second[:, SQUARES] + apart**2 * share * first[:, COUNT]
    table[:, MIN] = np.minimum(first[:, MIN], second[:, MIN])
    table[:, MAX] = np.maximum(first[:, MAX], second[:, MAX])
    table[:, NONFINITE] = first[:, NONFINITE] + second[:, NONFINITE]
    return table


def summary(table: Array) -> dict[str, tuple[Any, ...]]:
    """The columns of statistics, a number a channel: counts as integers, NaN for channels without a finite number."""
    count = table[:, COUNT]
    mean, std = table[:, ORIGIN] + table[:, OFFSET], np.sqrt(table[:, SQUARES] / np.maximum(count, 1))
    columns = {"mean": mean, "std": std, "min": table[:, MIN], "max": table[:, MAX]}
    known = {name: tuple(np.where(count > 0, column, np.nan).tolist()) for name, column in columns.items()}
    counts = {"count": count, "nonfinite": table[:, NONFINITE]}
    return known | {name: tuple(column.astype(int).tolist()) for name, column in counts.items()}


def all_merged(tables: Iterable[Array], channels: int) -> Array:
    """Merged in the order given, so that the bits do not depend on which process made a table."""
    result = no_moments(channels)
    for table in tables:
        result = merged(result, table)
    return result


class PortionMoments(NamedTuple):
    """What a group of portions holds."""

    group: int
    table: Array
    classes: Counter[int]
    bytes: int


@dataclass
class Survey:
    """A store cut into portions, and these into groups.

    Groups are the same for any number of processes, and so are the sums.
    """

    store: Store
    classes: bool

    @property
    def channels(self) -> int:
        """Rows of the table: one for each channel, or a single one."""
        return self.store.size("C") if "C" in self.store.dims else 1

    @cached_property
    def parts(self) -> list[Box]:
        """The portions of a sample, in the order in which it lies, along its chunks."""
        box = tuple(map(whole, self.store.stored_shape))
        return list(portions(box, _ELEMENTS, self.store.stored_chunks))

    @cached_property
    def groups(self) -> Partition:
        """How the portions of all samples are divided into groups."""
        total = len(self.parts) * len(self.store)
        return Partition.even(total, max(1, min(total, _MOST_GROUPS)))

    def group(self, number: int) -> PortionMoments:
        """Read the portions of one group and compute their moments."""
        table, classes, size = no_moments(self.channels), Counter[int](), 0
        for item in range(*self.groups.piece(number)):
            sample, part = divmod(item, len(self.parts))
            numbers = self._read(sample, self.parts[part])
            self._add(table, numbers, self.parts[part])
            if self.classes:
                classes.update(class_counts(numbers))
                check_classes(len(classes))
            size += numbers.nbytes
        return PortionMoments(number, table, classes, size)

    def _read(self, sample: int, part: Box) -> Array:
        """In the order in which it lies: nothing is turned."""
        store = self.store
        numbers = np.empty(shape_of(part), store.dtype)
        turned = [store.stored.index(letter) for letter in store.dims]
        store.read(sample, tuple(part[dim] for dim in turned), numbers.transpose(turned))
        return numbers

    def _add(self, table: Array, numbers: Array, part: Box) -> None:
        """Merge the moments of one portion into the rows of its channels."""
        dim = self.store.stored.find("C")
        if dim < 0:
            rows, own = numbers.reshape(1, -1), slice(0, 1)
        else:
            rows, own = np.moveaxis(numbers, dim, 0), slice(*part[dim])
            rows = rows.reshape(len(rows), -1)
        table[own] = merged(table[own], moments_of(rows))


def class_counts(numbers: Array) -> dict[int, int]:
    """How often each integer occurs."""
    flat = numbers.reshape(-1)
    lowest, highest = int(flat.min()), int(flat.max())
    if lowest > -(1 << 62) and highest < 1 << 62 and highest - lowest < 1 << 16:  # counted without being sorted
        counts = np.bincount(flat.astype(np.int64) - lowest)
        return {lowest + int(place): int(counts[place]) for place in np.flatnonzero(counts)}
    values, occurrences = np.unique(flat, return_counts=True)
    check_classes(len(values))
    return dict(zip(values.tolist(), occurrences.tolist(), strict=True))


def check_classes(count: int) -> None:
    """Raise where there are more different values than classes can be."""
    if count > MOST_CLASSES:
        raise DataError(
            f"there are {count} values or more, which are no classes (at most {MOST_CLASSES} are counted); "
            "take the statistics without classes"
        )
