"""Converts from one kind of file to another, in portions: no array is ever held whole.

What is written has a checksum for every chunk (except npy, which has none), is read back and compared, and gets its
name only then: a process that is killed on the way leaves nothing under that name.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import DataError
from ...geometry import Box, shape_of, slices, whole
from ..stores.files import FileStore, Index
from ..stores.store import SAMPLES, Array, Store, can_hold, portions
from .advise import advised_chunks
from .writers import ArraySpec, ArrayWriter, HDF5Writer, NpyWriter, ZarrWriter, writer_of

Progress = Callable[[int], None]  # called with the bytes (of the source) that were written, or read back, since

_AT_A_TIME = 1 << 24  # bytes, or one chunk (or shard) if that is more


@dataclass(frozen=True)
class Wish:
    """How the new array should lie; what is left out is decided by ``convert``.

    ``dims``: the order, with N for the samples. ``chunks`` and ``shards``: sizes by letter, other dims whole and N one
    by one. ``cut``: parts by letter, for which chunks are chosen. ``level``: of compression, 0 for none.
    """

    dims: str | None = None
    dtype: str | None = None
    chunks: Mapping[str, int] | None = None
    shards: Mapping[str, int] | None = None
    cut: Mapping[str, int] | None = None
    level: int = 0
    dataset: str | None = None


def convert(
    source: Store,
    target: str | Path,
    wish: Wish | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> list[Path]:
    """Write all samples to ``target``, one array; or, with ``{}`` in its name, each to a file of its own.

    ``{}`` stands for the name of the sample's own file, or for its number. Returns the files that were written.
    """
    wish = wish or Wish()
    if "{}" not in str(target):
        whole_plan = planned(source, Path(target), wish, len(source))
        _written(source, range(len(source)), Path(target), whole_plan, force, progress)
        return [Path(target)]
    paths = [Path(str(target).replace("{}", name)) for name in _names(source)]
    plan = planned(source, paths[0], wish, None)
    for path in paths:
        _refuse_existing(path, source, force)
    for sample, path in enumerate(paths):
        _written(source, range(sample, sample + 1), path, plan, force, progress)
    return paths


def planned(source: Store, target: Path, wish: Wish, samples: int | None) -> ArraySpec:
    """``samples``: how many go along N; None where each has a file of its own."""
    writer = writer_of(target)
    if not 0 <= wish.level <= 9:
        raise DataError(f"compression={wish.level}: give a level from 0 (none) to 9")
    # A single sample from a file without N stays without N.
    one = samples is None or (samples == 1 and getattr(source, "_at", -1) < 0)
    dims = wish.dims or (source.dims if one else SAMPLES + source.dims)
    if sorted(dims.replace(SAMPLES, "", 1)) != sorted(source.dims) or (SAMPLES in dims and samples is None):
        raise DataError(f"dims {dims!r} must hold the letters {source.dims}{'' if one else ' and N'}, each once")
    if SAMPLES not in dims and samples not in (1, None):
        raise DataError(f"{samples} samples go into one array with N among its dims, or to files named with {{}}")
    shape = tuple((1 if samples is None else samples) if letter == SAMPLES else source.size(letter) for letter in dims)
    dtype = _dtype(source, wish.dtype)
    plan = ArraySpec(dims, shape, dtype, _chunks(dims, shape, dtype.itemsize, wish), level=wish.level)
    if wish.shards is not None:
        plan = replace(plan, shards=_shards(plan, writer, wish.shards))
    if writer is NpyWriter and (wish.chunks or wish.level or wish.dataset):
        raise DataError(f"{target}: an npy file has no chunks, no compression and no names; write .h5 or .zarr")
    return replace(plan, dataset=wish.dataset or ("data" if writer is HDF5Writer else ""))


def _dtype(source: Store, wanted: str | None) -> np.dtype[Any]:
    """The dtype to write; raises where it cannot hold the source's numbers."""
    try:
        dtype = np.dtype(wanted or source.dtype).newbyteorder("=")
    except TypeError:
        raise DataError(f"dtype {wanted!r} is unknown to numpy; try float32 or int16") from None
    if not can_hold(source.dtype, dtype):
        raise DataError(f"{source.name} holds {source.dtype.name}, which does not fit {dtype.name} without loss")
    return dtype


def _chunks(dims: str, shape: tuple[int, ...], itemsize: int, wish: Wish) -> tuple[int, ...]:
    """The chunks asked for, or those advised for the cut."""
    sizes = dict(zip(dims, shape, strict=True))
    if wish.chunks is not None:
        chosen = _by_letter(wish.chunks, sizes, "chunks")
    else:
        own = dims.replace(SAMPLES, "")
        advised = advised_chunks(own, [sizes[letter] for letter in own], itemsize, wish.cut or {})
        chosen = {SAMPLES: 1, **dict(zip(own, advised, strict=True))}
    return tuple(chosen[letter] for letter in dims)


def _shards(plan: ArraySpec, writer: type, wanted: Mapping[str, int]) -> tuple[int, ...]:
    """Whole numbers of chunks, so that none is cut: the dims that are not named hold as many chunks as they need."""
    if writer is not ZarrWriter:
        raise DataError("only Zarr has shards: give a target that ends with .zarr")
    chunks = dict(zip(plan.dims, plan.chunks, strict=True))
    rounded = {
        letter: -(-size // chunks[letter]) * chunks[letter] for letter, size in zip(plan.dims, plan.shape, strict=True)
    }
    chosen = _by_letter(wanted, rounded, "shards")
    wrong = next((letter for letter in plan.dims if chosen[letter] % chunks[letter]), None)
    if wrong is not None:
        raise DataError(f"shards of {chosen[wrong]} along {wrong} cut chunks of {chunks[wrong]}; take a multiple")
    return tuple(chosen[letter] for letter in plan.dims)


def _by_letter(wanted: Mapping[str, int], sizes: Mapping[str, int], what: str) -> dict[str, int]:
    """Sizes for all dims: those given, whole dims otherwise, samples one by one."""
    wrong = [letter for letter, size in wanted.items() if letter not in sizes or size < 1]
    if wrong:
        raise DataError(f"{what} {dict(wanted)}: {wrong[0]} is no dim of {''.join(sizes)}, or its size is under 1")
    given = {letter: min(size, max(1, sizes[letter])) for letter, size in wanted.items()}
    return {letter: max(1, size) for letter, size in sizes.items()} | {SAMPLES: 1} | given


def _names(source: Store) -> list[str]:
    """Names for files of single samples: those of the source's files, or numbers."""
    if isinstance(source, FileStore) and len(source.paths) == len(source):
        names = [path.name.removesuffix(".gz").rsplit(".", 1)[0] for path in source.paths]
        if len(set(names)) == len(names):
            return names
    return [str(number).zfill(len(str(len(source) - 1))) for number in range(len(source))]


def _written(
    source: Store, samples: range, target: Path, plan: ArraySpec, force: bool, progress: Progress | None
) -> None:
    """Write one file, read it back, compare, and give it its name."""
    _refuse_existing(target, source, force)
    with _under_another_name(target) as path:
        writer = writer_of(target)(path, plan)
        try:
            sums = [_copied(source, samples, part, plan, writer, progress) for part in _parts(plan, len(samples))]
        finally:
            writer.close()
        with writer.opened() as back:
            _compare(back, _parts(plan, len(samples)), sums, target, progress, source.dtype.itemsize)


Part = tuple[int, Box]  # a sample, and a box of it in the order in which it will lie


def _parts(plan: ArraySpec, samples: int) -> Iterator[Part]:
    """The boxes of all samples, each small enough to hold and made of whole chunks."""
    at = plan.dims.find(SAMPLES)
    box = tuple(whole(size) for dim, size in enumerate(plan.shape) if dim != at)
    grid = tuple(size for dim, size in enumerate(plan.shards or plan.chunks) if dim != at)
    for sample in range(samples):
        for part in portions(box, _AT_A_TIME // plan.dtype.itemsize, grid):
            yield sample, part


def _copied(
    source: Store, samples: range, part: Part, plan: ArraySpec, writer: ArrayWriter, progress: Progress | None
) -> int:
    """Copy one box, turned to the new order of dims; the checksum of what was written."""
    sample, box = part
    own = plan.dims.replace(SAMPLES, "")
    numbers = np.empty(shape_of(box), plan.dtype)
    # The source fills the array in its own order of dims.
    turned = [own.index(letter) for letter in source.dims]
    source.read(samples[sample], tuple(box[dim] for dim in turned), numbers.transpose(turned))
    _refuse_lost_digits(source, samples[sample], numbers)
    writer.write(_index(plan, sample, box), numbers)
    if progress is not None:
        progress(numbers.size * source.dtype.itemsize)
    return zlib.crc32(numbers.data)


def _refuse_lost_digits(source: Store, sample: int, numbers: Array) -> None:
    """Of integers that became floating."""
    if source.dtype.kind in "iu" and numbers.dtype.kind == "f" and numbers.size:
        most = 2 ** (np.finfo(numbers.dtype).nmant + 1)
        if np.abs(numbers).max() > most:
            raise DataError(
                f"{source.where(sample)} holds integers beyond {most}, of which {numbers.dtype} loses digits; "
                "take a wider dtype"
            )


def _index(plan: ArraySpec, sample: int, box: Box) -> Index:
    """Where a sample's box lies in the new array."""
    index: list[slice | int] = list(slices(box))
    if SAMPLES in plan.dims:
        index.insert(plan.dims.index(SAMPLES), sample)
    return tuple(index)


def _compare(
    back: Store, parts: Iterator[Part], sums: list[int], target: Path, progress: Progress | None, itemsize: int
) -> None:
    """Read everything back and compare checksums."""
    for (sample, box), wanted in zip(parts, sums, strict=True):
        numbers = back.read_new(sample, box)
        if zlib.crc32(numbers.data) != wanted:
            raise DataError(f"{target}: sample {sample} reads back differently from what was written; check the disk")
        if progress is not None:
            progress(numbers.size * itemsize)


def _refuse_existing(target: Path, source: Store, force: bool) -> None:
    """Raise rather than overwrite a file without ``force``, or the source itself ever."""
    if target.exists() and not force:
        raise DataError(f"{target} exists; give --force to overwrite it")
    if any(target.absolute() == path.absolute() for path in getattr(source, "paths", ())):
        raise DataError(f"{target} is the source itself; write to another name")


@contextmanager
def _under_another_name(target: Path) -> Iterator[Path]:
    """A name beside the target, which becomes the target's when all went well, and is removed when not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    path, old = (target.with_name(f".{target.name}.{os.getpid()}.{word}") for word in ("part", "old"))
    try:
        yield path
        if not target.is_dir():
            _to_disk(path)
            path.replace(target)
            return
        target.rename(old)  # a folder cannot be replaced in one step
        try:
            path.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old)
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _to_disk(path: Path) -> None:
    """Before it gets its name: a machine that goes down leaves no empty file under it."""
    if path.is_file():
        with path.open("rb") as file:
            os.fsync(file.fileno())
