"""Sums over ranks by ways that fit the machine."""

from .engine import EXPRESS, URGENT_CHUNK, Pending, Rings, rings_for

__all__ = ["EXPRESS", "URGENT_CHUNK", "Pending", "Rings", "rings_for"]
