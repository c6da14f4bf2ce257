"""The sample cut into the ranks' tiles, drawn to scale: flat for lines and images, in perspective for volumes.

Tiles come from the log, where each rank has written its box. At most three dims can be drawn; ranks that hold the same
box of other samples are drawn as copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..settings import AXES
from .charts import svg
from .run import Entry
from .svg import element, polygon, text, tooltip

SIDE, MANY = 190.0, 330.0  # length of the longest edge; and where there are many tiles along it
THIN = 34.0  # length of the shortest edge, so that a number fits
SLANT = 0.42  # share of its length that an edge which goes back has across, and up
COPIES = 4  # copies that are drawn; others look the same
Pair = tuple[int, int]
Copy = tuple[tuple[str, int], ...]  # places along axes that are not drawn


@dataclass(frozen=True)
class Tile:
    """One rank's box of the sample, by letter of a dim, and a text for the tooltip."""

    rank: int
    box: dict[str, Pair]
    words: str


@dataclass(frozen=True)
class DrawingAxes:
    """Which dims of the sample go up, across and back in the drawing; "" where there is none."""

    up: str
    across: str
    back: str


def mesh_figures(ranks: Sequence[Entry]) -> list[str]:
    """A figure for each group of ranks that together hold a sample, as HTML; at most ``COPIES`` of them."""
    tiles = [_tile(entry) for entry in ranks]
    space = [letter for letter in tiles[0].box if letter not in "NC"] or list(tiles[0].box)[-1:]
    cut = [letter for letter in space if len(_parts(tiles, letter)) > 1]
    most = sorted(space, key=lambda letter: letter not in cut)[:3]  # three dims can be drawn; those that are cut first
    view = view_of([letter for letter in space if letter in most], cut)
    groups: dict[Copy, list[Tile]] = {}
    for tile, entry in zip(tiles, ranks, strict=True):
        groups.setdefault(_copy_of(entry, view), []).append(tile)
    figures = [_figure(_heading(key, len(groups)), group, view) for key, group in groups.items()]
    left = len(figures) - COPIES
    rest = [element("p", text(f"and {left} more copies like these"), class_="note")] if left > 0 else []
    return figures[:COPIES] + rest


def _tile(entry: Entry) -> Tile:
    """The tile of a rank's entry in the log."""
    box = {letter: (int(low), int(high)) for letter, (low, high) in entry["tile"].items()}
    words = ", ".join(f"{_name(letter)} {low} to {high}" for letter, (low, high) in box.items())
    return Tile(int(entry["rank"]), box, f"rank {entry['rank']}: {words}")


def _name(letter: str) -> str:
    return AXES.get(letter, letter)


def _parts(tiles: Sequence[Tile], letter: str) -> list[Pair]:
    """The intervals into which the tiles cut a dim, in order."""
    return sorted({tile.box[letter] for tile in tiles})


def view_of(space: Sequence[str], cut: Sequence[str]) -> DrawingAxes:
    """A dim that is not cut goes back, so that every tile shows its face.

    >>> view_of("DHW", "HW"), view_of("DHW", "D"), view_of("HW", "H"), view_of("W", "W")
    (View(up='H', across='W', back='D'), View(up='D', across='W', back='H'), View(up='H', across='W', back=''), \
View(up='', across='W', back=''))
    """
    if len(space) == 3:
        back = next((letter for letter in space if letter not in cut), space[0])
        up, across = (letter for letter in space if letter != back)
        return DrawingAxes(up, across, back)
    return DrawingAxes(space[0] if len(space) == 2 else "", space[-1], "")


def _copy_of(entry: Entry, view: DrawingAxes) -> Copy:
    """What tells copies apart: the place along axes that cut no dim which is drawn."""
    drawn = {_name(letter) for letter in (view.up, view.across, view.back)}
    return tuple((axis, place) for axis, place in entry.get("coordinates", {}).items() if axis not in drawn)


def _heading(key: Copy, groups: int) -> str:
    """What tells a copy from the others; "" if there is only one."""
    if groups == 1:
        return ""
    words = {"data": "samples of group"}
    return ", ".join(f"{words.get(axis, axis)} {place}" for axis, place in key)


def _figure(heading: str, tiles: list[Tile], view: DrawingAxes) -> str:
    """One box; where the dim that goes back is cut too, a box for each of its parts."""
    layers = _parts(tiles, view.back) if view.back else [(0, 0)]
    drawings = []
    for layer in layers:
        shown = [tile for tile in tiles if not view.back or tile.box[view.back] == layer]
        words = f"{_name(view.back)} {layer[0]} to {layer[1]}" if len(layers) > 1 else ""
        box = DrawnBox(tiles, view, layer, heading or "tiles of the ranks")
        drawings.append(element("div", box.drawing(shown), element("small", text(words))))
    caption = element("figcaption", text(heading)) if heading else ""
    return element("figure", caption, element("div", *drawings, class_="layers"), class_="mesh")


class DrawnBox:
    """One box in the drawing's own units: where rows, columns and edges lie.

    The longest edge has a fixed length and the others are to scale, except that very thin ones are widened so that
    numbers fit.
    """

    def __init__(self, tiles: Sequence[Tile], view: DrawingAxes, layer: Pair, title: str) -> None:
        self._view, self._title = view, title
        self._rows = _parts(tiles, view.up) if view.up else [(0, 1)]
        self._columns = _parts(tiles, view.across)
        high = self._rows[-1][1] if view.up else 0
        wide = self._columns[-1][1]
        deep = max((tile.box[view.back][1] for tile in tiles), default=1) if view.back else 0
        unit = (MANY if max(len(self._rows), len(self._columns)) > 6 else SIDE) / max(high, wide, deep)
        self._high = max(THIN, high * unit)
        self._wide = max(THIN, wide * unit)
        part, self._deep = (layer[1] - layer[0]) / max(1, deep), deep
        self._whole = part == 1
        self._back = SLANT * max(THIN, deep * unit) * part if view.back else 0.0
        self._left, self._top = 62.0, 16.0 + self._back

    def drawing(self, tiles: Sequence[Tile]) -> str:
        """The box with its tiles, as SVG."""
        parts = [self._faces(tile) for tile in tiles]
        width = self._left + self._wide + self._back + 62
        height = self._top + self._high + 48
        picture = svg(self._title, *parts, *self._labels(), width=width, height=height, class_="box")
        return picture.replace("<svg ", f'<svg width="{width:.0f}" ', 1)

    def _x(self, value: int) -> float:
        return self._left + self._wide * value / self._columns[-1][1]

    def _y(self, value: int) -> float:
        return self._top + self._high * value / self._rows[-1][1]

    def _faces(self, tile: Tile) -> str:
        """A tile: its front, and the top and the side where they are visible."""
        left, right = (self._x(end) for end in tile.box[self._view.across])
        row = tile.box[self._view.up] if self._view.up else (0, 1)
        top, bottom = (self._y(end) for end in row)
        back, faces = self._back, [tooltip(tile.words)]
        if back and row[0] == 0:
            lid = [(left, top), (right, top), (right + back, top - back), (left + back, top - back)]
            faces.append(polygon(lid, "lid"))
        if back and tile.box[self._view.across] == self._columns[-1]:
            cheek = [(right, top), (right + back, top - back), (right + back, bottom - back), (right, bottom)]
            faces.append(polygon(cheek, "cheek"))
        faces.append(element("rect", x=left, y=top, width=right - left, height=bottom - top, class_="face"))
        faces.append(_number(tile.rank, (left + right) / 2, (top + bottom) / 2, min(right - left, bottom - top)))
        return element("g", *faces, class_=f"tile hue{tile.rank % 8}")

    def _labels(self) -> list[str]:
        """Names of the dims and the cut points along them."""
        view, base = self._view, self._top + self._high
        middle = self._left + self._wide / 2
        labels = [element("text", text(_name(view.across)), x=middle, y=base + 38, class_="label mid")]
        labels += [_tick(value, self._x(value), base + 18, "mid") for value in _edges(self._columns)]
        if view.up:
            place = self._top + self._high / 2
            turned = {"transform": f"translate(14 {place:.1f}) rotate(-90)"}
            labels.append(element("text", text(_name(view.up)), class_="label mid", **turned))
            labels += [_tick(value, self._left - 8, self._y(value) + 4, "end") for value in _edges(self._rows)]
        if view.back:
            x, y = self._left + self._wide + self._back / 2 + 8, base - self._back / 2 + 12
            words = f"{_name(view.back)} {self._deep}" if self._whole else _name(view.back)
            labels.append(element("text", text(words), x=x, y=y, class_="label"))
        return labels


def _number(rank: int, x: float, y: float, room: float) -> str:
    """A rank's number in the middle of its tile; none where it would be too small, since the tooltip has it."""
    size = min(17.0, 0.55 * room)
    if size < 6:
        return ""  # the tooltip has it
    return element("text", text(rank), x=x, y=y + 0.36 * size, class_="rank mid", font_size=size)


def _edges(parts: Sequence[Pair]) -> list[int]:
    """Ends and cut points of a dim; of very many, the ends only."""
    edges = sorted({end for part in parts for end in part})
    return edges if len(edges) <= 9 else [edges[0], edges[-1]]


def _tick(value: int, x: float, y: float, anchor: str) -> str:
    return element("text", text(value), x=x, y=y, class_=f"tick {anchor}")
