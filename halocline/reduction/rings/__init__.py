"""Sums over ranks by ways that fit the machine."""

from .engine import Pending, Rings, rings_for

__all__ = ["Pending", "Rings", "rings_for"]
