"""Tools to prove that a cut run is the one-rank run: for this library's tests, and for the rules users add."""

from ..world import run_local
from .adjoint import check_adjoint
from .compare import EXACT, Comparison, check_rule, relative_error
from .memory import PeakMemory, peak_bytes
from .mpi_place import MpiPlace
from .pool import Outcome, RankError, RankPool, shared_pool
from .store import StoreTests

__all__ = [
    "EXACT",
    "Comparison",
    "MpiPlace",
    "Outcome",
    "PeakMemory",
    "RankError",
    "RankPool",
    "StoreTests",
    "check_adjoint",
    "check_rule",
    "peak_bytes",
    "relative_error",
    "run_local",
    "shared_pool",
]
