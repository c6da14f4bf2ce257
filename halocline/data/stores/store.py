"""A store: samples of one shape and dtype, of which any box is read straight into a given array.

A new kind of store implements ``read_stored``, which reads a box in the order in which it lies. The base class takes
care of the order of dims that the user wants, of other dtypes, and of arrays with any strides.
``halocline.testing.StoreTests`` proves a new store.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from ...errors import BadSample, DataError, HaloclineError, first_line
from ...geometry import Box, Interval, shape_of, slices, whole

Array = np.ndarray[Any, Any]

#: The order in which dims are handed out: channels, time, then space.
ORDER = "CTDHW"
SAMPLES = "N"

#: Bytes read at a time where what is read must be turned or converted: it stays in the cache of a core meanwhile.
PORTION = 1 << 20


class Store(ABC):
    """Samples of one shape and dtype.

    ``dims`` names the dims of a sample as they are handed out, a letter each, and ``shape`` their sizes. ``stored``
    names them as they lie. Both without ``N``, the dim of the samples. Reading is thread-safe; a store can be pickled,
    and opens its files again in the other process.
    """

    #: Must one process read one box at a time, whatever its threads do?
    locks = False
    #: How many samples lie in one chunk, which is decoded whole for each of them.
    samples_in_chunk = 1

    def __init__(self, stored: str, shape: Sequence[int], dtype: Any, order: str | None = None) -> None:
        self.stored, self.stored_shape = stored, tuple(shape)
        self.dims = _delivered(stored, order)
        self.dtype = np.dtype(dtype)
        self._turned = tuple(stored.index(letter) for letter in self.dims)
        self._back = tuple(self.dims.index(letter) for letter in stored)
        if len(self.stored_shape) != len(stored):
            raise DataError(
                f"{self.name}: dims {stored!r} name {len(stored)} dims, and a sample has {len(self.stored_shape)} "
                f"of sizes {list(self.stored_shape)}; name each by a letter, with N for the dim of the samples"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of a sample's dims, in the order of ``dims``."""
        return tuple(self.stored_shape[dim] for dim in self._turned)

    @property
    def name(self) -> str:
        """In a few words, for people."""
        return type(self).__name__

    @property
    def identity(self) -> str:
        """All that says which samples these are, in order: ranks compare it."""
        return self.name

    @property
    def stored_chunks(self) -> tuple[int, ...] | None:
        """The box that is read and decoded in one piece, in the order in which it lies; None where there is none."""
        return None

    @property
    def chunks(self) -> tuple[int, ...] | None:
        """The chunk's sizes, in the order of ``dims``; None where there are no chunks."""
        stored = self.stored_chunks
        return None if stored is None else tuple(stored[dim] for dim in self._turned)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample in the store's dtype."""
        return prod(self.shape) * self.dtype.itemsize

    def size(self, letter: str) -> int:
        """The size of a dim by its letter."""
        return self.shape[self.dims.index(letter)]

    @abstractmethod
    def __len__(self) -> int:
        """How many samples."""

    @abstractmethod
    def read_stored(self, sample: int, box: Box, out: Array) -> None:
        """Fill ``out`` (contiguous, of the store's dtype) with ``box``, both in the order in which the data lie."""

    def where(self, sample: int) -> str:
        """Where a sample lies, for errors: the file, and what in it."""
        return self.name

    def close(self) -> None:  # noqa: B027  most have none
        """Close open files; reading opens them again."""

    def __repr__(self) -> str:
        """<HDF5 train.h5: 24 samples of C 1, D 16, H 16, W 16, float32>"""
        sizes = ", ".join(f"{letter} {size}" for letter, size in zip(self.dims, self.shape, strict=True))
        return f"<{self.name}: {len(self)} samples of {sizes or 'one number'}, {self.dtype}>"

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, sample: int, box: Box, out: Array) -> None:
        """Fill ``out`` with ``box`` of a sample; ``out`` may have any strides, and any dtype that numbers go into."""
        self._check(sample, box, out)
        # The caller's array as the data lie: turning it costs nothing.
        target = out.transpose(self._back)
        lies = tuple(box[dim] for dim in self._back)
        try:
            self._read(sample, lies, target)
        except (BadSample, MemoryError):
            raise
        except Exception as error:  # whatever the library of a format raises: a bad sample, with its name
            raise BadSample(self.where(sample), sample, box_text(self.dims, box), reason(error)) from error

    def _check(self, sample: int, box: Box, out: Array) -> None:
        """Raise where sample, box or array do not fit this store."""
        if not 0 <= sample < len(self):
            raise DataError(f"{self.name}: there is no sample {sample}; it has {len(self)}")
        if len(box) != len(self.shape) or not all(whole(n).contains(i) for n, i in zip(self.shape, box, strict=True)):
            raise DataError(f"{self.name}: box {box_text(self.dims, box)} lies outside a sample of {list(self.shape)}")
        if out.shape != shape_of(box):
            raise DataError(f"{self.name}: an array of {list(out.shape)} was given for a box of {list(shape_of(box))}")
        if not can_hold(self.dtype, out.dtype):
            raise DataError(
                f"{self.name}: {self.dtype.name} does not fit {out.dtype.name} without loss; ask for another dtype"
            )

    def _read(self, sample: int, box: Box, target: Array) -> None:
        """Straight into the target where it has the store's dtype and is contiguous.

        Else in portions through a buffer.
        """
        if not target.size:
            return
        if target.dtype == self.dtype and target.flags.c_contiguous:
            self.read_stored(sample, box, target)
            return
        for part in portions(box, PORTION // max(1, self.dtype.itemsize), self.stored_chunks):
            own = tuple(i.shift(-all_of.lo) for i, all_of in zip(part, box, strict=True))
            with _scratch(shape_of(part), self.dtype) as spare:
                self.read_stored(sample, part, spare)
                put(spare, part_of(target, own))

    def read_new(self, sample: int, box: Box | None = None) -> Array:
        """A new array with the box, or with the whole sample."""
        box = box or tuple(map(whole, self.shape))
        out = np.empty(shape_of(box), self.dtype)
        self.read(sample, box, out)
        return out


def _delivered(stored: str, order: str | None) -> str:
    """The order in which dims are returned; raises for letters that repeat or have no known order."""
    unknown = sorted(set(stored) - set(ORDER)) if order is None else []
    if len(set(stored)) != len(stored) or SAMPLES in stored:
        raise DataError(f"dims {stored!r} must name each dim of a sample by a different letter")
    if unknown:
        raise DataError(
            f"dims {stored!r}: only {', '.join(ORDER)} have a known order, not {', '.join(unknown)}; "
            "give the order of the dims with order=..."
        )
    wanted = order if order is not None else "".join(letter for letter in ORDER if letter in stored)
    if sorted(wanted) != sorted(stored):
        raise DataError(f"order {order!r} must hold the letters of dims {stored!r}, each once")
    return wanted


def part_of(array: Array, box: Box) -> Array:
    """A view of it; of an array of no dims as well, which plain indexing makes a number of."""
    index: Any = (*slices(box), ...)
    part: Array = array[index]
    return part


def can_hold(stored: np.dtype[Any], wanted: np.dtype[Any]) -> bool:
    """Nothing floating becomes an integer behind the user's back; integers may become others, and ``put`` looks."""
    if stored == wanted or np.can_cast(stored, wanted, "same_kind"):
        return True
    return stored.kind in "biu" and wanted.kind in "iufc"


def put(numbers: Array, target: Array) -> None:
    """Copy into an array of another dtype, and refuse numbers that are too large for it."""
    if target.dtype.kind in "iu" and not np.can_cast(numbers.dtype, target.dtype, "safe") and numbers.size:
        limits = np.iinfo(target.dtype)
        outside = [n for n in (int(numbers.min()), int(numbers.max())) if not limits.min <= n <= limits.max]
        if outside:
            raise DataError(f"it holds {outside[0]}, which {target.dtype} cannot hold; ask for a wider dtype")
    try:
        with np.errstate(over="raise", invalid="ignore"):
            np.copyto(target, numbers, casting="unsafe")
    except FloatingPointError:
        raise DataError(f"it holds numbers too large for {target.dtype}; ask for a wider dtype") from None


def portions(box: Box, most: int, chunks: Sequence[int] | None) -> Iterator[Box]:
    """The box in parts of some ``most`` elements that share no chunk, so that none is decoded twice."""
    steps = list(shape_of(box))
    grid = list(chunks) if chunks is not None else [1] * len(steps)
    for dim in range(len(steps)):
        rest = prod(steps) // max(1, steps[dim])
        # Whole chunks along each dim, from the first: later dims stay long, as rows lie.
        steps[dim] = min(steps[dim], max(grid[dim], most // max(1, rest) // grid[dim] * grid[dim]))
    yield from _tiles(box, steps, grid)


def _tiles(box: Box, steps: Sequence[int], grid: Sequence[int]) -> Iterator[Box]:
    """Cut at multiples of the grid, counted from the origin of the sample."""
    if not box:
        yield ()
        return
    lo, hi = box[0]
    while lo < hi:
        step = max(1, steps[0])
        end = (lo + step) // grid[0] * grid[0]
        end = min(hi, end if end > lo else lo + step)
        for rest in _tiles(box[1:], steps[1:], grid[1:]):
            yield (Interval(lo, end), *rest)
        lo = end


_spare = threading.local()


@contextmanager
def _scratch(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Array]:
    """Memory of this thread's own, kept for the next time. Taken away meanwhile: a store may read by another store."""
    size = prod(shape) * dtype.itemsize
    kept: Array | None = getattr(_spare, "memory", None)
    _spare.memory = None
    if kept is None or kept.nbytes < size:
        kept = np.empty(max(size, PORTION), np.uint8)
    try:
        yield kept[:size].view(dtype).reshape(shape)
    finally:
        _spare.memory = kept


def box_text(dims: str, box: Box) -> str:
    """``C[0:4] D[0:32]``, for errors."""
    return " ".join(f"{letter}[{i.lo}:{i.hi}]" for letter, i in zip(dims, box, strict=False)) or "all"


def reason(error: BaseException) -> str:
    """The first line of an error, with its type where the error is not one of ours."""
    name, line = type(error).__name__, first_line(error)
    return line if isinstance(error, HaloclineError) or line == name else f"{name}: {line[:300]}"
