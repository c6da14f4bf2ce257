"""Is this machine, and are these ranks, fit to run? Checks, each of which says what it found and what to do.

``examine`` runs all: first this machine (``checks`` on the facts of ``machine``), then the ranks (``ranks``), and
between them messages (``links``).
"""

from .._deprecated import renamed
from .examine import DoctorReport, examine
from .finding import Finding

__all__ = ["DoctorReport", "Finding", "examine"]

__getattr__ = renamed(__name__, {"Report": DoctorReport})
