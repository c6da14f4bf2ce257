"""``halocline data``: look at data, take their statistics, write them anew."""

from __future__ import annotations

import typer

from .data_convert import convert
from .data_info import info
from .data_stage import stage
from .data_stats import stats

data = typer.Typer(no_args_is_help=True, help="Look at data, and prepare them for ranks.", rich_markup_mode="markdown")
data.command()(info)
data.command()(stats)
data.command()(convert)
data.command()(stage)


@data.callback()
def group() -> None:
    """Look at data, and prepare them for ranks."""
