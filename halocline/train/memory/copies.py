"""Every few steps the state is copied into memory that outlives the ranks, on this node and, in part, on the next.

What every node has (weights that are whole, and their moments) is copied within the node, each of its ranks a share.
What only this node has (its parts of weights that are cut) is also sent to the next node, in the background.
"""

from __future__ import annotations

import mmap
import sys
import zlib
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...background import in_background
from ...sizes import free_memory
from ...tensor import ShardedTensor, unwrap
from ...world import Mesh, ranks_with_same, this_rank_info
from ...world.placement import place_on, placement_of
from ..checkpoints import CheckpointError, Loaded
from ..checkpoints.peers import Peers
from ..checkpoints.tree import Parts, uncopied
from .client import HolderClient
from .rooms import Box, CopiedPiece, laid_out, view

_CHUNK = 64 << 20  # bytes of a message, and of a checksum's turn
_SHARE = 0.5  # of the memory that is free, where no limit is given


class StateCopies:
    """The copies of one run. Every method but the properties is called by all ranks together.

    ``limit``: most bytes that they may take on a node, by default half of what is free. One copy is complete while the
    next is written, so that two are there at times. ``parent`` is the process with which this node's copies go, by
    default the one that started the rank.
    """

    def __init__(
        self, folder: Path, mesh: Mesh, limit: int | None, deadline: float | None, parent: int | None = None
    ) -> None:
        self._mesh = mesh
        self._peers = Peers(mesh, deadline)
        clients: list[HolderClient] = []

        def connected() -> str:
            _check_possible(parent)
            clients.append(HolderClient(folder, limit or int(free_memory() * _SHARE), parent))
            return clients[0].holder

        holders = self._peers.agree(connected)
        self._client = clients[0]
        by_node: dict[str, list[int]] = {}
        for rank, each in enumerate(holders):
            by_node.setdefault(each, []).append(rank)
        #: The ranks of each node, and which node is this one.
        self._nodes = list(by_node.values())
        self._node = next(index for index, ranks in enumerate(self._nodes) if mesh.rank in ranks)
        self._pending: Future[None] | None = None
        self._step = -1  # of the last copy that was begun

    @property
    def busy(self) -> bool:
        """Is a copy of this rank still under way?"""
        return self._pending is not None and not self._pending.done()

    @property
    def failed(self) -> bool:
        """Has the last copy failed on this rank?"""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def raise_failure(self) -> None:
        """Raise, on all ranks, the error of the last copy; called once one of them ``failed``."""
        self._peers.agree(lambda: self._pending.result() if self.failed and self._pending else None)

    # ---- copying ----

    def copy(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Copy this state; what goes to another node leaves in the background. Only if no rank is ``busy``.

        CheckpointError on all ranks if there is no memory for it.
        """
        own: dict[str, tuple[mmap.mmap, int]] = {}

        def written() -> list[int]:
            if self._step >= 0:
                self._client.forget(self._step)  # that one is complete, on all ranks: earlier ones are not needed
            parts = Parts({"tensors": tensors, "state": state}, uncopied, self._place, as_dtensors=False)
            for kind, names in self._shares(parts.tensors).items():
                tree = parts.tree if kind == "here" and self._mesh.rank == self._nodes[self._node][0] else None
                if names or tree is not None:
                    own[kind] = self._written(f"{step}/{kind}/{self._mesh.rank}", parts, names, tree)
            return [own["sent"][1]] if "sent" in own else []

        sizes = self._peers.agree(written)
        self._step = step
        self._pending = in_background(lambda: self._finish(step, own, sizes), "halocline copy")

    def _shares(self, tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
        """Names of what this rank copies: "here" what other nodes have as well, "sent" what only this one has."""
        local, shares = self._nodes[self._node], dict[str, list[str]](here=[], sent=[])
        loads = dict.fromkeys(local, 0)
        for name in sorted(tensors, key=lambda name: (-unwrap(tensors[name]).nbytes, name)):
            tensor = tensors[name]
            if not placement_of(tensor):  # the same on all ranks, so that all compute the same shares
                rank = min(local, key=loads.__getitem__)
                loads[rank] += tensor.nbytes + 1
                if rank == self._mesh.rank:
                    shares["here"].append(name)
                continue
            same = ranks_with_same(tensor, self._mesh)
            if self._mesh.rank == min(rank for rank in same if rank in local):
                alone = len(self._nodes) > 1 and all(rank in local for rank in same)
                shares["sent" if alone else "here"].append(name)
        return shares

    def _written(self, key: str, parts: Parts, names: list[str], tree: Any) -> tuple[mmap.mmap, int]:
        """Write these tensors into memory of the holder."""
        tiles = {name: unwrap(parts.tensors[name]).detach() for name in names}
        pieces = []
        for name, tile in tiles.items():
            whole, dtype = parts.tensors[name], str(tile.dtype).removeprefix("torch.")
            pieces.append(CopiedPiece(name, dtype, tuple(whole.shape), _box(whole)))
        head, placed, size = laid_out(pieces, tree)
        memory = self._client.room(key, size)
        memory[: len(head)] = head
        for piece in placed:
            view(memory, piece).copy_(tiles[piece.name])
        return memory, size

    def _place(self, tensor: Tensor, name: str) -> str:
        """Whose values a tensor has that is not whole; those of sharded tensors are told by their box."""
        if isinstance(tensor, DTensor):
            raise CheckpointError(f"{name} is a DTensor, of which no copies are kept in memory; set copies.every = 0")
        return "" if isinstance(tensor, ShardedTensor) else place_on(tensor, self._mesh)

    def _finish(self, step: int, own: Mapping[str, tuple[mmap.mmap, int]], sizes: list[list[int]]) -> None:
        """In the background: checksums, and copies to and from other nodes."""
        sums = {kind: checksum(memory) for kind, (memory, _) in own.items()}
        rank, waits, came = self._mesh.rank, [], []
        if "sent" in own:
            heads = torch.tensor([sums["sent"]])
            waits += [self._peers.post_tensor(self._partner(rank), each) for each in (heads, _flat(own["sent"][0]))]
        for other, told in enumerate(sizes):
            if told and self._partner(other) == rank:
                key = f"{step}/sent/{other}"
                memory, head = self._client.room(key, told[0]), torch.zeros(1, dtype=torch.int64)
                waits += [self._peers.await_tensor(other, each) for each in (head, _flat(memory))]
                came.append((key, memory, head))
        for kind in own:
            self._client.valid(f"{step}/{kind}/{rank}", step, sums[kind])
        for wait in waits:
            wait()
        for key, memory, head in came:
            if checksum(memory) != int(head):
                raise CheckpointError(f"a copy of step {step} came damaged from another node")
            self._client.valid(key, step, int(head))

    def _partner(self, rank: int) -> int:
        """The rank that keeps what this one sends: on the next node."""
        node = next(index for index, ranks in enumerate(self._nodes) if rank in ranks)
        after = self._nodes[(node + 1) % len(self._nodes)]
        return after[self._nodes[node].index(rank) % len(after)]

    # ---- coming back ----

    def load_latest(self, template: Mapping[str, Any], later_than: int) -> Loaded | None:
        """The newest state that the holders of all nodes have together, if it is later than a step; else None."""
        from .restore import restored

        found = restored(self._peers, self._client, self._mesh, self._nodes, template, later_than)
        if found is not None:
            self._step = found.step
            self._peers.agree(lambda: self._client.ask(what="forget", step=found.step, invalid=True))
        return found

    def close(self, end: bool) -> None:
        """Leave; with ``end`` the copies go, since the run is over."""
        if self._pending is not None and end:
            with suppress(Exception):  # of a copy that is no longer needed
                self._pending.result(self._peers.deadline)
        self._client.close(end)


def checksum(memory: mmap.mmap) -> int:
    """CRC-32 of a copy. The interpreter is free for other threads meanwhile."""
    value, whole = 0, memoryview(memory)
    for start in range(0, len(whole), _CHUNK):
        value = zlib.crc32(whole[start : start + _CHUNK], value)
    return value


def _flat(memory: mmap.mmap) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def _box(tensor: Tensor) -> Box:
    """The box of a tensor that this rank holds."""
    if isinstance(tensor, ShardedTensor):
        return tuple((each.lo, each.hi) for each in tensor.sharding.box)
    return tuple((0, size) for size in tensor.shape)


def _check_possible(parent: int | None) -> None:
    """Raise CheckpointError where copies in memory cannot outlive a rank."""
    if sys.platform != "linux":
        raise CheckpointError(f"copies.every: copies of the state in memory need Linux, and this is {sys.platform}")
    if parent is None and this_rank_info() is None:
        raise CheckpointError(
            "copies.every: copies of the state in memory outlive a rank that a launcher has started, and this process "
            "was started alone; give --restarts, or start it with torchrun, or set copies.every = 0"
        )
