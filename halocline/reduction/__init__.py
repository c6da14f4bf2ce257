"""Gradient averages."""

from .average import ENGINE, GradientAverage, engine_of
from .control import Coordinator, Doubling, Tree
from .deadlines import Deadlines
from .lag import Lag
from .late import DueParameter, settle, settle_own
from .owners import is_dtensor, leave_to_owners, mark
from .rings import rings_for
from .weights import same_weights
from .wire import Wire

__all__ = [
    "ENGINE",
    "Coordinator",
    "Deadlines",
    "Doubling",
    "DueParameter",
    "GradientAverage",
    "Lag",
    "Tree",
    "Wire",
    "engine_of",
    "is_dtensor",
    "leave_to_owners",
    "mark",
    "rings_for",
    "same_weights",
    "settle",
    "settle_own",
]
