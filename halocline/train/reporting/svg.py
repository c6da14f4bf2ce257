"""Elements of HTML and SVG as text, and numbers as people read them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable

from .style import STYLE


def element(name: str, *content: str, **attributes: object) -> str:
    """An element of HTML or SVG. ``content`` is markup already; attributes are escaped.

    In names of attributes a trailing underscore is dropped and others become hyphens: ``class_``, ``stroke_width``.

    >>> element("rect", width=3.14159, class_="a<b")
    '<rect width="3.14" class="a&lt;b"/>'
    >>> element("p", text("1 < 2"))
    '<p>1 &lt; 2</p>'
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items() if value != ""
    )
    inside = "".join(content)
    return f"<{name}{told}>{inside}</{name}>" if inside or name not in _EMPTY else f"<{name}{told}/>"


_EMPTY = {"rect", "line", "circle", "path", "polygon", "img", "polyline"}


def _value(value: object) -> str:
    """An attribute's value: floats with two digits, all else escaped."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else html.escape(str(value))


def document(title: str, *body: str) -> str:
    """A whole page of HTML, for light and dark screens of any size. The browser fetches nothing and runs no script."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += '<meta name="color-scheme" content="light dark">' + _SEALED
    head += element("title", text(title)) + f"<style>{STYLE}</style>"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


_SEALED = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
    "style-src 'unsafe-inline'\">"
)


def text(words: object) -> str:
    """Text with the special characters of HTML escaped."""
    return html.escape(str(words))


def tooltip(words: object) -> str:
    """The text that the pointer shows over an element."""
    return element("title", text(words))


def path_of(points: Iterable[tuple[float, float]]) -> str:
    """Lines through the points, broken where one is not finite."""
    parts, pen = [], "M"
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y)):
            pen = "M"
            continue
        parts.append(f"{pen}{x:.1f},{y:.1f}")
        pen = "L"
    return "".join(parts)


def polygon(points: Iterable[tuple[float, float]], class_: str, *content: str) -> str:
    """A filled shape."""
    return element("polygon", *content, points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)


def short(value: float) -> str:
    """A number with four digits.

    >>> short(0.0123456), short(1234567.0), short(2), short(1e-5), short(float("nan"))
    ('0.01235', '1.235e6', '2', '1e-5', 'nan')
    """
    digits = f"{value:.4g}"
    mantissa, mark, exponent = digits.partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else digits


def duration(seconds: float) -> str:
    """Seconds in a unit that fits.

    >>> duration(0), duration(0.0000042), duration(0.0042), duration(3.21), duration(75), duration(7322)
    ('0 s', '4.2 µs', '4.2 ms', '3.21 s', '1 min 15 s', '2 h 2 min')
    """
    if not math.isfinite(seconds):
        return short(seconds)
    for unit, factor in (("µs", 1e6), ("ms", 1e3), ("s", 1.0)):
        if 0 < seconds < 0.9995e3 / factor and seconds < 59.95:
            return f"{factor * seconds:.3g} {unit}"
    if seconds <= 0:
        return "0 s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def scaled(value: float) -> str:
    """Three digits with a prefix of SI.

    >>> scaled(0.0), scaled(1540.0), scaled(1.54e18)
    ('0', '1.54 k', '1.54 E')
    """
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"
