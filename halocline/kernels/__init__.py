"""torch's own kernels in chunks, where an operand is too large for their fast paths."""

from . import channels, convolution, norm
from .chunked import SizeWatch, chunked, keep_fast

__all__ = ["SizeWatch", "channels", "chunked", "convolution", "keep_fast", "norm"]
