"""Some consecutive samples of a store, as a store: those for training, and those that are kept for validation."""

from __future__ import annotations

from ...errors import DataError
from ...geometry import Box, Interval
from .store import Array, Store


class SampleRange(Store):
    def __init__(self, store: Store, samples: Interval) -> None:
        if samples.lo < 0 or samples.hi > len(store) or samples.empty:
            raise DataError(f"{store.name}: samples {samples.lo} to {samples.hi} of {len(store)} are none")
        self._store, self._samples = store, samples
        self.locks = store.locks
        super().__init__(store.dims, store.shape, store.dtype, order=store.dims)

    @property
    def name(self) -> str:
        return f"samples {self._samples.lo} to {self._samples.hi - 1} of {self._store.name}"

    @property
    def chunks(self) -> tuple[int, ...] | None:
        return self._store.chunks

    def __len__(self) -> int:
        return self._samples.size

    def where(self, sample: int) -> str:
        return self._store.where(sample + self._samples.lo)

    def close(self) -> None:
        self._store.close()

    def read_stored(self, sample: int, box: Box, out: Array) -> None:
        self._store.read(sample + self._samples.lo, box, out)

    def _read(self, sample: int, box: Box, target: Array) -> None:
        self.read_stored(sample, box, target)  # the store itself knows about strides and dtypes
