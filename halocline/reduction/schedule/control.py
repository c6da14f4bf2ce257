"""Small agreements among all ranks: a bitwise AND or OR of a few words, by one of three algorithms.

Recursive doubling takes ceil(log2 P) messages a rank (two more where P is no power of two), a tree of radix r at most
r + 1 out and r + 1 in. A coordinator talks to every rank; benchmarks compare the others with it.
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
        """All ranks' words combined, the same on all. By all ranks together."""
        everyone = tuple(range(self.world.size))
        return self.world.combined(bits, everyone, combine, Label(self.name, "backward", "gradients"))


@dataclass
class Tree:
    """A tree in which rank i is the parent of ranks ``radix * i + 1`` to ``radix * i + radix``."""

    world: World
    name: str
    radix: int = 4

    def agree(self, bits: Tensor, combine: Combine) -> Tensor:
        """Combine words on the way up to rank 0, and send the result down. By all ranks together."""
        rank, size = self.world.rank, self.world.size
        children = [child for child in range(self.radix * rank + 1, self.radix * rank + self.radix + 1) if child < size]
        for child in children:
            bits = combine(bits, self._received(child, bits))
        if rank:
            parent = (rank - 1) // self.radix
            self._send(parent, bits)
            bits = self._received(parent, bits)
        for child in children:
            self._send(child, bits)
        return bits

    def _send(self, peer: int, bits: Tensor) -> None:
        label = Label(f"{self.name} {self.world.rank} to {peer}", "backward", "gradients")
        self.world.begin([Send(peer, bits)], [], bits, self._pair(peer), label).wait()

    def _received(self, peer: int, like: Tensor) -> Tensor:
        label = Label(f"{self.name} {peer} to {self.world.rank}", "backward", "gradients")
        return self.world.begin([], [Receive(peer, like.numel())], like, self._pair(peer), label).wait()[0]

    def _pair(self, peer: int) -> tuple[int, ...]:
        """The group of the message; -2 keeps it apart from other messages of the same two ranks."""
        return (*sorted((self.world.rank, peer)), -2)


@dataclass
class Coordinator(Tree):
    """A tree of one level: rank 0 is the parent of all others."""

    def __post_init__(self) -> None:
        self.radix = max(1, self.world.size - 1)


Control = Doubling | Tree


def packed(flags: list[bool]) -> Tensor:
    """Flags as bits of int64 words, 63 a word: the sign bit stays unused."""
    words = [0] * -(-len(flags) // 63)
    for place, flag in enumerate(flags):
        words[place // 63] |= int(flag) << (place % 63)
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def unpacked(words: Tensor, count: int) -> list[bool]:
    """The first ``count`` flags.

    >>> unpacked(packed([True, False] * 50), 100) == [True, False] * 50
    True
    """
    values = words.tolist()
    return [bool(values[place // 63] >> (place % 63) & 1) for place in range(count)]
