"""``halocline bench``: the commands of the folder ``benchmarks`` of a checkout; the installed package has none."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

_CHECKOUT = Path(__file__).parents[2]


def add_benchmarks(app: typer.Typer, checkout: Path = _CHECKOUT) -> None:
    """Add the commands of a checkout; elsewhere, one that says where to find them."""
    # Only in a checkout: an installed wheel may have a package of that name beside it.
    if not ((checkout / "benchmarks" / "commands").is_dir() and (checkout / "pyproject.toml").is_file()):
        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command("bench", context_settings=anything)(_absent)
        return
    if str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))  # the ranks that benchmarks start look there, too
    from benchmarks.commands.app import bench

    app.add_typer(bench, name="bench")


def _absent() -> None:
    """Measure what things cost. The benchmarks are part of the repository, not of the installed package."""
    text = "halocline bench: the benchmarks are part of the repository, not of the installed package; clone it, run "
    typer.echo(text + "`pip install -c constraints.txt -e '.[train]'` there, then `halocline bench --help`", err=True)
    raise typer.Exit(2)
