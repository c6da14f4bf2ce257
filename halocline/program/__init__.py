"""Programs written down: what one rank does in a step, without doing it."""

from .record import Operation, Record, dry, record

__all__ = ["Operation", "Record", "dry", "record"]
