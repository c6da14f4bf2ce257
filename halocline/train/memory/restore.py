"""How ranks find the newest state that the holders of all nodes have together, and put it together.

The ranks may be others than those that wrote it, fewer or more, on another mesh: copies are boxes of tensors by name.
What a rank's own node has is read there; the rest comes from ranks of nodes that have it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...tensor import ShardedTensor, wrap
from ...world import Mesh
from ..checkpoints import CheckpointError, Loaded
from ..checkpoints.peers import Peers
from ..checkpoints.tree import Parts, assembled, leaves, located, uncopied
from .client import HolderClient
from .copies import checksum
from .rooms import Box, CopiedPiece, read_table, view, volume

Key = tuple[str, Box]  # of a piece: the tensor's name and the box


@dataclass
class _Stock:
    """What all nodes have of one step: for each piece its facts and the nodes that have it; and the state's tree."""

    pieces: dict[Key, CopiedPiece]
    nodes: dict[Key, list[int]]
    tree: Any = None


def restored(
    peers: Peers,
    client: HolderClient,
    mesh: Mesh,
    nodes: Sequence[Sequence[int]],
    template: Mapping[str, Any],
    later: int,
) -> Loaded | None:
    """The newest state later than a step; None if the holders have none that is whole. By all ranks together."""
    node = next(index for index, ranks in enumerate(nodes) if mesh.rank in ranks)
    own = list(nodes[node])
    reports = peers.agree(lambda: _inventory(client, own.index(mesh.rank), len(own), later))
    stocks = _stocks(reports, nodes)
    whole = peers.agree(lambda: [step for step in stocks if _is_whole(stocks[step], mesh)])
    steps = set(whole[0]).intersection(*whole)
    if not steps:
        return None
    step = max(steps)
    stock = stocks[step]
    tree = located(stock.tree, mesh.coordinates)
    wanted = Parts({"tensors": template}, uncopied, lambda *_: "", as_dtensors=False).tensors
    names = leaves(tree)
    boxes = {name: _needed(wanted.get(name), name, stock) for name in names}
    keys = sorted(stock.pieces)
    lacking = [
        index
        for index, key in enumerate(keys)
        if key[0] in boxes and node not in stock.nodes[key] and _overlap(key[1], boxes[key[0]]) is not None
    ]
    orders = peers.agree(lambda: lacking)
    memories = _opened(client, step)
    came: dict[Key, Tensor] = {}
    waits = []
    for rank, indices in enumerate(orders):
        for index in indices:
            key = keys[index]
            sources = nodes[stock.nodes[key][index % len(stock.nodes[key])]]
            source = sources[index % len(sources)]
            if mesh.rank == source:
                waits.append(peers.post_tensor(rank, _local(memories, key)))
            elif mesh.rank == rank:
                piece = stock.pieces[key]
                came[key] = torch.empty(piece.extent, dtype=view(b"", _nothing(piece)).dtype)
                waits.append(peers.await_tensor(source, came[key]))

    def put_together() -> dict[str, Any]:
        for wait in waits:
            wait()
        targets = {name: _filled(name, stride, wanted.get(name), boxes[name], stock, memories, came)
                   for name, stride in names.items()}  # fmt: skip
        made.update(assembled(tree, targets))
        return {}

    made: dict[str, Any] = {}
    peers.agree(put_together)
    return Loaded(step, made["tensors"], made["state"])


def _inventory(client: HolderClient, place: int, ranks: int, later: int) -> list[Any]:
    """What this node's holder has, of which each of its ranks reads and verifies a share: step, pieces and tree."""
    told = []
    for number, (key, _, step, told_sum) in enumerate(sorted(client.rooms())):
        if step <= later or number % ranks != place:
            continue
        memory = client.opened(key)
        if checksum(memory) != told_sum:
            continue  # as if it were not there
        pieces, tree = read_table(memory)
        told.append(
            [step, [[p.name, p.dtype, list(p.shape), [list(each) for each in p.box]] for p in pieces], tree_text(tree)]
        )
    return told


def tree_text(tree: Any) -> str:
    """The tree as text: what ranks tell each other holds no keys that begin with ``$``."""
    return "" if tree is None else json.dumps(tree)


def _stocks(reports: Sequence[Any], nodes: Sequence[Sequence[int]]) -> dict[int, _Stock]:
    """What there is of each step, on all nodes together."""
    stocks: dict[int, _Stock] = {}
    for index, ranks in enumerate(nodes):
        for rank in ranks:
            for step, pieces, tree in reports[rank]:
                stock = stocks.setdefault(int(step), _Stock({}, {}))
                if tree and stock.tree is None:
                    stock.tree = json.loads(tree)
                for name, dtype, shape, box in pieces:
                    piece = CopiedPiece(name, dtype, tuple(shape), tuple((a, b) for a, b in box))
                    stock.pieces[name, piece.box] = piece
                    holders = stock.nodes.setdefault((name, piece.box), [])
                    if index not in holders:
                        holders.append(index)
    return stocks


def _is_whole(stock: _Stock, mesh: Mesh) -> bool:
    """Has every tensor that this rank's part of the state names all of its elements?"""
    if stock.tree is None:
        return False
    try:
        names = leaves(located(stock.tree, mesh.coordinates))
    except CheckpointError:  # of a mesh with other axes: checkpoints say so, too
        return False
    there: dict[str, int] = {}
    for (name, box), piece in stock.pieces.items():
        there[name] = there.get(name, 0) + volume(box)
        shape = piece.shape
        if name in names and there[name] == _count(shape):
            there[name] = -1
    return all(there.get(name) == -1 for name in names)


def _count(shape: Sequence[int]) -> int:
    return volume(tuple((0, size) for size in shape))


def _needed(like: Tensor | None, name: str, stock: _Stock) -> Box:
    """The box that this rank needs of a tensor: its tile, or all."""
    shape, dtype = next((p.shape, p.dtype) for (each, _), p in stock.pieces.items() if each == name)
    if like is not None and (tuple(like.shape) != shape or str(like.dtype) != f"torch.{dtype}"):
        raise CheckpointError(
            f"for {name} the copy in memory has {dtype} of {shape}, and the run needs {like.dtype} of "
            f"{tuple(like.shape)}"
        )
    if isinstance(like, ShardedTensor):
        return tuple((each.lo, each.hi) for each in like.sharding.box)
    return tuple((0, size) for size in shape)


def _overlap(one: Box, other: Box) -> Box | None:
    """What two boxes share; None if nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(start < stop for start, stop in both) else None


def _opened(client: HolderClient, step: int) -> list[tuple[mmap.mmap, dict[Key, CopiedPiece]]]:
    """The copies of a step on this node, with their pieces."""
    memories = []
    for key, _, of, _ in client.rooms():
        if of == step:
            memory = client.opened(key)
            memories.append((memory, {(p.name, p.box): p for p in read_table(memory)[0]}))
    return memories


def _local(memories: Sequence[tuple[mmap.mmap, dict[Key, CopiedPiece]]], key: Key) -> Tensor:
    """A piece that this node has."""
    for memory, pieces in memories:
        if key in pieces:
            return view(memory, pieces[key])
    raise CheckpointError(f"the copy of {key[0]} has gone from this node's memory")


def _nothing(piece: CopiedPiece) -> CopiedPiece:
    """A piece of this dtype without elements."""
    return CopiedPiece(piece.name, piece.dtype, (0,), ((0, 0),))


def _filled(
    name: str, stride: list[int] | None, like: Tensor | None, box: Box, stock: _Stock,
    memories: Sequence[tuple[mmap.mmap, dict[Key, CopiedPiece]]], came: Mapping[Key, Tensor],
) -> Tensor:  # fmt: skip
    """A tensor of this rank, from the pieces that it overlaps: whole with its stride, or a tile."""
    mine = [(key, piece) for key, piece in stock.pieces.items() if key[0] == name]
    dtype = view(b"", _nothing(mine[0][1])).dtype
    extent = tuple(stop - start for start, stop in box)
    sharded = isinstance(like, ShardedTensor)
    target = (
        torch.empty(extent, dtype=dtype)
        if stride is None or sharded
        else torch.empty_strided(extent, stride, dtype=dtype)
    )
    for key, _ in mine:
        both = _overlap(key[1], box)
        if both is None:
            continue
        source = came[key] if key in came else _local(memories, key)
        inside = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(both, box, strict=True))
        within = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(both, key[1], strict=True))
        target[inside] = source[within]
    return wrap(target, like.sharding) if isinstance(like, ShardedTensor) else target
