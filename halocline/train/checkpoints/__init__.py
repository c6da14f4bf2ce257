"""Checkpoints of a run: written in the background, whole or not there at all, and verified before they are used."""

from .peers import CheckpointError, Mismatch
from .saving import Checkpoints, Loaded

__all__ = ["CheckpointError", "Checkpoints", "Loaded", "Mismatch"]
