"""Gradient averages."""

from .arrays import all_reduce
from .average import ENGINE, GradientAverage, engine_of
from .comm_hook import register_comm_hook
from .owners import is_averaged, is_dtensor, parameters_to_average
from .schedule.control import Coordinator, Doubling, Tree
from .schedule.deferred import DeferredParameter, settle, settle_own
from .schedule.lag import Lag
from .schedule.next_forward import NextForwardOverlap
from .transport.compression import GradientCompression
from .transport.rings import Rings, rings_for
from .weights import same_weights, share_weights

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
    "all_reduce",
    "engine_of",
    "is_averaged",
    "is_dtensor",
    "parameters_to_average",
    "register_comm_hook",
    "rings_for",
    "same_weights",
    "settle",
    "settle_own",
    "share_weights",
]
