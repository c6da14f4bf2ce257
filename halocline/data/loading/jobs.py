"""One box of one sample, to be read: planned here, done by a reader, in this process or another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import BadSample
from ..stores.seen import Part
from ..stores.store import Array, Store, box_text
from .buffers import Memory, Target
from .values import At, Value


@dataclass
class Job:
    """Fill ``tile`` with what ``parts`` say; then look at the values, and transform them."""

    store: Store
    sample: int
    tile: Any
    parts: list[Part]
    at: At
    fill: float | None = None  # written first, where the parts do not cover the tile
    check: bool = True
    values: Sequence[Value] = ()

    def run(self) -> None:
        if self.fill is not None:
            self.tile.fill(self.fill)
        for source, target in self.parts:
            self.store.read(self.sample, source, target)
        if self.check:
            check_finite(self.tile, self.store, self.at)
        transform(self.tile, self.values, self.at)

    def sent(self, memory: Memory) -> Job:
        """For another process: targets in place of arrays."""
        parts = [(source, Target.of(target, memory)) for source, target in self.parts]
        return replace(self, tile=Target.of(self.tile, memory), parts=parts)

    def received(self, memory: Array) -> Job:
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


def _all_finite(values: torch.Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def transform(tile: Array, values: Sequence[Value], at: At) -> None:
    if not values or not tile.size:
        return
    before = torch.from_numpy(tile)
    after = before
    for value in values:
        after = value(after, at)
        if after.shape != before.shape:
            raise _changed(value, before, after)
    if after.data_ptr() != before.data_ptr() or after.dtype != before.dtype:
        before.copy_(after)


def _changed(value: Callable[..., Any], before: torch.Tensor, after: torch.Tensor) -> Exception:
    return ValueError(f"{value} made {list(after.shape)} of a tile of {list(before.shape)}; values keep their shape")
