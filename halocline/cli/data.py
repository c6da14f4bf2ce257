"""``halocline data``: the commands that look at data and prepare them for ranks."""

from __future__ import annotations

from .data_convert import convert
from .data_info import info
from .data_stage import stage
from .data_stats import stats
from .output import add_command, new_app

data = new_app(help="Look at data, and prepare them for ranks.")
for _command in (info, stats, convert, stage):  # as help lists them
    add_command(data, _command)


@data.callback()
def group() -> None:
    """Look at data, and prepare them for ranks."""
