"""A training step that goes through one device tile by tile, for samples whose activations do not fit it."""

from .api import stream

__all__ = ["stream"]
