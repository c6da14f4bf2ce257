"""``halocline data info``: what is in a file, and how well a cut can read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.markup import escape

from .data_options import Cut, Dataset, Dims, Source, by_letter
from .output import Debug, Json, clear_errors, fact_table, number_table, print_json, say, size_text, stdout

_WIDE = 120  # columns of a terminal in which all facts of an array fit into one line
_HEADINGS = ("name", "shape", "dims", "dtype", "chunks", "compression", "checksum", "attributes")


def info(
    path: Source,
    dataset: Dataset = None,
    dims: Dims = None,
    cut: Cut = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what is in a file, how it is stored, and how well a cut can read it.

    The command reads only the file's description. With `--cut` it shows how many bytes each rank would read for its
    part of a sample (a rank reads and decodes every chunk that it needs a part of), and recommends chunks for that cut,
    which `halocline data convert` writes.

    **Examples**

    - `halocline data info universe.h5`: the datasets, their shapes, chunks, compression and checksums.

    - `halocline data info universe.h5 --dataset full --dims NCDHW --cut D=2,H=2`: what each of 2 x 2 ranks would read.
    """
    # Imported here, so that help and other commands start without them.
    from ..data.stores.contents import contents
    from ..data.stores.open import files_of, open_store

    with clear_errors("data info", debug):
        wanted = by_letter(cut, "--cut")
        files, kind = files_of(path)
        there = [each for each in contents(files[0]) if dataset is None or each.name == dataset.strip("/")]
        result: dict[str, Any] = {
            "path": path,
            "kind": kind.__name__,
            "files": len(files),
            "arrays": [asdict(each) for each in there],
        }
        # Without dims a store cannot be opened; the description of the file is shown all the same.
        known = len(there) == 1 and there[0].dims is not None
        if known or not there or dims is not None or cut is not None:
            with open_store(path, dims, dataset) as store:
                result["samples"] = _samples(store)
                if wanted is not None:
                    result["cut"] = _cut(store, wanted)
    if as_json:
        print_json(result)
        return
    _show(result, path, cut)
    if "cut" in result and not result["cut"]["aligned"]:
        names = (f"--dataset {dataset} " if dataset else "") + (f"--dims {dims} " if dims else "")
        say(stdout(), f"To write it so: halocline data convert {path} NEW.zarr {names}--cut {cut}")


def _samples(store: Any) -> dict[str, Any]:
    """The samples of a store, for JSON."""
    return {
        "count": len(store),
        "dims": store.dims,
        "shape": list(store.shape),
        "dtype": store.dtype.name,
        "bytes": store.sample_bytes,
        "chunks": None if store.chunks is None else list(store.chunks),
    }


def _cut(store: Any, wanted: Mapping[str, int]) -> dict[str, Any]:
    """What ranks would read of a sample that is cut so, and the chunks that suit that cut, for JSON."""
    from ..data.tools.advise import advised_chunks, reading

    plan = reading(store, wanted)
    advised = advised_chunks(store.stored, store.stored_shape, store.dtype.itemsize, wanted)
    return {
        "parts": dict(wanted),
        "ranks": len(plan.own),
        "own_bytes": list(plan.own),
        "read_bytes": list(plan.read),
        "amplification": [round(each, 4) for each in plan.amplification],
        "worst_amplification": round(plan.worst, 4),
        "aligned": plan.aligned,
        "runs": plan.runs,
        "advised_chunks": dict(zip(store.stored, advised, strict=True)),
    }


def _show(result: Mapping[str, Any], path: str, cut: str | None) -> None:
    """Print the arrays as a table, or on a narrow terminal one below the other, then samples and cut."""
    from ..data.stores.open import dims_example

    files = f" and {result['files'] - 1} more files like the first" if result["files"] > 1 else ""
    title = f"{path}: {result['kind']}{files}"
    if stdout().width < _WIDE:  # one table per array, with a row for each fact
        say(stdout(), f"[bold]{escape(title)}[/bold]")
        for array in result["arrays"]:
            facts = dict(zip(_HEADINGS[1:], map(escape, _row(array)[1:]), strict=True))
            stdout().print(fact_table(escape(array["name"] or "the array"), facts))
    else:
        rows = [tuple(map(escape, _row(array))) for array in result["arrays"]]
        stdout().print(number_table(escape(title), _HEADINGS, rows, texts=_HEADINGS))
    if "samples" in result:
        stdout().print(fact_table("samples, as they are handed out", _sample_facts(result["samples"])))
    else:
        arrays = result["arrays"]
        example = dims_example(len(arrays[0]["shape"]), result["files"]) if arrays else "NCDHW"
        more = "; of several, --dataset too" if len(arrays) > 1 else ""
        say(stdout(), f"For more, name the dims in the order in which they are stored, such as --dims {example}{more}.")
    if "cut" in result:
        stdout().print(fact_table(f"cut {cut}", _cut_facts(result["cut"])))


def _row(array: Mapping[str, Any]) -> tuple[str, ...]:
    """One array's cells, in the order of the headings."""
    attributes = ", ".join(f"{name}={value}" for name, value in array["attributes"].items())
    lies = _sizes(array["chunks"]) + (f" in shards of {_sizes(array['shards'])}" if array["shards"] else "")
    row = (array["name"] or "-", _sizes(array["shape"]), array["dims"] or "?", array["dtype"], lies or "none")
    return (*row, array["compression"] or "none", array["checksum"] or "none", attributes)


def _sample_facts(samples: Mapping[str, Any]) -> dict[str, str]:
    """The rows about samples."""
    return {
        "samples": str(samples["count"]),
        "dims": samples["dims"],
        "shape": _sizes(samples["shape"]),
        "dtype": samples["dtype"],
        "each": size_text(samples["bytes"]),
        "together": size_text(samples["bytes"] * samples["count"]),
        "chunks": _sizes(samples["chunks"]) or "none",
    }


def _cut_facts(cut: Mapping[str, Any]) -> dict[str, str]:
    """The rows about a cut: the rank that reads most for its part counts."""
    worst = max(range(cut["ranks"]), key=lambda rank: cut["amplification"][rank])
    read = size_text(cut["read_bytes"][worst])
    facts = {
        "ranks to a sample": str(cut["ranks"]),
        "a rank's own part": size_text(max(cut["own_bytes"])),
        "read for it, at worst": f"{read} ({cut['worst_amplification']:.2f} times its own)",
        "chunks": "no two ranks read the same" if cut["aligned"] else "some are read by several ranks",
        "advised chunks": " x ".join(f"{letter} {size}" for letter, size in cut["advised_chunks"].items()),
    }
    if cut["runs"] is not None:  # the file has no chunks
        facts["chunks"] = f"none; a part lies in {cut['runs']} stretches of the file"
    return facts


def _sizes(sizes: Any) -> str:
    return " x ".join(map(str, sizes)) if sizes is not None else ""
