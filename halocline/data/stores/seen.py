"""Where the pieces of a view go in an array."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...geometry import Box, Piece, SampleView
from .store import Array, part_of

Part = tuple[Box, Any]  # a box of the source, and the array that it goes to


def oriented(target: Array, piece: Piece, view: SampleView) -> Array:
    """The place of a piece in a target, seen as the source sees it: turned, and flipped where it runs backwards."""
    turned: Any = (*(slice(None, None, step) for step in piece.steps), ...)
    return part_of(target, piece.place)[turned].transpose(np.argsort(view.order))


def parts_of(view: SampleView, box: Box, target: Array) -> list[Part]:
    """What to read for ``box`` of the view."""
    return [(piece.source, oriented(target, piece, view)) for piece in view.pieces(box)]
