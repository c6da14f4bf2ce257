"""Is this machine, and are these ranks, fit to run? Probes, each of which says what it found and what to do."""

from .._deprecated import renamed
from .examine import DoctorReport, examine
from .finding import Finding

__all__ = ["DoctorReport", "Finding", "examine"]

__getattr__ = renamed(__name__, {"Report": DoctorReport})
