"""From which modules on samples are whole on each rank: where cut layers have less work than their halos cost.

Layers stand in the order in which forward runs them. A gathered sample stays whole until a larger one joins it: in a
U-Net until the way up meets a skip connection, in a classifier to the end. Which spans are gathered is found by
dynamic programming over the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class ChainLayer(NamedTuple):
    """One module of the chain, forward and backward together."""

    place: str  # a module's path, or what else is known of the code
    able: bool  # whether its input can be gathered: not that of code between modules, or of a module that runs twice
    voxels: int  # of one channel of its input, uncut
    cut: float  # seconds with samples cut
    whole: float  # seconds with samples whole, the same on each rank
    enter: float  # seconds in which its input becomes whole
    kept: int  # more bytes for backward where it is whole


@dataclass(frozen=True)
class Gathered:
    """Modules before which samples become whole, what that saves, and what it takes."""

    paths: tuple[str, ...] = ()
    seconds: float = 0.0
    memory: int = 0


def best_gathers(layers: Sequence[ChainLayer]) -> Gathered:
    """The spans of layers whose gathering saves most; none where nothing does."""
    ends = span_ends(layers)
    saved_before = [0.0, *accumulate(each.cut - each.whole for each in layers)]
    kept_before = [0, *accumulate(each.kept for each in layers)]
    best = [Gathered()] * (len(layers) + 1)  # of the layers from each position on
    for start in reversed(range(len(layers))):
        best[start] = best[start + 1]
        end = ends[start]
        saved = saved_before[end] - saved_before[start] - layers[start].enter
        after = best[end]
        if layers[start].able and saved > 0 and saved + after.seconds > best[start].seconds:
            kept = kept_before[end] - kept_before[start]
            best[start] = Gathered((layers[start].place, *after.paths), saved + after.seconds, kept + after.memory)
    return best[0]


def span_ends(layers: Sequence[ChainLayer]) -> list[int]:
    """For each layer the first after it with a larger input: there a sample that is cut joins."""
    ends = [len(layers)] * len(layers)
    open_spans: list[int] = []  # with inputs that become smaller
    for number, layer in enumerate(layers):
        while open_spans and layer.voxels > layers[open_spans[-1]].voxels:
            ends[open_spans.pop()] = number
        open_spans.append(number)
    return ends
