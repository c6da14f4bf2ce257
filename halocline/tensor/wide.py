"""A tile that came with its rim: somebody read more of the sample than the tile, and the first layer need not ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ..geometry import Box, slices
from .fetch import Fetch
from .sharded import ShardedTensor, wrap
from .sharding import Sharding


@dataclass(frozen=True)
class Wide:
    """``tensor`` holds the tile and as much beside it as ``reach`` says for each dim, as far as the sample goes."""

    tensor: Tensor
    reach: tuple[int, ...]
    version: int

    def brought(self, fetch: Fetch, tile: Tensor) -> Tensor | None:
        """What the operation needs, cut out of it; None where it holds too little on any rank, or no longer holds.

        Ranks must go one way: all is decided from what is the same on each, but for the version, which a write on any
        rank's tile raises on all.
        """
        if tile.requires_grad or self.tensor._version != self.version or not fetch.reaches(self.reach):
            return None
        return fetch.cut_out(self.tensor, self.reach)


def wrap_with_rim(wide: Tensor, own: Box, sharding: Sharding, reach: Mapping[int, int]) -> Tensor:
    """The part ``own`` of ``wide`` as the tile of a sharded tensor; a plain tensor where nothing is cut."""
    tile = wide[slices(own)]
    if not sharding.axes:
        return tile
    shell = wrap(tile, sharding)
    if any(reach.values()):
        widths = tuple(reach.get(dim, 0) if sharding.cuts[dim] else 0 for dim in range(len(own)))
        shell._wide = Wide(wide, widths, wide._version)
    return shell


def from_rim(tensor: Tensor, fetch: Fetch, tile: Tensor) -> Tensor | None:
    wide = tensor._wide if isinstance(tensor, ShardedTensor) else None
    return wide.brought(fetch, tile) if isinstance(wide, Wide) else None
