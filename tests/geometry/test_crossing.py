"""Crossings between two sets of tiles, as integers: thousands of random pairs."""

from itertools import product
from random import Random

import pytest

from halocline.geometry import Interval, Partition, plan_crossing, volume


def tiles(random: Random, ranks: list[int], shape: tuple[int, ...]) -> dict[int, tuple[Interval, ...]]:
    """Random cuts of a tensor over a random mesh of these ranks: dims cut unevenly, axes left unused."""
    sizes, rest = [], len(ranks)
    while rest > 1:
        factor = random.choice([f for f in range(2, rest + 1) if rest % f == 0])
        sizes.append(factor)
        rest //= factor
    dims = random.sample(range(len(shape)), k=min(len(shape), len(sizes)))
    used = {dim: axis for axis, dim in enumerate(dims) if random.random() < 0.7}
    points = {
        dim: Partition((0, *sorted(random.randint(0, shape[dim]) for _ in range(sizes[axis] - 1)), shape[dim]))
        for dim, axis in used.items()
    }
    found = {}
    for rank, place in zip(ranks, product(*(range(size) for size in sizes)), strict=True):
        found[rank] = tuple(
            points[dim].piece(place[used[dim]]) if dim in used else Interval(0, size) for dim, size in enumerate(shape)
        )
    return found


def cells(box: tuple[Interval, ...]) -> set[tuple[int, ...]]:
    return set(product(*(range(i.lo, i.hi) for i in box)))


@pytest.mark.parametrize("block", range(10))
def test_every_element_crosses_once_and_arrives_everywhere(block: int) -> None:
    for case in range(300):
        random = Random(1000 * block + case)
        shape = tuple(random.randint(1, 6) for _ in range(random.randint(0, 3)))
        before = random.sample(range(12), k=random.randint(1, 6))
        after = random.sample(range(12), k=random.randint(1, 6))
        sources, targets = tiles(random, before, shape), tiles(random, after, shape)
        plan = plan_crossing(sources, targets, largest=random.choice([1, 3, 1 << 18]))
        held = {rank: cells(box) for rank, box in sources.items()}
        got: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in targets}
        crossed: list[tuple[int, ...]] = []
        for rank, box in plan.kept:
            assert cells(box) <= held[rank]
            got[rank] += cells(box)
        for hop in plan.hops:  # in order: a box is there before it is passed on
            assert hop.sender != hop.receiver
            assert cells(hop.box) <= (held[hop.sender] if hop.first else set(got[hop.sender]))
            got[hop.receiver] += cells(hop.box)
            crossed += cells(hop.box) if hop.first else []
        for rank, box in targets.items():
            assert sorted(got[rank]) == sorted(cells(box))  # each element of a target is written just once
        assert len(crossed) == len(set(crossed)) == plan.crossed  # and leaves the sources just once
        if not set(before) & set(after):
            needed = set().union(*(cells(box) for box in targets.values()))
            assert set(crossed) == needed


@pytest.mark.parametrize(("holders", "needers"), [(4, 4), (4, 2), (2, 4), (3, 5)])
def test_replicas_share_the_work(holders: int, needers: int) -> None:
    box = (Interval(0, 120), Interval(0, 7))
    plan = plan_crossing(dict.fromkeys(range(holders), box), dict.fromkeys(range(10, 10 + needers), box))
    sent = [sum(volume(h.box) for h in plan.hops if h.sender == rank) for rank in range(holders)]
    entered = [
        sum(volume(h.box) for h in plan.hops if h.receiver == rank and h.first) for rank in range(10, 10 + needers)
    ]
    unit = 7 * -(-120 // max(holders, needers))  # the largest part of the region
    assert max(sent) - min(sent) <= unit
    assert max(entered) - min(entered) <= unit
    assert sum(sent) == sum(entered) == volume(box)


@pytest.mark.parametrize("holders", ["rows", "whole"])
def test_ranks_pass_on_before_all_has_come(holders: str) -> None:
    """A rank that waited for all parts from outside first would let the links behind it run dry."""
    shape, ranks = (Interval(0, 256), Interval(0, 4)), range(10, 14)
    rows = Partition.even(256, 4).pieces()
    sources = {rank: (rows[rank], shape[1]) if holders == "rows" else shape for rank in range(4)}
    plan = plan_crossing(sources, dict.fromkeys(ranks, shape), largest=16)
    for rank in ranks:
        hops = plan.hops_of(rank)
        firsts = [hop.first for _, hop in hops.arrives]
        assert firsts.count(True) == 16 and firsts.count(False) == 48
        for waited in range(4, 60):  # one from outside for every three that have gone round
            assert abs(firsts[:waited].count(True) - waited / 4) <= 3
        assert len({hop.sender for _, hop in hops.arrives if hop.first}) == 1  # no link is flooded by many senders
        assert len(hops.passes_on) == 48
