"""``bench io``: what ranks read, how fast beside the bare library, and how long a step waits for it."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from halocline.errors import DataError
from halocline.testing.pool import RankPool

from .io_ranks import ReadCase, memory_case, read_case, reader_case, waiting_case

#: Channels, depth, height, width of a sample; 256 MiB.
SHAPE = (4, 256, 256, 256)
#: Divides the tile of every cut below.
CHUNKS = (1, 32, 128, 256)
CUTS: tuple[dict[str, int], ...] = ({}, {"D": 2}, {"D": 4}, {"D": 2, "H": 2})
FORMATS = ("hdf5", "zarr")
_DEADLINE = 600.0

Say = Callable[[str], None]


def measure_io(
    gigabytes: float, folder: Path | None, rounds: int, formats: tuple[str, ...] = FORMATS, say: Say = lambda _: None
) -> dict[str, Any]:
    """Every format and cut; at the top the worst of each figure."""
    unknown = [kind for kind in formats if kind not in FORMATS]
    if unknown or not formats:
        raise DataError(f"format {unknown[0] if unknown else ''!r} is none of {', '.join(FORMATS)}")
    samples = max(1, round(gigabytes * 1e9 / (np.prod(SHAPE) * 4)))
    cases, readers = list[dict[str, Any]](), dict[str, float]()
    with _workplace(folder) as place:
        for kind in formats:
            say(f"writing {samples} samples as {kind}")
            path = write_samples(kind, place, samples)
            for cut in CUTS:
                cases.append(_measure(ReadCase(kind, str(path), cut, rounds), samples, say))
        if "hdf5" in formats:
            say("compressed HDF5: readers")
            readers = _measure_readers(write_compressed(place))
    described = {"samples": samples, "sample_shape": SHAPE, "chunks": CHUNKS}
    return {**_worst(cases), **described, "readers": readers, "cases": cases}


@contextmanager
def _workplace(folder: Path | None) -> Iterator[Path]:
    if folder is not None and not folder.is_dir():
        raise DataError(f"{folder} is no folder to write samples into")
    with tempfile.TemporaryDirectory(prefix="halocline-io-", dir=folder) as place:
        yield Path(place)


def write_samples(kind: str, folder: Path, samples: int) -> Path:
    """Random float32 numbers, uncompressed, in chunks that every cut is aligned with."""
    path, rng = folder / f"samples.{'h5' if kind == 'hdf5' else 'zarr'}", np.random.default_rng(0)
    plane = rng.standard_normal(SHAPE[1:], np.float32)
    if kind == "hdf5":
        import h5py

        with h5py.File(path, "w") as file:
            made = file.create_dataset("x", (samples, *SHAPE), "f4", chunks=(1, *CHUNKS))
            _fill(made, plane, samples)
    else:
        import zarr

        _fill(zarr.create_array(str(path), shape=(samples, *SHAPE), dtype="f4", chunks=(1, *CHUNKS), compressors=None),
              plane, samples)  # fmt: skip
    return path


def write_compressed(folder: Path) -> Path:
    """Two samples whose decoding costs more than their reading."""
    import h5py

    path = folder / "compressed.h5"
    plane = np.random.default_rng(0).integers(0, 64, SHAPE[1:]).astype("f4")
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", (2, *SHAPE), "f4", chunks=(1, *CHUNKS), compression="gzip", compression_opts=1)
        _fill(made, plane, 2)
    return path


def _measure_readers(path: Path) -> dict[str, float]:
    """HDF5 reads one box at a time in a process: do several readers pay, as threads or as processes?"""
    case = ReadCase("hdf5", str(path), {})
    with RankPool(1) as pool:
        ways = {"1_thread": (1, False), "2_threads": (2, False), "2_processes": (2, True)}
        return {name: pool.run(reader_case, case, *way, deadline=_DEADLINE)[0] for name, way in ways.items()}


def _fill(array: Any, plane: Any, samples: int) -> None:
    for sample in range(samples):
        for channel in range(SHAPE[0]):
            array[sample, channel] = plane + np.float32(sample + channel / 8)


def _measure(case: ReadCase, samples: int, say: Say) -> dict[str, Any]:
    budget = samples * int(np.prod(SHAPE)) * 4 // case.ranks + 1
    with RankPool(case.ranks) as pool:
        say(f"{case.name}: bytes and throughput")
        read = pool.run(read_case, case, deadline=_DEADLINE)
        say(f"{case.name}: waiting")
        waiting = pool.run(waiting_case, case, case.ranks > 1, deadline=_DEADLINE)
        say(f"{case.name}: from memory")
        held = pool.run(memory_case, case, budget, deadline=_DEADLINE)
    bare, ours = (_slowest(read, which) for which in ("bare", "loader"))
    total = sum(rank["ideal"] for rank in read)
    return {
        "format": case.format,
        "cut": dict(case.cut),
        "ranks": case.ranks,
        "bytes_read_per_rank": max(rank["read"] for rank in read),
        "ideal_bytes_per_rank": max(rank["ideal"] for rank in read),
        "bytes_ratio": max(rank["read"] / rank["ideal"] for rank in read),
        "bare_gb_per_s": total / statistics.median(bare) / 1e9,
        "gb_per_s": total / statistics.median(ours) / 1e9,
        "throughput_ratio": statistics.median(b / o for b, o in zip(bare, ours, strict=True)),
        "first_epoch_gb_per_s": total / max(rank["first"] for rank in read) / 1e9,
        "epoch1_disk_bytes": max(rank["epoch1"] for rank in held),
        "held_share": min(rank["held_share"] for rank in held),
        "wait_share": max(rank["wait_share"] for rank in waiting),
        "step_seconds": max(rank["step_seconds"] for rank in waiting),
    }


def _slowest(ranks: list[dict[str, Any]], which: str) -> list[float]:
    """An epoch is over when its last rank is done."""
    return [max(times) for times in zip(*(rank[which] for rank in ranks), strict=True)]


def _worst(cases: list[dict[str, Any]]) -> dict[str, Any]:
    most = max(cases, key=lambda case: case["bytes_ratio"])
    return {
        "bytes_read_per_rank": most["bytes_read_per_rank"],
        "ideal_bytes_per_rank": most["ideal_bytes_per_rank"],
        "bytes_ratio": most["bytes_ratio"],
        "throughput_ratio": min(case["throughput_ratio"] for case in cases),
        "epoch1_disk_bytes": max(case["epoch1_disk_bytes"] for case in cases),
        "wait_share": max(case["wait_share"] for case in cases),
    }
