"""Some channels of a store, as a store: the others are not read."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import DataError
from ...geometry import Box, SampleView
from .seen import parts_of
from .store import Array, Store


class ChannelSubset(Store):
    def __init__(self, store: Store, channels: Sequence[int]) -> None:
        if "C" not in store.dims:
            raise DataError(f"{store.name}: channels were asked for, and its dims {store.dims} have no C")
        self._store, self._channels = store, tuple(channels)
        self._view = SampleView.of(store.shape).take(store.dims.index("C"), self._channels)
        self.locks = store.locks
        super().__init__(store.dims, self._view.shape, store.dtype, order=store.dims)

    @property
    def name(self) -> str:
        return f"channels {list(self._channels)} of {self._store.name}"

    @property
    def identity(self) -> str:
        return f"channels {list(self._channels)} of {self._store.identity}"

    def __len__(self) -> int:
        return len(self._store)

    def where(self, sample: int) -> str:
        return self._store.where(sample)

    def close(self) -> None:
        self._store.close()

    def read_stored(self, sample: int, box: Box, out: Array) -> None:
        for source, place in parts_of(self._view, box, out):
            self._store.read(sample, source, place)

    def _read(self, sample: int, box: Box, target: Array) -> None:
        self.read_stored(sample, box, target)  # the store itself knows about strides and dtypes
