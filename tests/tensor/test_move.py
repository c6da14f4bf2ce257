"""``hc.move``: a computation that goes on on another mesh has the value and gradient of one rank."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import halocline as hc
from halocline.geometry import Interval, volume
from halocline.tensor import make_sharding, unwrap
from halocline.tensor.across import boxes_of, crossing_between, move_across
from halocline.testing import shared_pool
from halocline.world import run_local

LAYOUTS = [{}, {0: "a"}, {1: "b"}, {2: "a"}, {0: "b", 3: "a"}, {2: "a", 3: "b"}]
SHAPE = (4, 3, 6, 5)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    return tuple(torch.randn(shape, generator=random, dtype=torch.float64) for shape in (SHAPE, (3, 3, 3, 3), SHAPE))


def over_two_meshes(before: dict[int, str], after: dict[int, str], stages: tuple[int, int]) -> tuple[float, float]:
    """Errors of the loss (on receivers) and of the input's gradient (the mean over the senders)."""
    mesh = hc.Mesh(stage=2, a=2, b=2)
    first, second = mesh["stage", stages[0]], mesh["stage", stages[1]]
    x, weight, target = inputs()
    leaf = x.clone().requires_grad_()
    expected = ((F.conv2d(leaf, weight, padding=1).tanh() - target) ** 2).mean()
    expected.backward()
    mine = x.clone().requires_grad_()
    middle = None
    if first.is_member:
        middle = F.conv2d(hc.shard(mine, first, before) if before else mine, weight, padding=1)
    moved = hc.move(middle, second, after, source=first)
    error = 0.0
    if second.is_member:
        loss = ((moved.tanh() - (hc.shard(target, second, after) if after else target)) ** 2).mean()
        error = float((loss - expected).detach().abs())
        loss.backward()
    else:
        moved.sum().backward()
    wrong = 0.0
    if first.is_member:
        mean = first.world.sum(mine.grad, first.ranks_along(first.names), hc.world.Label("sum", "test")) / first.size
        wrong = float((mean - leaf.grad).abs().max())
    return error, wrong


@pytest.mark.parametrize(("before", "after"), [(LAYOUTS[i], LAYOUTS[(i + n) % 6]) for i in range(6) for n in (0, 2)])
def test_value_and_gradient_are_those_of_one_rank(before: dict[int, str], after: dict[int, str]) -> None:
    for error, wrong in run_local(8, lambda: over_two_meshes(before, after, (0, 1))):
        assert error <= 1e-12 and wrong <= 1e-12


def test_processes_and_the_way_back() -> None:
    for stages in ((0, 1), (1, 0)):
        for error, wrong in shared_pool(8).run(over_two_meshes, {2: "a", 3: "b"}, {0: "b"}, stages, deadline=60):
            assert error <= 1e-12 and wrong <= 1e-12


def told_apart() -> list[bool]:
    """What receivers learn: uneven points, dtype, and that nothing takes a gradient."""
    mesh = hc.Mesh(stage=2, a=2)
    first, second = mesh["stage", 0], mesh["stage", 1]
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        x = (torch.arange(14).view(7, 2) % 5).to(dtype)
        tile = hc.shard(x, first, {0: "a"}, points={0: (0, 5, 7)}) if first.is_member else None
        y = hc.move(tile, second, {0: "a"}, source=first, points={0: (0, 0, 7)})
        assert not y.requires_grad
        if second.is_member:
            wanted = x[:0] if mesh.rank == 2 else x
            found.append(torch.equal(unwrap(y), wanted) and y.dtype == dtype)
    return found


def test_receivers_learn_shape_cut_and_dtype() -> None:
    assert run_local(4, told_apart)[2:] == [[True] * 5] * 2


def test_a_plain_tensor_goes_to_a_smaller_mesh_that_overlaps() -> None:
    def body() -> float:
        mesh = hc.Mesh(rank=3)
        part = mesh["rank", 1:3]
        x = torch.arange(12.0, dtype=torch.float64).requires_grad_()
        y = hc.move(x, part, {0: "rank"}, source=mesh)
        (y * y).sum().backward() if part.is_member else y.sum().backward()
        total = mesh.world.sum(x.grad, (0, 1, 2), hc.world.Label("sum", "test")) / 3
        return float((total - 2 * x.detach()).abs().max())

    assert run_local(3, body) == [0.0] * 3


def test_mistakes_are_named() -> None:
    def body() -> None:
        mesh = hc.Mesh(stage=2)
        first, second = mesh["stage", 0], mesh["stage", 1]
        with pytest.raises(hc.MeshError, match="say which mesh it comes from"):
            hc.move(torch.ones(2), second, {})
        if mesh.rank == 0:
            with pytest.raises(hc.ShardingError, match="needs its tile there"):
                hc.move(None, second, {}, source=first)
        else:
            with pytest.raises(hc.ShardingError, match="has no tile there"):
                hc.move(torch.ones(2), second, {}, source=first)
            with pytest.raises(hc.MeshError, match="in neither mesh"):
                hc.move(None, first, {}, source=first)

    run_local(2, body)


# ---- order, and bytes ----


def in_order(elements: int, count: int) -> list[float]:
    """Several tensors under one key, none waited for by the receivers before all are sent: the means that came."""
    mesh = hc.Mesh(stage=2)
    old, new = make_sharding(mesh["stage", 0], (elements,), {}), make_sharding(mesh["stage", 1], (elements,), {})
    world, label = mesh.world, hc.world.Label("several", "test")
    values = [torch.full((elements,), float(number)) for number in range(count)]
    if mesh.rank == 0:
        sends = [world.begin_tagged([(1, value, 77)], [], label) for value in values]
        for value in values:
            move_across(value, old, new, torch.float32, key="one key")
        for send in sends:
            send.wait()
        return []
    receives = [world.begin_tagged([], [(0, torch.empty(elements), 77)], label) for _ in values]
    moved = [float(move_across(None, old, new, torch.float32, key="one key").mean()) for _ in values]
    return [float(receive.wait()[0].mean()) for receive in reversed(receives)][::-1] + moved


@pytest.mark.parametrize("elements", [10, 1 << 16, 1 << 20])  # own sockets; gloo from 128 KiB on
def test_messages_of_one_tag_arrive_in_order(elements: int) -> None:
    assert shared_pool(2).run(in_order, elements, 6, deadline=60)[1] == 2 * [float(n) for n in range(6)]


def traffic(seeds: range) -> list[tuple[Counter[tuple[int, int]], int, int]]:
    """By seed: what this rank sends to others, bytes that must cross to ranks outside, and bytes passed on inside."""
    found = []
    for seed in seeds:
        random = Random(seed)
        mesh = hc.Mesh(part=2, a=2, b=2)
        first, second = mesh["part", 0], mesh["part", 1]
        if random.random() < 0.5:
            second = second["a", random.randrange(2)]
        shape = tuple(random.randint(1, 9) for _ in range(3))
        names = random.sample(second.names, k=random.randint(0, len(second.names)))
        dims = dict(zip(random.sample(range(3), k=len(names)), names, strict=True))
        old = make_sharding(first, shape, random.choice([{}, {0: "a"}, {1: "b", 2: "a"}, {2: "b"}]))
        sent: Counter[tuple[int, int]] = Counter()

        def listen(event: object, sent: Counter[tuple[int, int]] = sent, mesh: hc.Mesh = mesh) -> None:
            if getattr(getattr(event, "label", None), "operation", "") == "moving to another mesh":
                for peer, size in getattr(event, "sends", ()):
                    sent[mesh.rank, peer] += size

        x = torch.ones(shape, dtype=torch.float64)
        tile = hc.shard(x, first, old.dims_by_axis()) if first.is_member and old.axes else x
        if mesh.rank in {*first.members, *second.members}:
            with mesh.world.events.listening(listen):
                hc.move(tile if first.is_member else None, second, dims, source=first)
        new = make_sharding(second, shape, dims)
        tiles = boxes_of(new).values()
        found.append((sent, 8 * volume(tuple(Interval(0, s) for s in shape)), 8 * sum(volume(box) for box in tiles)))
        assert 8 * crossing_between(old, new).crossed == found[-1][1]
    return found


def test_bytes_over_the_boundary_in_random_cases() -> None:
    for case in zip(*run_local(8, lambda: traffic(range(200))), strict=True):
        outside = sum(size for sent, _, _ in case for (a, b), size in sent.items() if a < 4 <= b)
        total = sum(size for sent, _, _ in case for size in sent.values())
        _, whole, needed = case[0]
        assert outside == whole  # the parts share no rank: each element crosses once, however many need it
        assert total == needed  # and each rank receives its tile once
        assert not any(b < 4 for sent, _, _ in case for _, b in sent)
    assert all(one[1:] == two[1:] for one, two in pairwise(case))
