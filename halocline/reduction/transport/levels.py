"""The levels of the machine: which ranks share a node and which nodes a rack, as each rank tells of itself."""

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

LEVELS = "HALOCLINE_LEVELS"  # such as "2,4": ranks on a node, nodes in a rack; the remaining factor is one more level
_log = logging.getLogger(__name__)
_NAMESPACE = Path("/proc/self/ns/net")


@dataclass(frozen=True)
class Levels:
    """Ranks ordered so that neighbours share a node, and the number of ranks or groups at each level.

    Where nodes have different numbers of ranks there is one level.
    """

    ranks: tuple[int, ...]
    factors: tuple[int, ...]


def levels_of(world: World) -> Levels:
    """The levels of a world's ranks, found in one exchange by all ranks together; the same on all."""
    asked = os.environ.get(LEVELS, "")
    if world.size == 1 or not world.capabilities.moves_data:
        return grouped([0] * world.size, asked)
    nodes = torch.zeros(world.size + 1, dtype=torch.int64)
    nodes[world.rank] = 1
    if world.capabilities.separate_processes:
        # A host by its name. A network namespace is a node of its own, since messages leave it over a link.
        namespace = _NAMESPACE.stat().st_ino if _NAMESPACE.exists() else 0
        nodes[world.rank] += zlib.crc32(f"{socket.gethostname()}|{namespace}".encode())
    everyone = world.maximum(nodes, tuple(range(world.size)), Label("levels", "the machine", "control")).tolist()
    return grouped(everyone[: world.size], asked)


def grouped(nodes: Sequence[int], asked: str = "") -> Levels:
    """Levels from the node of each rank, or as ``asked`` (the text of HALOCLINE_LEVELS).

    Nodes stand in the order of their first ranks.

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
