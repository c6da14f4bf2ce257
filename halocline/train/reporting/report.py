"""A run on one page: ``RUN/report.html``, which opens anywhere and needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .page import page
from .run import NoRun, read_run
from .sections import Section, parts_of

__all__ = ["REPORT", "NoRun", "RunReport", "write_report"]

REPORT = "report.html"


@dataclass(frozen=True)
class RunReport:
    """Where the report was written, and which sections it has."""

    path: Path
    bytes: int
    sections: list[str]  # names of those that are shown


def write_report(run: Path, out: Path | None = None) -> RunReport:
    """Write the report of a run, by default into its folder. Raises NoRun.

    The same run gives the same bytes: the page does not say when it was written.
    """
    read = read_run(run)
    parts = parts_of(read)
    written = page(read, parts).encode()
    path = out or run / REPORT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(written)
    return RunReport(path, len(written), [part.name for part in parts if isinstance(part, Section)])
