"""Gradient averages."""

from .average import ENGINE, GradientAverage, engine_of
from .owners import is_dtensor, leave_to_owners, mark
from .schedule.control import Coordinator, Doubling, Tree
from .schedule.deferred import DeferredParameter, settle, settle_own
from .schedule.lag import Lag
from .schedule.next_forward import NextForwardOverlap
from .transport.compression import GradientCompression
from .transport.rings import Rings, rings_for
from .weights import same_weights

__all__ = [
    "ENGINE",
    "Coordinator",
    "DeferredParameter",
    "Doubling",
    "GradientAverage",
    "GradientCompression",
    "Lag",
    "NextForwardOverlap",
    "Rings",
    "Tree",
    "engine_of",
    "is_dtensor",
    "leave_to_owners",
    "mark",
    "rings_for",
    "same_weights",
    "settle",
    "settle_own",
]
