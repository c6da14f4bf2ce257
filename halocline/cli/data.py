"""``halocline data``: look at data, take their statistics, write them anew."""

from __future__ import annotations

from .data_convert import convert
from .data_info import info
from .data_stage import stage
from .data_stats import stats
from .output import add_command, new_app

data = new_app(help="Look at data, and prepare them for ranks.")
add_command(data, info)
add_command(data, stats)
add_command(data, convert)
add_command(data, stage)


@data.callback()
def group() -> None:
    """Look at data, and prepare them for ranks."""
