"""The levels of the machine: which ranks share a node, which nodes a rack, as the ranks themselves say."""

from __future__ import annotations

import logging
import os
import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from ...errors import MeshError
from ...world import Label, World

LEVELS = "HALOCLINE_LEVELS"  # such as "2,4": ranks on a node, nodes in a rack; what is left is one level more
_log = logging.getLogger(__name__)
_NAMESPACE = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Levels:
    """Ranks in order, neighbours first, and how many are at each level. Where nodes differ there is one level."""

    ranks: tuple[int, ...]
    factors: tuple[int, ...]


def levels_of(world: World) -> Levels:
    """By what every rank says of itself: one exchange, the same result on all. Made by all together."""
    if world.size == 1 or not world.capabilities.moves_data:
        return grouped([0] * world.size, os.environ.get(LEVELS, ""))
    said = torch.zeros(world.size + 1, dtype=torch.int64)
    said[world.rank] = _own_node(world)
    asked = os.environ.get(LEVELS, "")
    heard = world.maximum(said, tuple(range(world.size)), Label("levels", "the machine", "control")).tolist()
    return grouped(heard[: world.size], asked)


def grouped(nodes: Sequence[int], asked: str = "") -> Levels:
    """``nodes`` names the node of each rank. Nodes stand in the order of their first ranks.

    >>> grouped([5, 9, 5, 9])
    Levels(ranks=(0, 2, 1, 3), factors=(2, 2))
    """
    members: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        members.setdefault(node, []).append(rank)
    ranks = tuple(rank for node in members.values() for rank in node)
    if asked:
        return Levels(ranks, _asked_factors(asked, len(ranks)))
    sizes = {len(node) for node in members.values()}
    if len(sizes) > 1:
        _log.warning(
            "nodes have different numbers of ranks (%s): sums over ranks go round one ring, which is slower; "
            "start the same number on each node",
            " and ".join(map(str, sorted(sizes))),
        )
        return Levels(ranks, (len(ranks),))
    factors = tuple(factor for factor in (sizes.pop(), len(members)) if factor > 1)
    return Levels(ranks, factors or (len(ranks),))


def _asked_factors(asked: str, ranks: int) -> tuple[int, ...]:
    try:
        factors = [int(part) for part in asked.split(",")]
    except ValueError as error:
        raise MeshError(f"{LEVELS}={asked!r}: give numbers with commas between them, such as 2,4") from error
    if any(factor < 1 for factor in factors) or ranks % prod(factors):
        raise MeshError(f"{LEVELS}={asked!r}: {ranks} ranks do not divide by {prod(factors)}")
    factors.append(ranks // prod(factors))
    return tuple(factor for factor in factors if factor > 1) or (ranks,)


def _own_node(world: World) -> int:
    """A host by its name; a network namespace is a node of its own, for what leaves it goes over a link."""
    if not world.capabilities.separate_processes:
        return 1
    inside = _NAMESPACE.stat().st_ino if _NAMESPACE.exists() else 0
    return zlib.crc32(f"{socket.gethostname()}|{inside}".encode()) + 1
