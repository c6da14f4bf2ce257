"""Tables that never cut a cell: one that is too wide for the terminal is shown in parts, each with the first column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

_FOLDED = 16  # columns of a terminal below which a cell that may be folded anywhere is hard to read


class TableConsole(Console):
    """A console that prints tables whole at any width."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """As rich's, but for tables that are too wide."""
        for each in objects:
            if isinstance(each, Table):
                for part in in_parts(each, self.width):
                    super().print(part, **settings)
        if rest := [each for each in objects if not isinstance(each, Table)]:
            super().print(*rest, **settings)
        elif not objects:
            super().print(**settings)


def fits(table: Table, width: int) -> bool:
    """Is the table shown as one?"""
    return len(list(in_parts(table, width))) == 1


def in_parts(table: Table, width: int) -> Iterator[Table]:
    """The table, or several that share its first column and fit the width."""
    for column in table.columns:
        column.overflow = "fold"  # rich would cut what does not fit
    left, right = table.padding[3], table.padding[1]
    room = [_needed(column, table.show_header) + left + right + 1 for column in table.columns]
    groups: list[list[Column]] = [[]]
    used = 1 + room[0] if room else 0
    for column, need in zip(table.columns[1:], room[1:], strict=True):
        if groups[-1] and used + need > width:
            groups.append([])
            used = 1 + room[0]
        groups[-1].append(column)
        used += need
    if len(groups) == 1:
        yield table
        return
    for number, group in enumerate(groups):
        yield _part(table, [table.columns[0], *group], titled=number == 0)


def _needed(column: Column, headed: bool) -> int:
    """The columns of a terminal that a column takes at least."""
    cells = [*([column.header] if headed else []), *column.cells]
    texts = [cell if isinstance(cell, Text) else Text.from_markup(str(cell)) for cell in cells]
    lines = [line for text in texts for line in (text.plain.splitlines() if column.no_wrap else text.plain.split())]
    widest = max((cell_len(line) for line in lines), default=0)
    return widest if column.no_wrap or column.justify == "right" else min(widest, _FOLDED)


def _part(table: Table, columns: list[Column], titled: bool) -> Table:
    """Some columns of a table as a table that looks like it."""
    part = Table(title=table.title if titled else None, title_style=table.title_style,
                 title_justify=table.title_justify, box=table.box, padding=table.padding, pad_edge=table.pad_edge,
                 show_header=table.show_header)  # fmt: skip
    for column in columns:
        part.add_column(column.header, style=column.style, justify=column.justify, no_wrap=column.no_wrap,
                        overflow=column.overflow)  # fmt: skip
    cells = [list(column.cells) for column in columns]
    for row, ends in enumerate(table.rows):
        part.add_row(*(column[row] for column in cells), end_section=ends.end_section)
    return part
