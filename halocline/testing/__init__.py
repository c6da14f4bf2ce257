"""Tools that prove that a cut run equals the one-rank run, for this library's tests and for users' own code.

``check_rule`` proves a rule, ``check_adjoint`` a movement; ``StoreTests`` and ``WorldTests`` are test classes that a
new store or transport subclasses. ``RankPool`` runs functions on real rank processes that stay alive between tests.
"""

from ..world import run_local
from .adjoint import check_adjoint
from .compare import EXACT, Comparison, check_rule, relative_error
from .memory import PeakMemory, peak_bytes
from .mpi_place import MpiPlace
from .pool import Outcome, RankError, RankPool, shared_pool
from .store import StoreTests
from .world import CudaWorldTests, WorldTests

__all__ = [
    "EXACT",
    "Comparison",
    "CudaWorldTests",
    "MpiPlace",
    "Outcome",
    "PeakMemory",
    "RankError",
    "RankPool",
    "StoreTests",
    "WorldTests",
    "check_adjoint",
    "check_rule",
    "peak_bytes",
    "relative_error",
    "run_local",
    "shared_pool",
]
