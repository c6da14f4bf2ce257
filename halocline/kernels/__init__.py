"""Runs torch's own kernels in chunks where an operand is too large for their fast paths (2^31 elements and more).

Nothing is replaced until ``hc.chunked``, ``hc.distribute`` or a tile that needs it asks for it; ``docs/gpu.md`` says
what then changes for the process.
"""

from . import channels, convolution, norm
from .chunked import SizeWatch, chunked, keep_fast

__all__ = ["SizeWatch", "channels", "chunked", "convolution", "keep_fast", "norm"]
