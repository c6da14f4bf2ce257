"""torch's own kernels in chunks, where an operand is too large for their fast paths."""

from . import channels, convolution, norm
from .chunked import WhileLarge, chunked

__all__ = ["WhileLarge", "channels", "chunked", "convolution", "norm"]
