"""``halocline data convert``: converts data to chunks that suit a cut, with checksums."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from .data_options import Cut, Dataset, Dims, Source, by_letter, byte_bar
from .output import Debug, Json, clear_errors, fact_table, print_json, size_text, stdout

Target = Annotated[
    str,
    typer.Argument(
        metavar="NEW", help="Ends with .npy, .h5 or .zarr; with {} in it, each sample has a file of its own."
    ),
]
NewDims = Annotated[str | None, typer.Option("--to-dims", metavar="LETTERS", help="Order of the new array's dims.")]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Its dtype. Floats never become integers; all values must fit."),
]
Chunks = Annotated[
    str | None,
    typer.Option("--chunks", metavar="D=64,H=64", help="Chunk sizes by letter; default: whole, and 1 for N."),
]
Shards = Annotated[
    str | None,
    typer.Option("--shards", metavar="D=256", help="Zarr: sizes of shards, which hold several chunks."),
]
Level = Annotated[int, typer.Option("--compress", min=0, max=9, help="HDF5: gzip, Zarr: zstd. 0 is none.")]
NewDataset = Annotated[
    str | None, typer.Option("--to-dataset", help="Name of the new dataset; in HDF5 'data' if not given.")
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]


def convert(
    path: Source,
    new: Target,
    dataset: Dataset = None,
    dims: Dims = None,
    to_dims: NewDims = None,
    dtype: Dtype = None,
    cut: Cut = None,
    chunks: Chunks = None,
    shards: Shards = None,
    compress: Level = 0,
    to_dataset: NewDataset = None,
    force: Force = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert data: to another kind of file, other chunks, another order of dims, another dtype.

    The command converts in portions, so that any size fits in memory, reads the result back and compares it. The new
    file gets its name last, so that an interruption leaves nothing half written. HDF5 files get fletcher32 and Zarr
    arrays crc32c checksums, which detect damage on disk. Both store the letters of their dims. A folder of files
    becomes one array. The first dim of a NIfTI file is the width (dims WHD); its affine is not kept.

    **Examples**

    - `halocline data convert universe.h5 universe.zarr --dims NCDHW --cut D=2,H=2`: in chunks that 2 x 2 ranks do
      not share.

    - `halocline data convert "scans/*.nii.gz" scans.zarr --compress 3`: a folder of volumes as one array.

    - `halocline data convert all.npy "samples/{}.h5" --dims NCDHW`: each sample to a file of its own.
    """
    # Imported here, so that help and other commands start without them.
    from ..data.stores.open import open_store
    from ..data.tools.convert import Wish
    from ..data.tools.convert import convert as write

    started = time.perf_counter()
    with clear_errors("data convert", debug):
        wish = Wish(
            dims=to_dims,
            dtype=dtype,
            chunks=by_letter(chunks, "--chunks"),
            shards=by_letter(shards, "--shards"),
            cut=by_letter(cut, "--cut"),
            level=compress,
            dataset=to_dataset,
        )
        with open_store(path, dims, dataset) as store:
            total = store.sample_bytes * len(store)
            # Twice the bytes: what is written is read back and compared.
            with byte_bar("writing and reading back", 2 * total) as count:
                written = write(store, new, wish, force=force, progress=count)
            samples = len(store)
    size = sum(map(_size, written))
    result = {
        "files": [str(each) for each in written],
        "samples": samples,
        "source_bytes": total,
        "bytes": size,
        "seconds": round(time.perf_counter() - started, 3),
    }
    if as_json:
        print_json(result)
        return
    facts = {
        "samples": str(samples),
        "numbers of the source": size_text(total),
        "on the disk now": size_text(size),
        "seconds": f"{result['seconds']:.1f}, read back and compared",
    }
    stdout().print(fact_table(f"{written[0]}" + (f" and {len(written) - 1} more" if len(written) > 1 else ""), facts))


def _size(path: Path) -> int:
    """The bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]  # a Zarr array is a folder
    return sum(file.stat().st_size for file in files if file.is_file())
