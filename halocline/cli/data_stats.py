"""``halocline data stats``: means, deviations and classes of a data set, saved beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .data_options import Dataset, Dims, Source, byte_bar
from .output import Debug, Json, clear_errors, number_table, print_json, say, stdout

Classes = Annotated[
    bool, typer.Option("--classes", help="Count how often each value occurs (integers, at most 1024 values).")
]
Jobs = Annotated[int, typer.Option("--jobs", min=1, help="Processes that read and compute; one for small data.")]
Save = Annotated[Path | None, typer.Option("--save", help="File to write. Default: NAME.stats.json beside the data.")]

_SMALL = 1 << 28  # bytes that are read before other processes have started


def stats(
    path: Source,
    dataset: Dataset = None,
    dims: Dims = None,
    classes: Classes = False,
    jobs: Jobs = 2,
    save: Save = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compute the statistics of each channel and save them beside the data, for normalisation and class weights.

    One pass over the data computes, in float64, the count, mean, standard deviation, minimum and maximum, and the
    number of NaN and infinite values. `hc.data.Statistics.load(store)` loads them, and refuses those of other data.

    **Examples**

    - `halocline data stats universe.h5 --dataset full --dims NCDHW --jobs 8`: saved in `universe.h5.stats.json`.

    - `halocline data stats labels.zarr --classes`: how often each class occurs, and weights for a loss: 1 / sqrt of
      the frequency, scaled to sum 1.
    """
    # Imported here, so that help and other commands start without them.
    from ..data.stores.open import open_store
    from ..data.tools.statistics import Statistics, beside

    with clear_errors("data stats", debug), open_store(path, dims, dataset) as store:
        total = store.sample_bytes * len(store)
        with byte_bar("reading", total) as count:
            statistics = Statistics.of(store, classes=classes, jobs=jobs if total > _SMALL else 1, progress=count)
        place = save or beside(store)
        statistics.save(place)
    if as_json:
        classes_of = statistics.frequencies if statistics.classes is not None else None
        frequencies = None if classes_of is None else {str(value): share for value, share in classes_of.items()}
        print_json({**statistics.as_json(), "frequencies": frequencies, "file": str(place)})
        return
    _show(statistics)
    say(stdout(), f"kept in {place}")


def _show(statistics: Any) -> None:
    """Print a row for each channel and, if classes were counted, for each class."""
    rows = []
    for channel, count in enumerate(statistics.count):
        numbers = (column[channel] for column in (statistics.mean, statistics.std, statistics.min, statistics.max))
        bad = f"{statistics.nonfinite[channel]:,}"
        rows.append([str(channel), f"{count:,}", *(f"{each:.6g}" for each in numbers), bad])
    headings = ("channel", "count", "mean", "std", "min", "max", "not finite")
    source = statistics.source
    stdout().print(number_table(f"{source.samples} samples, {source.dtype}", headings, rows))
    if statistics.classes is None:
        return
    usable = statistics.classes and min(statistics.classes) >= 0
    weights = statistics.class_weights().tolist() if usable else None
    rows = []
    for value, count in statistics.classes.items():
        weight = f"{weights[value]:.4f}" if weights is not None else "-"
        rows.append([str(value), f"{count:,}", f"{statistics.frequencies[value]:.6f}", weight])
    stdout().print(number_table("classes", ("value", "count", "frequency", "weight"), rows))
