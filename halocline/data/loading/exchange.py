"""Sends boxes of cached samples from the ranks that hold them to the ranks that need them in this step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch

from ...world import Label, Receive, Send, World
from ..stores.seen import oriented
from ..stores.store import Array, put
from .cache import SampleCache
from .layout import BatchLayout
from .order import Step

_LABEL = Label("tiles from memory", "hc.data")
Targets = Mapping[tuple[int, str], Array]


class SampleExchange:
    """One step's exchange.

    Both ends work out the same list of parts for each pair of ranks, so that no requests are sent.
    """

    def __init__(self, cache: SampleCache, layout: BatchLayout, step: Step, positions: list[int]) -> None:
        self._cache, self._layout, self._step = cache, layout, step
        self._mesh = layout.mesh
        self._positions = [p for p in positions if cache.keeps(step.samples[p])]
        self.outgoing: dict[int, list[Array]] = defaultdict(list)
        self.incoming: dict[int, list[tuple[Array, np.dtype[np.generic]]]] = defaultdict(list)

    def run(self, targets: Targets, world: World) -> int:
        """Fill the targets of this rank; how many bytes came from others."""
        batch = self._layout.batch(len(self._step.samples))
        mine = self._layout.group(self._mesh.coordinates)
        for position in self._positions:
            # The group of ranks that works on this sample in this step.
            needing = next(g for g, piece in enumerate(batch.pieces()) if piece.lo <= position < piece.hi)
            home = self._cache.home(self._step.samples[position])
            for name in self._layout.fields:
                if needing == mine:
                    self._collect(position, name, home, targets[position, name])
                if home == mine:
                    self._hand_out(position, name, needing)
        return self._send(world)

    def _collect(self, position: int, name: str, home: int, target: Array) -> None:
        """What this rank needs of one sample: its own part at once, the others' when they come."""
        each, sample = self._layout.fields[name], self._step.samples[position]
        view = self._layout.views(self._step.epoch, sample)[name]
        box = self._layout.needed(name, self._mesh.coordinates)
        if view.fills(box):
            # Before the parts are put: a shift leaves places that no part covers.
            target.fill(each.fill)
        for where in self._cache.ranks(each, home):
            holder = self._mesh.rank_at(where)
            for piece in view.pieces(box, self._cache.home_box(each, where)):
                place = oriented(target, piece, view)
                if holder == self._mesh.rank:
                    put(self._cache.part(sample, name, piece.source), place)
                else:
                    self.incoming[holder].append((place, each.kept_dtype))

    def _hand_out(self, position: int, name: str, needing: int) -> None:
        """What this rank holds of one sample and the ranks of the group ``needing`` want."""
        each, sample = self._layout.fields[name], self._step.samples[position]
        view = self._layout.views(self._step.epoch, sample)[name]
        mine = self._cache.home_box(each, self._mesh.coordinates)
        for where in self._cache.ranks(each, needing):
            needer = self._mesh.rank_at(where)
            if needer != self._mesh.rank:
                for piece in view.pieces(self._layout.needed(name, where), mine):
                    self.outgoing[needer].append(self._cache.part(sample, name, piece.source))

    def _send(self, world: World) -> int:
        """One message for each pair of ranks; waits for all of them. Returns the bytes that arrived."""
        sends = [Send(peer, _packed(parts)) for peer, parts in sorted(self.outgoing.items())]
        expected = sorted(self.incoming.items())
        receives = [
            Receive(peer, sum(place.size * dtype.itemsize for place, dtype in parts)) for peer, parts in expected
        ]
        everyone = tuple(range(self._mesh.size))
        like = torch.empty(0, dtype=torch.uint8)
        # Every rank begins one exchange a step, if only an empty one: their counts of messages stay equal.
        messages = world.begin(sends, receives, like, everyone, _LABEL).wait()
        for (_, parts), message in zip(expected, messages, strict=True):
            _unpack(message, parts)
        return sum(receive.elements for receive in receives)


def _packed(parts: list[Array]) -> torch.Tensor:
    """One message of bytes."""
    message, at = np.empty(sum(part.nbytes for part in parts), np.uint8), 0
    for part in parts:
        message[at : at + part.nbytes].view(part.dtype).reshape(part.shape)[...] = part
        at += part.nbytes
    return torch.from_numpy(message)


def _unpack(message: torch.Tensor, parts: list[tuple[Array, np.dtype[np.generic]]]) -> None:
    """Copy the parts of a message to their places, converted to the dtype of the batch."""
    data, at = message.numpy(), 0
    for place, dtype in parts:
        size = place.size * dtype.itemsize
        put(data[at : at + size].view(dtype).reshape(place.shape), place)
        at += size
