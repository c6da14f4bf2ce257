"""Stores made from another store: some of its samples or channels, a channel dim added, labels read as integers.

They read through the store below, which converts dtypes and checks boxes; nothing is copied in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import DataError
from ...geometry import Box, Interval, SampleView, shape_of
from .seen import parts_of
from .store import Array, Store


class DerivedStore(Store):
    """A store made from another one. Passes on to the store below whatever a subclass does not change."""

    def __init__(
        self, store: Store, dims: str | None = None, shape: tuple[int, ...] | None = None, dtype: Any = None
    ) -> None:
        self._store, self.locks, self.samples_in_chunk = store, store.locks, store.samples_in_chunk
        dims = store.dims if dims is None else dims
        super().__init__(dims, store.shape if shape is None else shape, dtype or store.dtype, order=dims)

    @property
    def _what(self) -> str:
        """The selection from the store below, for names and identities."""
        return type(self).__name__

    @property
    def name(self) -> str:
        """The name of the store below."""
        return self._store.name

    @property
    def identity(self) -> str:
        """The selection, and the store below."""
        return f"{self._what} of {self._store.identity}"

    @property
    def stored_chunks(self) -> tuple[int, ...] | None:
        """Those of the store below, where samples have its shape."""
        return self._store.chunks if self.shape == self._store.shape else None

    def __len__(self) -> int:
        return len(self._store)

    def where(self, sample: int) -> str:
        """Where the store below keeps the sample."""
        return self._store.where(sample)

    def close(self) -> None:
        """Close the store below."""
        self._store.close()

    def read_stored(self, sample: int, box: Box, out: Array) -> None:
        """The same box of the store below."""
        self._store.read(sample, box, out)

    def _read(self, sample: int, box: Box, target: Array) -> None:
        if target.size:
            self.read_stored(sample, box, target)  # the store below converts dtypes and strides


class SampleRange(DerivedStore):
    """Consecutive samples of a store: those for training, and those that are kept for validation."""

    def __init__(self, store: Store, samples: Interval) -> None:
        if samples.lo < 0 or samples.hi > len(store) or samples.empty:
            raise DataError(f"{store.name}: there are no samples {samples.lo} to {samples.hi}; it has {len(store)}")
        self._samples = samples
        super().__init__(store)

    @property
    def _what(self) -> str:
        return f"samples {self._samples.lo} to {self._samples.hi - 1}"

    @property
    def name(self) -> str:
        """Which samples, of which store."""
        return f"{self._what} of {self._store.name}"

    def __len__(self) -> int:
        return self._samples.size

    def where(self, sample: int) -> str:
        """Where the store below keeps the sample."""
        return self._store.where(sample + self._samples.lo)

    def read_stored(self, sample: int, box: Box, out: Array) -> None:
        """The sample counted from the first of the range."""
        self._store.read(sample + self._samples.lo, box, out)


class ChannelSubset(DerivedStore):
    """Some channels of a store; the others are not read."""

    def __init__(self, store: Store, channels: Sequence[int]) -> None:
        if "C" not in store.dims:
            raise DataError(f"{store.name}: channels were asked for, and its dims {store.dims} have no C")
        self._channels = tuple(channels)
        # Consecutive channels become one read.
        self._view = SampleView.of(store.shape).take(store.dims.index("C"), self._channels)
        super().__init__(store, shape=self._view.shape)

    @property
    def _what(self) -> str:
        return f"channels {list(self._channels)}"

    @property
    def name(self) -> str:
        """Which channels, of which store."""
        return f"{self._what} of {self._store.name}"

    def read_stored(self, sample: int, box: Box, out: Array) -> None:
        """Consecutive channels are read together."""
        for source, place in parts_of(self._view, box, out):
            self._store.read(sample, source, place)


class OneChannel(DerivedStore):
    """Adds a channel dim of size 1 in front of samples that have none, as convolutions expect."""

    def __init__(self, store: Store) -> None:
        if "C" in store.dims:
            raise DataError(f"{store.name}: its dims {store.dims} already have channels; remove OneChannel")
        super().__init__(store, "C" + store.dims, (1, *store.shape))

    @property
    def stored_chunks(self) -> tuple[int, ...] | None:
        """Those of the store below, with the new dim in front."""
        below = self._store.chunks
        return None if below is None else (1, *below)

    def read_stored(self, sample: int, box: Box, out: Array) -> None:
        """The box without its first dim."""
        self._store.read(sample, box[1:], out[0])


class Labels(DerivedStore):
    """Class numbers as int64, whatever dtype they are stored in.

    Floating-point files are common for labels; a value that is not a whole number is an error that names the sample.
    """

    def __init__(self, store: Store) -> None:
        if store.dtype.kind not in "biuf":
            raise DataError(f"{store.name} holds {store.dtype}, and labels are real whole numbers")
        super().__init__(store, dtype=np.int64)

    def _read(self, sample: int, box: Box, target: Array) -> None:
        Store._read(self, sample, box, target)  # portions of int64, of which wider dtypes are made

    def read_stored(self, sample: int, box: Box, out: Array) -> None:
        """Integers as they are; floating-point numbers only if they are whole."""
        if self._store.dtype.kind != "f":
            self._store.read(sample, box, out)
            return
        numbers = np.empty(shape_of(box), self._store.dtype)
        self._store.read(sample, box, numbers)
        rounded = np.rint(numbers)
        odd = numbers[rounded != numbers]  # NaN too
        if odd.size:
            raise DataError(f"it holds {odd.flat[0]}, and labels are whole numbers; is this the file of the labels?")
        np.copyto(out, rounded, casting="unsafe")
