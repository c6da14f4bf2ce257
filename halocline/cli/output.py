"""How commands write: progress and errors to stderr, results to stdout, JSON as the last line of stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer
import typer.core
from rich.console import Console, JustifyMethod
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from ..errors import HaloclineError
from ..sizes import size_text as size_text  # commands import it from here
from ..testing.pool import RankError
from ..train.explain import explain
from .whole_tables import TableConsole

USAGE = 2  # exit status of a command that cannot run as asked

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout, and no table.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress: results and errors only.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the Python traceback of an error.")]


class _NoTypeOfFlags:
    """A mixin by which help shows no type for flags, which take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if getattr(each, "is_flag", False) and each.metavar is None:  # typer would show BOOLEAN
                each.metavar = ""
        return params


_quiet: ContextVar[bool] = ContextVar("quiet", default=False)


def set_quiet(quiet: bool) -> None:
    """Let :func:`progress_console` be silent, or not, in what this command still does."""
    _quiet.set(quiet)


def is_quiet() -> bool:
    """Was ``--quiet`` given?"""
    return _quiet.get()


class CliCommand(_NoTypeOfFlags, typer.core.TyperCommand):
    """A command of `halocline`."""


class CommandGroup(_NoTypeOfFlags, typer.core.TyperGroup):
    """`halocline` itself, and groups of its commands."""


def new_app(completion: bool = False, **texts: Any) -> typer.Typer:
    """A group of commands, with this library's way of showing help; ``completion`` adds options that set it up."""
    return typer.Typer(
        no_args_is_help=True, add_completion=completion, rich_markup_mode="markdown", cls=CommandGroup, **texts
    )


def add_command(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Add a function as a command: its parameters are the options, its docstring the help. Each gets ``--quiet``."""

    @wraps(function)
    def command(*arguments: Any, quiet: bool = False, **given: Any) -> None:
        set_quiet(quiet)
        function(*arguments, **given)

    # typer reads signature and annotations: those of the function, and one more option.
    hints = get_type_hints(function, include_extras=True)
    options = [each.replace(annotation=hints[each.name]) for each in signature(function).parameters.values()]
    options.append(Parameter("quiet", Parameter.KEYWORD_ONLY, default=False, annotation=Quiet))
    command.__signature__ = Signature(options)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in options}
    del command.__wrapped__
    app.command(name or function.__name__.replace("_", "-"), cls=CliCommand)(command)


def stdout() -> Console:
    """The console for results."""
    return TableConsole(highlight=False)


def stderr() -> Console:
    """The console for errors and remarks."""
    return TableConsole(stderr=True, highlight=False)


def progress_console() -> Console:
    """The console for progress, on stderr; silent with ``--quiet``."""
    return Console(stderr=True, highlight=False, quiet=is_quiet())


class RateColumn(ProgressColumn):
    """How much is done in a second, or the seconds that one takes: ``4.2/s``, ``12 s each``."""

    def render(self, task: Task) -> Text:
        """The text of a task."""
        return Text(rate_text(task.finished_speed or task.speed))


def number_text(value: float) -> str:
    """Three digits for people, and whole numbers from 1,000 on.

    >>> number_text(0.01234), number_text(41.47), number_text(2512.6)
    ('0.0123', '41.5', '2,513')
    """
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def rate_text(speed: float | None) -> str:
    """A rate for people; "" where it is not known yet.

    >>> rate_text(4.23), rate_text(0.08), rate_text(None)
    ('4.2/s', '12 s each', '')
    """
    if not speed:
        return ""
    return f"{number_text(speed)}/s" if speed >= 10 else f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.3g} s each"


def progress_bar(*, counted: bool = True, transient: bool = True, shown: bool = True) -> Progress:
    """A bar with the time that has passed and that is left; ``counted`` adds how many are done, and the rate."""
    counts, console = (MofNCompleteColumn(), RateColumn()) if counted else (), progress_console()
    # Where it cannot be taken away again, in a file, it would leave an empty line.
    shown = shown and (console.is_terminal or not transient)
    return Progress(
        TextColumn("{task.description}"), BarColumn(20), *counts, TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), console=console, transient=transient, disable=not shown,
    )  # fmt: skip


@contextmanager
def activity(words: str) -> Iterator[Callable[[str], None]]:
    """For work of unknown size: a spinner, what is being done, the time that has passed. Call it with new words."""
    columns, console = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()), progress_console()
    # Where it cannot be taken away again, in a file, it would leave an empty line.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(words)
        yield lambda new: bar.update(task, description=new)


def say(console: Console, text: str) -> None:
    """Print a line of text and let the terminal wrap it, so that a pipe gets it as one line."""
    console.print(text, soft_wrap=True)


def print_json(result: Mapping[str, Any]) -> None:
    """Print one line of JSON; NaN raises ValueError, since it is no JSON."""
    print(json.dumps(result, allow_nan=False), flush=True)


@contextmanager
def clear_errors(command: str, debug: bool) -> Iterator[None]:
    """A context in which any error becomes one line on stderr and exit status 2; with ``debug`` it is raised as it
    is."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter):  # typer's own ways to end a command
        raise
    except Exception as error:  # the user's own code may raise anything
        if debug:
            raise
        # Errors of the user's own code, here or on a rank, need a traceback; the library's say what to do.
        foreign = isinstance(error, RankError) or not isinstance(error, (HaloclineError, OSError))
        hint = " (--debug shows the traceback)" if foreign else ""
        stderr().print(f"halocline {command}: {explain(error)}{hint}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(USAGE) from error


def number_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    texts: Container[str] = (),
    whole: bool = False,
    **style: Any,
) -> Table:
    """A table of numbers, aligned right, and of ``texts``, aligned left; with ``whole`` no number is folded."""
    table = Table(title=title, title_style="bold", title_justify="left", **style)
    for heading in headings:
        left = heading in texts
        justify: JustifyMethod = "left" if left else "right"
        table.add_column(heading, justify=justify, no_wrap=whole and not left, overflow="fold")  # never "12,3…"
    for row in rows:
        table.add_row(*row)
    return table


def fact_table(title: str, facts: Mapping[str, str]) -> Table:
    """A table of two columns: names and values, which may hold rich's markup."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    return table
