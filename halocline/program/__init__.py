"""Recorded steps: the operations and the communication of one rank."""

from .record import Record, dry, record

__all__ = ["Record", "dry", "record"]
