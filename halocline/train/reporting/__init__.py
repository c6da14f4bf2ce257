"""One page that shows a run: curves, answers, time, memory and the mesh, with nothing to load from elsewhere."""

from .report import RunReport, write_report

__all__ = ["RunReport", "write_report"]
