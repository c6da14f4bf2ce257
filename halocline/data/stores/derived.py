"""Stores made from another store: a channel dim added, classes kept as floating-point numbers read as integers."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import DataError
from ...geometry import Box, shape_of
from .store import Array, Store


class _Derived(Store):
    """What every derived store passes on to the store below."""

    def __init__(self, store: Store, dims: str, shape: tuple[int, ...], dtype: Any) -> None:
        self._store, self.locks = store, store.locks
        self.samples_in_chunk = store.samples_in_chunk
        super().__init__(dims, shape, dtype, order=dims)

    @property
    def name(self) -> str:
        return self._store.name

    @property
    def identity(self) -> str:
        return f"{type(self).__name__} of {self._store.identity}"

    def __len__(self) -> int:
        return len(self._store)

    def where(self, sample: int) -> str:
        return self._store.where(sample)

    def close(self) -> None:
        self._store.close()


class OneChannel(_Derived):
    """Adds a channel dim of size 1 in front of samples that have none, as convolutions expect."""

    def __init__(self, store: Store) -> None:
        if "C" in store.dims:
            raise DataError(f"{store.name}: its dims {store.dims} have channels already; leave OneChannel out")
        super().__init__(store, "C" + store.dims, (1, *store.shape), store.dtype)

    @property
    def stored_chunks(self) -> tuple[int, ...] | None:
        below = self._store.chunks
        return None if below is None else (1, *below)

    def read_stored(self, sample: int, box: Box, out: Array) -> None:
        self._store.read(sample, box[1:], out[0])

    def _read(self, sample: int, box: Box, target: Array) -> None:
        if target.size:
            self._store.read(sample, box[1:], target[0])  # the store below converts dtypes and strides


class Labels(_Derived):
    """Class numbers as int64, whatever dtype they are stored in.

    Floating-point files are common for labels; a value that is not a whole number is an error that names the sample.
    """

    def __init__(self, store: Store) -> None:
        if store.dtype.kind not in "biuf":
            raise DataError(f"{store.name} holds {store.dtype}, and labels are real whole numbers")
        super().__init__(store, store.dims, store.shape, np.int64)

    @property
    def stored_chunks(self) -> tuple[int, ...] | None:
        return self._store.chunks

    def read_stored(self, sample: int, box: Box, out: Array) -> None:
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
