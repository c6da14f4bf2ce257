"""Deprecated address of :class:`Rings`, for one release."""

import warnings

from .transport.rings import Rings

__all__ = ["Rings"]

warnings.warn("import Rings from halocline.reduction", DeprecationWarning, stacklevel=2)
