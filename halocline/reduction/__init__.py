"""Gradient averages."""

from .average import GradientAverage, same_weights

__all__ = ["GradientAverage", "same_weights"]
