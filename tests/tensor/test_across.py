"""Tensors moved between meshes of different ranks: content, adjoint, and bytes over the boundary."""

from random import Random

import pytest
import torch

import halocline as hc
from halocline.tensor import make_sharding, unwrap
from halocline.tensor.across import move_across, replicas
from halocline.testing import shared_pool
from halocline.world import run_local

SHAPE = (6, 5, 4)
CUTS = [{}, {0: "a"}, {1: "b"}, {0: "a", 2: "b"}, {1: "a", 0: "b"}]


def parts_of(size: int, random: Random) -> tuple[hc.Mesh, hc.Mesh]:
    """Two sub-meshes of a mesh of ``size`` times four ranks, which may overlap and differ in size."""
    mesh = hc.Mesh(part=size, a=2, b=2)
    lo, hi = random.randrange(size), random.randrange(size)
    first = mesh["part", lo] if random.random() < 0.5 else mesh["part", lo]["a", random.randrange(2)]
    second = mesh["part", hi] if random.random() < 0.5 else mesh["part", hi]["b", 0:1]
    return first, second


def moved(seeds: range) -> list[tuple[float, float, float]]:
    """For each seed: the error of the content, and both inner products of the adjoint."""
    found = []
    for seed in seeds:
        random = Random(seed)
        first, second = parts_of(2, random)
        old, new = (
            make_sharding(m, SHAPE, {d: axis for d, axis in random.choice(CUTS).items() if axis in m.sizes})
            for m in (first, second)
        )
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(2))
        tile = hc.shard(x, first, old.dims_by_axis(), check=False) if first.is_member else None
        leaf = unwrap(tile).detach().clone().requires_grad_() if tile is not None else None
        result = move_across(leaf, old, new, torch.float64, key=f"case {seed}")
        plain = unwrap(result)
        error = left = 0.0
        weight = torch.zeros(0, dtype=torch.float64)
        if second.is_member:
            mine = unwrap(hc.shard(y, second, new.dims_by_axis(), check=False))
            error = float((plain.detach() - unwrap(hc.shard(x, second, new.dims_by_axis(), check=False))).abs().max())
            left, weight = float((plain.detach() * mine).sum()) / replicas(new), mine
        plain.backward(weight)
        right = float((leaf.detach() * leaf.grad).sum()) / replicas(old) if leaf is not None else 0.0
        found.append((error, left, right))
    return found


def check(by_rank: list[list[tuple[float, float, float]]]) -> None:
    for case in zip(*by_rank, strict=True):
        assert max(error for error, _, _ in case) == 0
        left, right = sum(entry[1] for entry in case), sum(entry[2] for entry in case)
        assert left == pytest.approx(right, rel=1e-12, abs=1e-12)


def test_threads() -> None:
    check(run_local(8, lambda: moved(range(150))))


@pytest.mark.parametrize("ranks", [8])
def test_processes(ranks: int) -> None:
    check(shared_pool(ranks).run(moved, range(150, 170), deadline=60))


def boundary_bytes() -> tuple[int, int]:
    """Bytes that this rank sends to the other part, and inside its own."""
    mesh = hc.Mesh(part=2, a=2)
    old, new = make_sharding(mesh["part", 0], (64, 3), {0: "a"}), make_sharding(mesh["part", 1], (64, 3), {})
    outside = inside = 0

    def listen(event: object) -> None:
        nonlocal outside, inside
        for peer, size in getattr(event, "sends", ()):
            outside, inside = (outside + size, inside) if peer // 2 != mesh.rank // 2 else (outside, inside + size)

    x = torch.ones(32, 3) if mesh.rank < 2 else None
    with mesh.world.events.listening(listen):
        move_across(x, old, new, torch.float32)
    return outside, inside


def test_every_element_crosses_the_boundary_once() -> None:
    found = run_local(4, boundary_bytes)
    assert [outside for outside, _ in found] == [384, 384, 0, 0]  # 64 x 3 floats, from two senders
    assert [inside for _, inside in found] == [0, 0, 384, 384]  # each half is passed on once


def test_outside_a_sub_mesh_its_places_are_refused() -> None:
    def body() -> str:
        mesh = hc.Mesh(stage=2)
        other = mesh["stage", 1 - mesh.rank]
        assert mesh["stage", 0] is mesh["stage", 0]
        assert other.members == (1 - mesh.rank,)
        with pytest.raises(hc.MeshError, match="not in"):
            _ = other.coordinates
        return "refused"

    assert run_local(2, body) == ["refused", "refused"]
