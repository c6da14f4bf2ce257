"""Is this machine, and are these ranks, fit to run? Probes, each of which says what it found and what to do."""

from typing import Any
from warnings import warn

from .examine import DoctorReport, examine
from .finding import Finding

__all__ = ["DoctorReport", "Finding", "examine"]


def __getattr__(name: str) -> Any:
    if name != "Report":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn("halocline.doctor.Report is now halocline.doctor.DoctorReport", DeprecationWarning, stacklevel=2)
    return DoctorReport
