"""One box of one sample to be read: planned by the pipeline, done by a reader in this process or another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...errors import BadSample, DataError
from ...geometry import shape_of, whole
from ..stores.seen import Part
from ..stores.store import PORTION, Array, Store, box_text, can_hold, part_of, portions, put
from .buffers import Memory, Target
from .values import At, Value


@dataclass
class TileJob:
    """Fill ``tile`` with what ``parts`` say; then look at the values, and transform them."""

    store: Store
    sample: int
    tile: Any
    parts: list[Part]
    at: At
    fill: float | None = None  # written first, where the parts do not cover the tile
    check: bool = True
    values: Sequence[Value] = ()
    into: np.dtype[Any] | None = None  # what the numbers will be converted to, where that is done later

    def run(self) -> None:
        """Read all parts, check the values, transform them. Runs in a reader's thread or process."""
        if self.fill is not None:
            self.tile.fill(self.fill)
        for source, target in self.parts:
            self.store.read(self.sample, source, target)
        if self.check:
            check_finite(self.tile, self.store, self.at)
        if self.into is not None:
            check_fits(self.tile, self.into, self.store, self.at)
        transform(self.tile, self.values, self.at)

    def sent(self, memory: Memory) -> TileJob:
        """For another process: targets in place of arrays."""
        parts = [(source, Target.of(target, memory)) for source, target in self.parts]
        return replace(self, tile=Target.of(self.tile, memory), parts=parts)

    def received(self, memory: Array) -> TileJob:
        """The same job in a reader process, whose tile lies on the shared memory."""
        parts = [(source, target.on(memory)) for source, target in self.parts]
        return replace(self, tile=self.tile.on(memory), parts=parts)


def check_finite(tile: Array, store: Store, at: At) -> None:
    """A sum shows whether there is a NaN or infinity, at the speed of memory; one that overflowed is looked into."""
    if tile.dtype.kind not in "fc" or not tile.size:
        return
    values = torch.from_numpy(tile)
    if not _all_finite(torch.sum(values)) and not _all_finite(values):
        wrong = int((~torch.isfinite(values)).sum())
        raise BadSample(
            store.where(at.sample), at.sample, box_text(at.dims, at.box), f"{wrong} of its values are NaN or infinite"
        )


def check_fits(tile: Array, into: np.dtype[Any], store: Store, at: At) -> None:
    """Refuse numbers that another dtype cannot hold now, when all ranks hear of it, and not when one converts them."""
    if np.can_cast(tile.dtype, into, "safe"):
        return
    try:
        for part in portions(tuple(map(whole, tile.shape)), PORTION // into.itemsize, None):
            put(part_of(tile, part), np.empty(shape_of(part), into))
    except DataError as error:
        raise BadSample(store.where(at.sample), at.sample, box_text(at.dims, at.box), str(error)) from error


def _all_finite(values: torch.Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def transform(tile: Array, values: Sequence[Value], at: At) -> None:
    """Apply each value transformation to the tile, in place."""
    if not values or not tile.size:
        return
    before = torch.from_numpy(tile)
    after = before
    for value in values:
        after = value(after, at)
        if after.shape != before.shape:
            raise _changed(value, before, after)
    if not _in_place(before, after):
        _take_over(after, tile, values)


def _in_place(before: torch.Tensor, after: torch.Tensor) -> bool:
    """A view that shows the same memory otherwise (a conjugate) is no change in place."""
    same = after.data_ptr() == before.data_ptr() and after.stride() == before.stride()
    return same and after.dtype == before.dtype and not after.is_conj() and not after.is_neg()


def _take_over(after: torch.Tensor, tile: Array, values: Sequence[Value]) -> None:
    """Put a transform's result into the tile, where it did not work in place."""
    if after.dtype == torch.bfloat16:
        after = after.float()
    numbers = after.detach().resolve_conj().resolve_neg().numpy()
    if not can_hold(numbers.dtype, tile.dtype):
        names = ", ".join(str(value) for value in values)
        raise DataError(
            f"{names}: makes {after.dtype} of {tile.dtype.name}, which would be rounded; give the Field a dtype "
            "that holds it, or round in the transform"
        )
    put(numbers, tile)


def _changed(value: Callable[..., Any], before: torch.Tensor, after: torch.Tensor) -> Exception:
    return ValueError(f"{value} made {list(after.shape)} of a tile of {list(before.shape)}; values keep their shape")
