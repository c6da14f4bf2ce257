"""``halocline data convert``: data written anew, in chunks that suit a cut, with checksums."""

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
    str | None, typer.Option("--dtype", help="Of the new array. Floating numbers never become integers; all must fit.")
]
Chunks = Annotated[
    str | None, typer.Option("--chunks", metavar="D=64,H=64", help="Sizes by letter; other dims whole, N one by one.")
]
Shards = Annotated[
    str | None, typer.Option("--shards", metavar="D=256", help="Zarr: put chunks together in files of that size.")
]
Level = Annotated[int, typer.Option("--compress", min=0, max=9, help="HDF5: gzip, Zarr: zstd. 0 is none.")]
NewDataset = Annotated[
    str | None, typer.Option("--to-dataset", help="Name of the new dataset; in HDF5 'data' if not given.")
]
Force = Annotated[bool, typer.Option("--force", help="Write over what exists.")]


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
    """Write data anew: another kind of file, other chunks, dims in another order, another dtype.

    Read and written in portions, so that memory does not matter; read back and compared; and named last, so that
    whoever is interrupted leaves nothing half done. HDF5 gets fletcher32, Zarr crc32c: bytes that change on the disk
    are found when they are read. Both remember the letters of their dims. A folder of files becomes one array; a
    NIfTI file's first dim is the width (dims WHD), and its affine is not kept.

    **Examples**

    - `halocline data convert universe.h5 universe.zarr --dims NCDHW --cut D=2,H=2`: in chunks that no two of 2 x 2
      ranks share.

    - `halocline data convert "scans/*.nii.gz" scans.zarr --compress 3`: a folder of volumes as one array.

    - `halocline data convert all.npy "samples/{}.h5" --dims NCDHW`: each sample to a file of its own.
    """
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
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
