"""Many trainings with different settings: ``halocline sweep``."""

from .runner import SweepRunner, TrialRecord
from .spec import SweepSpec, read_spec

__all__ = ["SweepRunner", "SweepSpec", "TrialRecord", "read_spec"]
