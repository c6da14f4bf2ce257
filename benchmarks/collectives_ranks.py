"""On the ranks of ``bench collectives``: the same sum by several ways."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from halocline.reduction.transport.rings import Rings
from halocline.world import Label, World
from halocline.world.mesh import this_world

from .gradients_ranks import start_together

FLAT = "gloo"  # torch's all_reduce, as DDP would call it
TORCH_SCATTER, OWN_SCATTER = "torch reduce-scatter", "reduce-scatter"
WORLD = "world"
_LABEL = Label("bench", "a sum", "gradients")
_rings: dict[str, Rings] = {}


def prepare(ways: list[str]) -> dict[str, float]:
    """Engines, made by all ranks in one order, and a small sum by each. What the automatic choice expects, by bytes."""
    for way in ways:
        if way not in (FLAT, TORCH_SCATTER, WORLD):
            _rings[way] = Rings(_world(), "levels" if way == OWN_SCATTER else way)
        _work(way, torch.ones(1 << 16))()
    auto = _rings.get("auto")
    return {} if auto is None else {str(size): auto.seconds(size) for size in (1 << 10, 1 << 20, 1 << 26)}


def check(way: str, elements: int) -> bool:
    """Is it the sum?"""
    mine = (torch.arange(elements) % 7 + dist.get_rank()).to(torch.float32)
    ranks = dist.get_world_size()
    true = (ranks * (torch.arange(elements) % 7) + ranks * (ranks - 1) // 2).to(torch.float32)
    result = _work(way, mine)()
    if way in (TORCH_SCATTER, OWN_SCATTER):
        true = true.chunk(ranks)[dist.get_rank()]
    return torch.equal(mine if result is None else result, true)


def measure(way: str, size: int, repeat: int) -> list[float]:
    """Seconds of each of some sums of so many bytes."""
    work = _work(way, torch.zeros(size // 4))
    seconds = []
    for _ in range(repeat):
        began = start_together()
        work()
        seconds.append(time.perf_counter() - began)
    return seconds


def stream(way: str, size: int, count: int) -> float:
    """Seconds of one of many small sums, one after the other."""
    work = _work(way, torch.zeros(size // 4))
    for _ in range(count // 10 + 1):
        work()
    began = start_together()
    for _ in range(count):
        work()
    return (time.perf_counter() - began) / count


def chosen(size: int) -> str:
    return _rings["auto"].way(size)


def drop() -> None:
    for rings in _rings.values():
        rings.close()
    _rings.clear()


def _world() -> World:
    world = this_world()
    assert world is not None
    return world


def _work(way: str, tensor: Tensor) -> Callable[[], Tensor | None]:
    if way == FLAT:
        return lambda: dist.all_reduce(tensor, async_op=True).wait() and None
    if way == TORCH_SCATTER:
        share = torch.empty(tensor.numel() // dist.get_world_size())
        return lambda: dist.reduce_scatter_tensor(share, tensor, async_op=True).wait() and share
    if way == WORLD:
        everyone = tuple(range(dist.get_world_size()))
        return lambda: _world().sum(tensor, everyone, _LABEL)
    rings = _rings[way]
    if way == OWN_SCATTER:
        return lambda: rings.reduce_scatter(tensor)
    return lambda: rings.begin(tensor, _LABEL).wait()
