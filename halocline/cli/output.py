"""How commands speak: progress and errors to stderr, results to stdout, JSON as the last line of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..errors import HaloclineError
from ..sizes import size_text as size_text
from ..testing.pool import RankError

USAGE = 2  # exit status of what cannot be run as asked

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout, and no table.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the Python traceback of an error.")]


def stdout() -> Console:
    return Console(highlight=False)


def stderr() -> Console:
    return Console(stderr=True, highlight=False)


def say(console: Console, text: str) -> None:
    """A line of text, left to the terminal to wrap: a pipe should get it whole."""
    console.print(text, soft_wrap=True)


def print_json(result: Mapping[str, Any]) -> None:
    print(json.dumps(result, allow_nan=False), flush=True)


@contextmanager
def clear_errors(command: str, debug: bool) -> Iterator[None]:
    """An error of the library's own, or of the file system, becomes one line on stderr and exit status 2."""
    try:
        yield
    except (HaloclineError, OSError) as error:
        if debug:
            raise
        hint = " (--debug shows where)" if isinstance(error, RankError) else ""
        stderr().print(f"halocline {command}: {first_line(error)}{hint}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(USAGE) from error


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def fact_table(title: str, facts: Mapping[str, str]) -> Table:
    """Two columns: what, and how much."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    return table
