"""What a cut makes each rank read, and how data should be chunked for it.

A chunk is read and decoded whole, by every rank that needs a part of it. Chunks that no two ranks share cost nothing
extra.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

from ...errors import DataError
from ...geometry import Box, Interval, Partition, shape_of, whole
from ..stores.store import Store

Cut = Mapping[str, int]  # into how many parts, by letter

#: Bytes of a chunk: large enough for a disk, small enough that a few fit into a cache.
SMALLEST, LARGEST = 1 << 20, 1 << 22
#: The advice should hold for so many times as many ranks, too.
_MORE_RANKS = (4, 2, 1)


@dataclass(frozen=True)
class Reading:
    """What the ranks that share a sample read of it: bytes of their own tile, and bytes of all chunks touched."""

    own: tuple[int, ...]
    read: tuple[int, ...]
    #: Stretches of consecutive bytes that a tile consists of, where there are no chunks: each may be a request.
    runs: int | None
    #: No chunk is needed by two ranks.
    aligned: bool

    @property
    def amplification(self) -> tuple[float, ...]:
        """By rank: bytes of all chunks touched over bytes of the own tile."""
        return tuple(read / own if own else 1.0 for own, read in zip(self.own, self.read, strict=True))

    @property
    def worst(self) -> float:
        """The largest amplification of any rank."""
        return max(self.amplification)


def tiles(dims: str, shape: Sequence[int], cut: Cut) -> list[Box]:
    """The tile of each rank, every dim as evenly cut as can be."""
    unknown = [letter for letter in cut if letter not in dims]
    if unknown or any(parts < 1 for parts in cut.values()):
        what = f"there is no dim {unknown[0]}" if unknown else "parts are counted from 1"
        raise DataError(f"cut {dict(cut)} of dims {dims}: {what}; give letters and numbers of parts, such as D=2,H=2")
    lines = [Partition.even(size, cut.get(letter, 1)).pieces() for letter, size in zip(dims, shape, strict=True)]
    return list(product(*lines))


def reading(store: Store, cut: Cut) -> Reading:
    """What ranks that cut a sample so would read of it."""
    boxes = tiles(store.stored, store.stored_shape, cut)
    own = tuple(prod(shape_of(box)) * store.dtype.itemsize for box in boxes)
    chunks = store.stored_chunks
    if chunks is None:
        return Reading(own, own, max(_runs(box, store.stored_shape) for box in boxes), aligned=True)
    touched = [_touched(box, chunks, store.stored_shape) for box in boxes]
    read = tuple(prod(shape_of(box)) * store.dtype.itemsize * store.samples_in_chunk for box in touched)
    return Reading(own, read, None, aligned=read == own)


def _touched(box: Box, chunks: Sequence[int], shape: Sequence[int]) -> Box:
    """The box grown to whole chunks."""
    grown = (Interval(i.lo // c * c, -(-i.hi // c) * c) for i, c in zip(box, chunks, strict=True))
    return tuple(g.intersect(whole(n)) if not i.empty else i for i, g, n in zip(box, grown, shape, strict=True))


def _runs(box: Box, shape: Sequence[int]) -> int:
    """The dims before the last that is not whole are stepped through one by one."""
    partial = [dim for dim, (i, size) in enumerate(zip(box, shape, strict=True)) if i.size != size]
    return prod(i.size for i in box[: partial[-1]]) if partial else 1


def advised_chunks(dims: str, shape: Sequence[int], itemsize: int, cut: Cut) -> tuple[int, ...]:
    """Chunks of 1 to 4 MiB that no two ranks share, if there are such; with ``dims`` in the order in which they lie.

    Also for twice and four times as many parts, where these cut evenly. Trailing dims are kept whole if possible: so
    the rows of a chunk are long. Where a dim is cut so that only tiny chunks would fit (100 into 3), chunks are shared.

    >>> advised_chunks("CDHW", (4, 512, 512, 512), 2, {"D": 2, "H": 2})
    (1, 64, 64, 512)
    """
    tiles(dims, shape, cut)
    options = [_sizes(size, cut.get(letter, 1)) for letter, size in zip(dims, shape, strict=True)]
    steps = [sizes[0] for sizes in options]
    for level, dim in product(
        range(1, len(_MORE_RANKS)), reversed(range(len(steps)))
    ):  # too small: trailing dims first
        size = options[dim][min(level, len(options[dim]) - 1)]
        if prod(steps) * itemsize < SMALLEST and prod(steps) // steps[dim] * size * itemsize <= LARGEST:
            steps[dim] = size
    for dim, size in enumerate(steps):  # too large: less of the leading dims first
        times = -(-prod(steps) * itemsize // LARGEST)
        if times > 1:
            steps[dim] = _part(size, times, aligned=dims[dim] in cut)
    return tuple(steps)


def _sizes(size: int, parts: int) -> list[int]:
    """Chunk sizes that fit a dim cut into ``parts``: the one for most ranks first, each dividing the next."""
    if parts == 1 or size == 0:
        return [max(1, size)]
    # The largest size of which all cut points are multiples.
    common = [gcd(*Partition.even(size, parts * more).points[1:-1]) for more in _MORE_RANKS if parts * more <= size]
    tile = max(1, size // parts)
    fitting = [divisor for divisor in common if 4 * divisor >= tile]
    return fitting or [-(-tile // 8)]


def _part(size: int, times: int, aligned: bool) -> int:
    """At most one part in ``times``: a divisor of ``size`` if chunks must not cross the cut, else as even as can be."""
    if times >= size:
        return 1
    if not aligned:
        return -(-size // -(-size // (size // times)))
    return max(part for part in range(1, size // times + 1) if size % part == 0)
