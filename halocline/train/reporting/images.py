"""Arrays as pictures for a page: PNG files in data URLs, colours of classes and of values.

Planes are arrays of float64 by (height, width); pictures are uint8 by (height, width, 3).
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .run import Array
from .svg import element

Picture = NDArray[np.uint8]  # [height, width, 3]
LARGEST = 384  # pixels of an edge; larger slices are thinned
#: Colours of classes from 1 on; class 0 has none, and red is for errors.
CLASSES = ("#f2b134", "#2fb7c4", "#b86be0", "#5fbf5a", "#4c7fe8", "#f58f9c", "#9c7a54", "#c9d34a")
WRONG = "#ff2d44"
RAMP = ("#440154", "#3b528b", "#21918c", "#5ec962", "#fde725")
BOTH_SIDES = ("#2166ac", "#92c5de", "#f7f7f7", "#f4a582", "#b2182b")


def png(picture: Picture) -> bytes:
    """A picture as an uninterlaced PNG of 8 bits per channel.

    >>> png(np.zeros((2, 3, 3), np.uint8))[:8] == b"\\x89PNG" + bytes([13, 10, 26, 10])
    True
    """
    height, width = picture.shape[:2]
    rows = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    written = b"\x89PNG\r\n\x1a\n"
    for name, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")):
        written += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return written


def image(picture: Picture, words: str) -> str:
    """A picture as an inline PNG, with its text for readers that show none."""
    source = "data:image/png;base64," + base64.b64encode(png(picture)).decode()
    return element("img", src=source, alt=words, width=picture.shape[1], height=picture.shape[0])


def colour(code: str) -> Array:
    """Red, green and blue of a colour written as #rrggbb."""
    return np.array([int(code[index : index + 2], 16) for index in (1, 3, 5)], dtype=np.float64)


def class_code(number: int) -> str:
    """The colour of a class."""
    return CLASSES[(number - 1) % len(CLASSES)]


def thin(plane: Array) -> Array:
    """Every n-th pixel, so that no edge has more than ``LARGEST`` and the page stays small."""
    stride = -(-max(plane.shape) // LARGEST)
    return plane[::stride, ::stride]


def limits(*planes: Array) -> tuple[float, float]:
    """The range of the finite values of all planes, without the outermost half per cent at each end."""
    values = np.concatenate([plane[np.isfinite(plane)] for plane in planes])
    if not values.size:
        return 0.0, 1.0
    low, high = np.percentile(values, [0.5, 99.5]).tolist()
    return (low, high) if high > low else (low - 0.5, low + 0.5)


def _shares(plane: Array, low: float, high: float) -> Array:
    """Values as shares of the range from ``low`` to ``high``; NaN as 0."""
    return np.nan_to_num(np.clip((plane - low) / (high - low), 0, 1))


def grey(plane: Array) -> Picture:
    """A plane of numbers as a grey picture."""
    shares = _shares(plane, *limits(plane))
    return (np.repeat(shares[..., None], 3, axis=-1) * 255).astype(np.uint8)


def ramped(plane: Array, low: float, high: float, ramp: tuple[str, ...] = RAMP) -> Picture:
    """Values as colours interpolated between those of ``ramp``; NaN as the lowest."""
    stops, shares = np.linspace(0, 1, len(ramp)), _shares(plane, low, high)
    codes = np.stack([colour(code) for code in ramp])
    return np.stack([np.interp(shares, stops, codes[:, c]) for c in range(3)], axis=-1).astype(np.uint8)


def painted(under: Picture, where: NDArray[Any], code: str, strength: float) -> Picture:
    """A picture with a colour laid over the pixels of a mask."""
    mixed = under * (1 - strength) + colour(code) * strength
    return np.where(where[..., None], mixed, under).astype(np.uint8)


def overlaid(under: Picture, classes: Array) -> Picture:
    """Classes in colour over a grey picture."""
    for number in np.unique(classes[np.isfinite(classes)]).astype(int).tolist():
        if number > 0:
            under = painted(under, classes == number, class_code(number), 0.65)
    return under
