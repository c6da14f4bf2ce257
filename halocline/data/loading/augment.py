"""Augmentation as geometry: a rank reads another box of the sample, and no data move between ranks.

For each sample of an epoch an augmentation draws *changes of view* of named dims. All fields that have these dims
change alike, so labels follow their volumes. What is drawn depends on seed, epoch and sample alone, never on the mesh.

    loader = hc.data.Loader(fields, mesh, augment=[hc.data.Crop(D=64, H=64, W=64), hc.data.Flip("D", "H")])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ...errors import DataError
from ...geometry import SampleView
from ...random.generator import keys
from .order import GEOMETRY_STREAM

Sizes = Mapping[str, int]


class AugmentationDraws:
    """Random numbers for one sample of one epoch.

    The same on every rank, so that all ranks see the same augmentation.
    """

    def __init__(self, seed: int, epoch: int, sample: int) -> None:
        self._key, self._sample, self._thrown = keys(seed, epoch, GEOMETRY_STREAM)[0], sample, 0

    def below(self, count: int) -> int:
        """0 to ``count - 1``; each as likely, to one part in 2^64."""
        self._thrown += 1
        # The upper half of a 128-bit product: uniform, without a division.
        return keys(self._key, self._sample, self._thrown)[1] * count >> 64

    def chance(self, probability: float) -> bool:
        """True with that probability."""
        return self.below(1 << 53) < probability * (1 << 53)


class ViewChange(NamedTuple):
    """One change of view: a method of :class:`SampleView` by name, the dims by their letters, and its numbers.

    Fields that have none of the dims ignore it.
    """

    what: str
    letters: str
    numbers: tuple[int, ...] = ()

    def on(self, view: SampleView, dims: str) -> SampleView:
        """The view after the move; as it was, where none of these dims is there."""
        there = [letter for letter in self.letters if letter in dims]
        if not there:
            return view
        if len(there) < len(self.letters):
            raise DataError(f"{self.what} of {self.letters} needs both dims, and the data have dims {dims}")
        moved: SampleView = getattr(view, self.what)(*(dims.index(letter) for letter in self.letters), *self.numbers)
        return moved


class Augmentation(Protocol):
    """A random change of which box is read. All fields of a sample change alike, on every rank."""

    def letters(self) -> str:
        """The dims that it moves."""
        ...

    def moves(self, sizes: Sizes, draws: AugmentationDraws) -> Sequence[ViewChange]:
        """What is done to this sample, whose dims have these sizes."""
        ...


class Flip:
    """Each of the dims reversed with this chance."""

    def __init__(self, *letters: str, chance: float = 0.5) -> None:
        self._letters, self._chance = letters, chance
        if not 0 <= chance <= 1:
            raise DataError(f"Flip: chance={chance} must lie between 0 and 1")
        if any(len(letter) != 1 for letter in letters):
            raise DataError(f"Flip: dims are given one by one, as Flip('D', 'H'), not {letters}")

    def letters(self) -> str:
        """The dims that may be reversed."""
        return "".join(self._letters)

    def moves(self, sizes: Sizes, draws: AugmentationDraws) -> list[ViewChange]:
        """One draw for each dim, in the order given."""
        return [ViewChange("flip", letter) for letter in self._letters if draws.chance(self._chance)]


class Rotate90:
    """0 to 3 quarter turns in the plane of two dims of one size; with ``half`` 0 or 2, whatever the sizes."""

    def __init__(self, first: str, second: str, half: bool = False) -> None:
        self._plane, self._half = first + second, half
        if len(first) != 1 or len(second) != 1 or first == second:
            raise DataError(f"Rotate90: give the two dims of a plane, one letter each, not {first!r} and {second!r}")

    def letters(self) -> str:
        """The two dims of the plane."""
        return self._plane

    def moves(self, sizes: Sizes, draws: AugmentationDraws) -> list[ViewChange]:
        """One draw: how many quarter turns."""
        turns = 2 * draws.below(2) if self._half else draws.below(4)
        if not self._half and len({sizes[letter] for letter in self._plane}) > 1:
            text = " and ".join(f"{letter} of {sizes[letter]}" for letter in self._plane)
            raise DataError(f"Rotate90: a quarter turn would change the shape: {text}; crop first, or half=True")
        return [ViewChange("rotate", self._plane, (turns,))] if turns else []


class Crop:
    """``Crop(D=64, H=64)``: a box of that size anywhere in the sample, or in its centre."""

    def __init__(self, *, centre: bool = False, **sizes: int) -> None:
        self._sizes, self._centre = sizes, centre

    def letters(self) -> str:
        """The dims that become shorter."""
        return "".join(self._sizes)

    def moves(self, sizes: Sizes, draws: AugmentationDraws) -> list[ViewChange]:
        """One draw for each dim, where the crop begins; none for a crop in the centre."""
        turns = []
        for letter, size in self._sizes.items():
            room = sizes[letter] - size
            if room < 0 or size < 1:
                raise DataError(f"Crop: {letter} has size {sizes[letter]}; a crop of {size} does not fit")
            start = room // 2 if self._centre else draws.below(room + 1)
            turns.append(ViewChange("crop", letter, (start, start + size)))
        return turns


class Shift:
    """``Shift(D=8)``: by -8 to 8 along depth. What comes in is filled, or with ``wrap`` what left at the other end."""

    def __init__(self, *, wrap: bool = False, **most: int) -> None:
        self._most, self._what = most, "roll" if wrap else "shift"
        if any(number < 0 for number in most.values()):
            raise DataError(f"Shift: give the largest shift of each dim, 0 or more, not {most}")

    def letters(self) -> str:
        """The dims that are shifted."""
        return "".join(self._most)

    def moves(self, sizes: Sizes, draws: AugmentationDraws) -> list[ViewChange]:
        """One draw for each dim, from minus to plus its largest shift."""
        drawn = ((letter, draws.below(2 * most + 1) - most) for letter, most in self._most.items())
        return [ViewChange(self._what, letter, (by,)) for letter, by in drawn if by]


def drawn_moves(
    augment: Sequence[Augmentation], sizes: Sizes, draws: AugmentationDraws
) -> tuple[list[ViewChange], dict[str, int]]:
    """The moves of one sample in order, and the sizes of its dims after them."""
    letters = "".join(sizes)
    frame, moves = SampleView.of(list(sizes.values())), list[ViewChange]()
    for each in augment:
        for move in each.moves(dict(zip(letters, frame.shape, strict=True)), draws):
            frame = move.on(frame, letters)
            moves.append(move)
    return moves, dict(zip(letters, frame.shape, strict=True))
