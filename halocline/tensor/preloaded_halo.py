"""Tiles whose halo the loader has read with them, so that the first layer need not exchange it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..geometry import Box, slices
from .fetch import Fetch
from .sharded import ShardedTensor, wrap
from .sharding import Sharding


@dataclass(frozen=True)
class PreloadedHalo:
    """``tensor`` holds the tile and as much beside it as ``widths`` says for each dim, as far as the sample goes."""

    tensor: Tensor
    widths: tuple[int, ...]
    version: int

    def brought(self, fetch: Fetch, tile: Tensor) -> Tensor | None:
        """What the operation needs, cut out of it; None where it holds too little on any rank, or no longer holds.

        Ranks must go one way: all is decided from what is the same on each, but for the version, which a write on any
        rank's tile raises on all.
        """
        # A halo that was read from disk has no gradient to send back to its owner.
        if tile.requires_grad or self.tensor._version != self.version or not fetch.reaches(self.widths):
            return None
        return fetch.cut_out(self.tensor, self.widths)


def wrap_with_halo(tile_and_halo: Tensor, own: Box, sharding: Sharding, widths: Mapping[int, int]) -> Tensor:
    """The part ``own`` of ``tile_and_halo`` as the tile of a sharded tensor; a plain tensor where nothing is cut."""
    tile = tile_and_halo[slices(own)]
    if not sharding.axes:
        return tile
    shell = wrap(tile, sharding)
    if any(widths.values()):
        by_dim = tuple(widths.get(dim, 0) if sharding.cuts[dim] else 0 for dim in range(len(own)))
        shell._preloaded_halo = PreloadedHalo(tile_and_halo, by_dim, tile_and_halo._version)
    return shell


def from_preloaded_halo(tensor: Tensor, fetch: Fetch, tile: Tensor) -> Tensor | None:
    """What a fetch needs, if the tensor came with it; None where it must be exchanged."""
    halo = tensor._preloaded_halo if isinstance(tensor, ShardedTensor) else None
    return halo.brought(fetch, tile) if isinstance(halo, PreloadedHalo) else None
