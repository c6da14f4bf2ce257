"""Gradient averages."""

from .average import GradientAverage, same_weights
from .owners import is_dtensor, leave_to_owners, mark

__all__ = ["GradientAverage", "is_dtensor", "leave_to_owners", "mark", "same_weights"]
