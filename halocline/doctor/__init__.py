"""Is this machine, and are these ranks, fit to run? Probes, each of which says what it found and what to do."""

from .examine import Report, examine
from .finding import Finding

__all__ = ["Finding", "Report", "examine"]
