"""How commands speak: progress and errors to stderr, results to stdout, JSON as the last line of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.table import Table

from ..errors import HaloclineError
from ..sizes import size_text as size_text
from ..testing.pool import RankError
from ..train.explain import explain

USAGE = 2  # exit status of what cannot be run as asked

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout, and no table.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the Python traceback of an error.")]


class _NoTypeOfFlags:
    """Flags take no value, so that help shows no type for them; `--help` is one."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if getattr(each, "is_flag", False) and each.metavar is None:
                each.metavar = ""
        return params


class CliCommand(_NoTypeOfFlags, typer.core.TyperCommand):
    """A command of `halocline`."""


class CommandGroup(_NoTypeOfFlags, typer.core.TyperGroup):
    """`halocline` itself, and groups of its commands."""


def new_app(**texts: Any) -> typer.Typer:
    return typer.Typer(
        no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", cls=CommandGroup, **texts
    )


def add_command(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    app.command(name, cls=CliCommand)(function)


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
    """Any error becomes one line on stderr and exit status 2; with ``debug`` it comes with its traceback."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except Exception as error:  # the user's own code may raise anything
        if debug:
            raise
        foreign = isinstance(error, RankError) or not isinstance(error, (HaloclineError, OSError))
        hint = " (--debug shows the traceback)" if foreign else ""
        stderr().print(f"halocline {command}: {explain(error)}{hint}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(USAGE) from error


def fact_table(title: str, facts: Mapping[str, str]) -> Table:
    """Two columns: what, and how much."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    return table
