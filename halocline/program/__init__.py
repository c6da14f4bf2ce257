"""Programs written down: what one rank does in a step, without doing it."""

from .record import Record, dry, record

__all__ = ["Record", "dry", "record"]
