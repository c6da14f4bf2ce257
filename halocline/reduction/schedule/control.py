"""Small agreements among all ranks: a bitwise AND or OR of a few words, in one of three ways.

Recursive doubling takes ceil(log2 P) messages a rank (two more where P is no power of two), a tree of radix r at most
r + 1 out and r + 1 in. A coordinator hears and answers everybody; it is here to be compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...world import Label, Receive, Send, World

Combine = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Doubling:
    """Recursive doubling: every rank does the same."""

    world: World
    name: str

    def agree(self, bits: Tensor, combine: Combine) -> Tensor:
        everyone = tuple(range(self.world.size))
        return self.world.combined(bits, everyone, combine, Label(self.name, "backward", "gradients"))


@dataclass
class Tree:
    """Rank i stands above ranks ``radix * i + 1`` to ``radix * i + radix``: up it is combined, down it is told."""

    world: World
    name: str
    radix: int = 4

    def agree(self, bits: Tensor, combine: Combine) -> Tensor:
        rank, size = self.world.rank, self.world.size
        below = [child for child in range(self.radix * rank + 1, self.radix * rank + self.radix + 1) if child < size]
        above = None if rank == 0 else (rank - 1) // self.radix
        for child in below:
            bits = combine(bits, _received(self.world, child, bits, self.name))
        if above is not None:
            _sent(self.world, above, bits, self.name)
            bits = _received(self.world, above, bits, self.name)
        for child in below:
            _sent(self.world, child, bits, self.name)
        return bits


@dataclass
class Coordinator(Tree):
    """A tree of one level: rank 0 above all others."""

    def __post_init__(self) -> None:
        self.radix = max(1, self.world.size - 1)


Control = Doubling | Tree


def _label(name: str, sender: int, receiver: int) -> Label:
    return Label(f"{name} {sender} to {receiver}", "backward", "gradients")


def _sent(world: World, peer: int, bits: Tensor, name: str) -> None:
    pair = (*sorted((world.rank, peer)), -2)
    world.begin([Send(peer, bits)], [], bits, pair, _label(name, world.rank, peer)).wait()


def _received(world: World, peer: int, like: Tensor, name: str) -> Tensor:
    pair = (*sorted((world.rank, peer)), -2)
    return world.begin([], [Receive(peer, like.numel())], like, pair, _label(name, peer, world.rank)).wait()[0]


def packed(flags: list[bool]) -> Tensor:
    """63 a word: the sign stays out of it."""
    words = [0] * -(-len(flags) // 63)
    for place, flag in enumerate(flags):
        words[place // 63] |= int(flag) << (place % 63)
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def unpacked(words: Tensor, count: int) -> list[bool]:
    """
    >>> unpacked(packed([True, False] * 50), 100) == [True, False] * 50
    True
    """
    values = words.tolist()
    return [bool(values[place // 63] >> (place % 63) & 1) for place in range(count)]
