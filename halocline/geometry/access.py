"""Which input interval does an output interval need? One small class for each answer.

``need(out)`` gives intervals of the input, in the order in which they are laid side by side; they may reach outside
the input, where padding lies. ``propagate_cut(points, out_size)`` says where to cut the output if the input is cut at
``points``, so that most of what is needed is already there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from .interval import Interval
from .partition import Partition


def _monotone(points: Iterable[int], out_size: int) -> tuple[int, ...]:
    """Interior cut points held inside ``[0, out_size]`` and in order; the ends are the ends of the output."""
    *interior, _last = list(points)[1:]
    cuts = [0]
    for point in interior:
        cuts.append(min(max(point, cuts[-1]), out_size))
    return (*cuts, out_size)


@dataclass(frozen=True)
class Access:
    """How the input follows the output along one dim. Subclasses are frozen, so that plans can be kept by them."""

    def need(self, out: Interval) -> tuple[Interval, ...]:
        """The input intervals that an output interval needs."""
        raise NotImplementedError

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        """Where to cut the output if the input is cut at ``points``."""
        raise NotImplementedError


@dataclass(frozen=True)
class Same(Access):
    """Output i needs input i."""

    def need(self, out: Interval) -> tuple[Interval, ...]:
        return (out,)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return points


@dataclass(frozen=True)
class Window(Access):
    """Output i needs ``stride*i - padding + dilation*t`` for t in 0..kernel-1: convolutions, pools, slices."""

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    padding: int = 0

    @property
    def reach(self) -> int:
        """From the first to the last tap."""
        return self.dilation * (self.kernel - 1)

    def need(self, out: Interval) -> tuple[Interval, ...]:
        if out.empty:
            return (Interval(0, 0),)
        first = self.stride * out.lo - self.padding
        return (Interval(first, self.stride * (out.hi - 1) - self.padding + self.reach + 1),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        centre = self.reach // 2 - self.padding
        return _monotone((-((centre - point) // self.stride) for point in points), out_size)


@dataclass(frozen=True)
class Transposed(Access):
    """Input j reaches outputs ``stride*j - padding + dilation*t``: the window read backwards."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0

    @property
    def reach(self) -> int:
        """From the first to the last tap."""
        return self.dilation * (self.kernel - 1)

    def need(self, out: Interval) -> tuple[Interval, ...]:
        if out.empty:
            return (Interval(0, 0),)
        first = -(-(out.lo + self.padding - self.reach) // self.stride)
        last = (out.hi - 1 + self.padding) // self.stride
        return (Interval(first, max(first, last + 1)),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        centre = self.reach // 2 - self.padding
        return _monotone((self.stride * point + centre for point in points), out_size)


@dataclass(frozen=True)
class Adaptive(Access):
    """Output i of an adaptive pool needs ``[floor(i*n/m), ceil((i+1)*n/m))``."""

    in_size: int
    out_size: int

    def window(self, index: int) -> Interval:
        """The inputs of one output."""
        return Interval(index * self.in_size // self.out_size, -(-(index + 1) * self.in_size // self.out_size))

    def need(self, out: Interval) -> tuple[Interval, ...]:
        if out.empty:
            return (Interval(0, 0),)
        return (Interval(self.window(out.lo).lo, self.window(out.hi - 1).hi),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return _monotone((-(-point * self.out_size // max(1, self.in_size)) for point in points), out_size)


@dataclass(frozen=True)
class Pieces(Access):
    """Output i needs inputs ``[points[i], points[i + 1])``: one value for each tile that holds something."""

    points: tuple[int, ...]

    def need(self, out: Interval) -> tuple[Interval, ...]:
        if out.empty:
            return (Interval(0, 0),)
        return (Interval(self.points[out.lo], self.points[out.hi]),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return tuple(self.points.index(point) for point in points)


@dataclass(frozen=True)
class PieceToPiece(Access):
    """Piece i of the output, from ``outputs[i]`` to ``outputs[i + 1]``, needs piece i of the input."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def need(self, out: Interval) -> tuple[Interval, ...]:
        if out.empty:
            return (Interval(0, 0),)
        first, last = (bisect_right(self.outputs, index) - 1 for index in (out.lo, out.hi - 1))
        return (Interval(self.inputs[first], self.inputs[last + 1]),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return self.outputs


@dataclass(frozen=True)
class Mirror(Access):
    """Padding that reads the sample itself: output i needs input ``source(i)``, by reflection, edge or wrap.

    Negative amounts crop. As in torch, a wrap then goes round what was kept; a reflection sees the whole sample.
    """

    in_size: int
    before: int
    mode: str
    after: int = 0

    @property
    def kept(self) -> Interval:
        """What a crop leaves of the input."""
        return Interval(max(0, -self.before), self.in_size - max(0, -self.after))

    def source(self, index: int) -> int:
        """The input index that an output index shows."""
        position, last = index - self.before, self.in_size - 1
        if self.mode == "circular":
            return self.kept.lo + (position - self.kept.lo) % self.kept.size
        if self.mode == "replicate":
            return min(max(position, 0), last)
        return abs(position) if position <= last else 2 * last - position

    def need(self, out: Interval) -> tuple[Interval, ...]:
        """Runs of consecutive sources where padding wraps, their hull where it folds back on itself."""
        if out.empty:
            return (Interval(0, 0),)
        if self.mode != "circular":
            inside = out.intersect(Interval(self.before, self.before + self.in_size))
            turns = () if inside.empty else (inside.lo, inside.hi - 1)
            sources = [self.source(i) for i in (out.lo, out.hi - 1, *turns)]
            return (Interval(min(sources), max(sources) + 1),)
        runs, start = [], out.lo
        while start < out.hi:
            first = self.source(start)
            length = min(out.hi - start, self.kept.hi - first)
            runs.append(Interval(first, first + length))
            start += length
        return tuple(runs)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return _monotone((point + self.before for point in points), out_size)


@dataclass(frozen=True)
class Concatenated(Access):
    """Input i is output ``offset + i``: one operand of a concatenation. The output is cut evenly."""

    offset: int

    def need(self, out: Interval) -> tuple[Interval, ...]:
        return (out.shift(-self.offset),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return Partition.even(out_size, len(points) - 1).points


@dataclass(frozen=True)
class Rows(Access):
    """The same elements in other rows: output row i holds ``made`` elements, input rows hold ``held``.

    It is the leading dim of a reshaped group of dims. Where a cut of the output falls inside an input row, the whole
    row is read.
    """

    held: int
    made: int

    def need(self, out: Interval) -> tuple[Interval, ...]:
        if out.empty:
            return (Interval(0, 0),)
        return (Interval(out.lo * self.made // self.held, -(-out.hi * self.made // self.held)),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return _monotone((-(-point * self.held // self.made) for point in points), out_size)


@dataclass(frozen=True)
class Blocks(Access):
    """Block b of the output, of ``made`` indices, needs block b of the input, of ``held``: the groups of a grouped
    convolution. The output is cut between blocks."""

    held: int
    made: int

    def need(self, out: Interval) -> tuple[Interval, ...]:
        if out.empty:
            return (Interval(0, 0),)
        return (Interval(out.lo // self.made * self.held, -(-out.hi // self.made) * self.held),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return _monotone(((2 * point + self.held) // (2 * self.held) * self.made for point in points), out_size)


@dataclass(frozen=True)
class Packed(Access):
    """Output i needs inputs ``i``, ``size + i``, ... of ``parts`` equal parts: the rows of a packed projection.

    The output is cut evenly at multiples of ``step``, so that each rank has whole heads of every part.
    """

    parts: int
    size: int
    step: int = 1

    def need(self, out: Interval) -> tuple[Interval, ...]:
        return tuple(out.shift(part * self.size) for part in range(self.parts))

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return Partition.even(out_size, len(points) - 1, self.step).points


@dataclass(frozen=True)
class Digit(Access):
    """One of several dims that are merged, as one digit of the count of all their elements.

    Output row i holds ``made`` elements, of which ``stride`` share an index of this dim. Where a run of rows goes on
    beyond the digit's end, all of the dim is needed. The output is cut evenly: what lies together in a tile of the
    input does not lie together in the output.
    """

    size: int
    stride: int
    made: int

    def need(self, out: Interval) -> tuple[Interval, ...]:
        if out.empty:
            return (Interval(0, 0),)
        first, last = out.lo * self.made // self.stride, (out.hi * self.made - 1) // self.stride
        if first // self.size != last // self.size:
            return (Interval(0, self.size),)
        return (Interval(first % self.size, last % self.size + 1),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return Partition.even(out_size, len(points) - 1).points


@dataclass(frozen=True)
class Reversed(Access):
    """Output i needs input ``size - 1 - i``. The cuts stay, so that a later join with the input is free."""

    size: int

    def need(self, out: Interval) -> tuple[Interval, ...]:
        return (Interval(self.size - out.hi, self.size - out.lo),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return points


@dataclass(frozen=True)
class Wrapped(Access):
    """Output i needs input ``(i - shift) % size``, for any number of rounds: rolled or repeated."""

    size: int
    shift: int = 0

    def need(self, out: Interval) -> tuple[Interval, ...]:
        runs, start = [], out.lo
        while start < out.hi:
            first = (start - self.shift) % self.size
            length = min(out.hi - start, self.size - first)
            runs.append(Interval(first, first + length))
            start += length
        return tuple(runs) or (Interval(0, 0),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return points if out_size == self.size else Partition.even(out_size, len(points) - 1).points


@dataclass(frozen=True)
class Only(Access):
    """One index of a dim that every rank reads: with a link to no dim of the space."""

    index: int

    def need(self, out: Interval) -> tuple[Interval, ...]:
        return (Interval(self.index, self.index + 1),)


@dataclass(frozen=True)
class Resample(Access):
    """Output i needs inputs ``first[i]`` to ``last[i]``: an interpolation, whose positions are rounded as torch does.

    The output is cut in proportion. Where it is a multiple of the input, no output needs more than its neighbours.
    """

    in_size: int
    first: tuple[int, ...]
    last: tuple[int, ...]

    def need(self, out: Interval) -> tuple[Interval, ...]:
        if out.empty:
            return (Interval(0, 0),)
        return (Interval(min(self.first[out.lo : out.hi]), max(self.last[out.lo : out.hi]) + 1),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return _monotone((-(-point * out_size // max(1, self.in_size)) for point in points), out_size)


@dataclass(frozen=True)
class Everything(Access):
    """Any output may need any input, by values not yet known. The output is cut in proportion, and so stays cut."""

    in_size: int

    def need(self, out: Interval) -> tuple[Interval, ...]:
        return (Interval(0, 0 if out.empty else self.in_size),)

    def propagate_cut(self, points: tuple[int, ...], out_size: int) -> tuple[int, ...]:
        return _monotone((-(-point * out_size // max(1, self.in_size)) for point in points), out_size)
