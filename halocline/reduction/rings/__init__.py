"""Sums over ranks by ways that fit the machine."""

from .engine import Pending, Rings

__all__ = ["Pending", "Rings"]
