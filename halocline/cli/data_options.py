"""What the commands for data share: their options, and a progress bar that counts bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ..errors import ConfigError
from .output import progress_console
from .parsing import parse_sizes

Source = Annotated[
    str, typer.Argument(metavar="PATH", help="A file (.h5, .zarr, .npy, .nii), a folder of them, or a quoted pattern.")
]
Dataset = Annotated[
    str | None, typer.Option("--dataset", help="Which dataset of an HDF5 file, or array of a Zarr group, if several.")
]
Dims = Annotated[
    str | None,
    typer.Option(
        "--dims",
        metavar="LETTERS",
        help="A letter for each dim, in the order in which they lie, such as NCDHW: N samples, C channels, T time, "
        "D, H, W space. Not needed where the file names them.",
    ),
]
Cut = Annotated[
    str | None, typer.Option("--cut", metavar="D=2,H=2", help="Into how many parts a sample is cut, by letter.")
]


def by_letter(text: str | None, option: str) -> dict[str, int] | None:
    """A text such as ``D=2,H=2`` as numbers by letter; None stays None. Raises ConfigError, which names ``option``."""
    if text is None:
        return None
    numbers = parse_sizes(option, text, "D=2,H=2")
    if any(len(letter) != 1 or number < 1 for letter, number in numbers.items()):
        raise ConfigError(f"{option} {text}: give letters, each with a number from 1, such as D=2,H=2")
    return numbers


def byte_progress(shown: bool = True) -> Progress:
    """A progress bar on stderr that counts bytes, and goes when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=progress_console(), transient=True, disable=not shown)


@contextmanager
def byte_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar while the block runs; call the function with the bytes that are done."""
    with byte_progress() as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
