"""On the ranks of ``bench reshard``: one tensor from the first half of the ranks to the second, in two ways."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from halocline.geometry import Box, shape_of, slices, volume
from halocline.rules import shard
from halocline.tensor import Sharding, make_sharding, unwrap
from halocline.tensor.across import boxes_of, crossing_between, move_across
from halocline.world import Mesh

COLUMNS = 1024
Dims = dict[int, str]
_groups: list[dist.ProcessGroup] = []


@dataclass(frozen=True)
class ReshardCase:
    """A float32 tensor of ``megabytes``, cut as ``before`` on the senders and as ``after`` on the receivers."""

    name: str
    before: Dims
    after: Dims
    megabytes: float

    @property
    def shape(self) -> tuple[int, int]:
        return max(1, round(self.megabytes * 2**20 / 4 / COLUMNS)), COLUMNS


@dataclass(frozen=True)
class ReshardFigures:
    """Of one rank; ``error`` is the largest difference of its tile from what it should be."""

    seconds: float
    error: float


def shardings(case: ReshardCase) -> tuple[Sharding, Sharding]:
    """On halves of the ranks; those of each half lie on one axis ``a``."""
    mesh = Mesh(part=2, a=dist.get_world_size() // 2)
    return (make_sharding(mesh["part", 0], case.shape, case.before),
            make_sharding(mesh["part", 1], case.shape, case.after))  # fmt: skip


def tensor_of(case: ReshardCase) -> Tensor:
    return torch.arange(math.prod(case.shape), dtype=torch.float32).view(case.shape)


def bound(case: ReshardCase) -> tuple[int, int]:
    """Bytes that the busiest link must carry in one direction whatever the algorithm, and bytes over the boundary."""
    old, new = shardings(case)
    entering = max(volume(box) for box in boxes_of(new).values())
    crossed = crossing_between(old, new).crossed
    return 4 * max(entering, -(-crossed // old.mesh.size)), 4 * crossed


def move(case: ReshardCase, way: str) -> ReshardFigures:
    """``way`` is "move", "gather" or "adjoint" (the gradient of a move, back to the senders)."""
    old, new = shardings(case)
    tile = unwrap(shard(tensor_of(case), old.mesh, case.before, check=False)) if old.mesh.is_member else None
    if way == "adjoint":
        return _back(tile, old, new)
    dist.barrier()
    began = time.perf_counter()
    came = move_across(tile, old, new, torch.float32) if way == "move" else gather_and_scatter(tile, old, new)
    seconds = time.perf_counter() - began
    if not new.mesh.is_member:
        return ReshardFigures(seconds, 0.0)
    wanted = tensor_of(case)[slices(boxes_of(new)[dist.get_rank()])]
    return ReshardFigures(seconds, float((unwrap(came).detach() - wanted).abs().max()))


def _back(tile: Tensor | None, old: Sharding, new: Sharding) -> ReshardFigures:
    leaf = tile.clone().requires_grad_() if tile is not None else None
    came = unwrap(move_across(leaf, old, new, torch.float32))
    weight = torch.ones_like(came)
    dist.barrier()
    began = time.perf_counter()
    came.backward(weight)
    seconds = time.perf_counter() - began
    # Holders of the same elements get the gradients of their shares, times the number of holders: ones on average.
    return ReshardFigures(seconds, 0.0 if leaf is None else float(abs(_gradient(leaf).mean(dtype=torch.float64) - 1)))


def _gradient(leaf: Tensor) -> Tensor:
    if leaf.grad is None:
        raise AssertionError("no gradient came back")
    return leaf.grad


def gather_and_scatter(tile: Tensor | None, old: Sharding, new: Sharding) -> Tensor:
    """Gathered on the first sender, sent to the first receiver, and scattered or broadcast there, by gloo."""
    ranks = dist.get_world_size()
    first, second = range(ranks // 2), range(ranks // 2, ranks)
    if not _groups:
        _groups.extend(dist.new_group(list(part)) for part in (first, second))
    me, shape, boxes = dist.get_rank(), old.shape, boxes_of(old)
    whole = torch.empty(shape) if me in (0, ranks // 2) else None
    if tile is not None:
        whole = _gathered(tile, boxes, whole) if old.axes else tile
    if me == 0 and whole is not None:
        dist.send(whole, ranks // 2)
    if me not in second:
        return torch.empty(0)
    if me == ranks // 2 and whole is not None:
        dist.recv(whole, 0)
    if not new.axes:
        whole = torch.empty(shape) if whole is None else whole
        dist.broadcast(whole, ranks // 2, group=_groups[1])
        return whole
    return _scattered(whole, boxes_of(new), me)


def _gathered(tile: Tensor, boxes: dict[int, Box], whole: Tensor | None) -> Tensor | None:
    parts = [torch.empty(shape_of(box)) for box in boxes.values()] if whole is not None else None
    dist.gather(tile, parts, 0, group=_groups[0])
    if whole is not None and parts is not None:
        for box, part in zip(boxes.values(), parts, strict=True):
            whole[slices(box)] = part
    return whole


def _scattered(whole: Tensor | None, boxes: dict[int, Box], me: int) -> Tensor:
    parts = [whole[slices(box)].contiguous() for box in boxes.values()] if whole is not None else None
    mine = torch.empty(shape_of(boxes[me]))
    dist.scatter(mine, parts, min(boxes), group=_groups[1])
    return mine
