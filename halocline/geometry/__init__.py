"""Integers only: what is needed, what is owned, and so what must move. No torch here."""

from .access import Access, Adaptive, Blocks, Concatenated, Mirror, Packed, Same, Transposed, Window
from .chunks import chunks_of, cut_at
from .crossing import Crossing, Hop, plan_crossing
from .interval import Box, Interval, shape_of, slices, whole
from .partition import Partition
from .slabs import Slabs, slabs_of
from .transfer import DimMove, PackedMessage, Slices, Transfer, plan_transfer, volume
from .view import Piece, SampleView

__all__ = [
    "Access",
    "Adaptive",
    "Blocks",
    "Box",
    "Concatenated",
    "Crossing",
    "DimMove",
    "Hop",
    "Interval",
    "Mirror",
    "Packed",
    "PackedMessage",
    "Partition",
    "Piece",
    "Same",
    "SampleView",
    "Slabs",
    "Slices",
    "Transfer",
    "Transposed",
    "Window",
    "chunks_of",
    "cut_at",
    "plan_crossing",
    "plan_transfer",
    "shape_of",
    "slabs_of",
    "slices",
    "volume",
    "whole",
]
