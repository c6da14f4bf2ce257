"""What goes together, and how ranks agree: plans and small agreements, without a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, log2
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.reduction import Coordinator, Doubling, Tree
from halocline.reduction.buckets.bucket import Bucket
from halocline.reduction.buckets.cutting import LinkCost, best_cut, finish_time, robust_cut
from halocline.reduction.schedule.control import packed, unpacked
from halocline.world import run_local, this_world


def every_cut(count: int) -> list[list[int]]:
    cuts = [[0]]
    for place in range(1, count):
        cuts += [[*cut, place] for cut in cuts]
    return cuts


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 1000)), min_size=1, max_size=8),
    st.floats(1e-4, 0.5),
    st.floats(1e-5, 1e-2),
)
def test_no_cut_is_better_than_the_planned_one(gradients: list[tuple[float, int]], latency: float, rate: float) -> None:
    gradients.sort()
    ready, sizes = [r for r, _ in gradients], [s for _, s in gradients]
    link = LinkCost(latency, rate)
    best = min(finish_time(cut, ready, sizes, link) for cut in every_cut(len(sizes)))
    assert finish_time(best_cut(ready, sizes, link), ready, sizes, link) == pytest.approx(best, rel=1e-9)


def test_moderate_messages_are_preferred_where_they_cost_little() -> None:
    """A wire that is busy all the time: fewer, larger messages would gain nothing."""
    ready, sizes = [0.01 * i for i in range(60)], [1 << 20] * 60
    link = LinkCost(1e-5, 1e-7)
    robust, best = robust_cut(ready, sizes, link), best_cut(ready, sizes, link)
    assert len(best) < 16 <= len(robust) <= 21
    assert finish_time(robust, ready, sizes, link) <= 1.05 * finish_time(best, ready, sizes, link)
    dear = LinkCost(1.0, 1e-7)
    assert robust_cut(ready, sizes, dear) == best_cut(ready, sizes, dear)  # where a message costs much, the fewest


def test_many_small_ones_that_come_together_go_together() -> None:
    assert best_cut([1.0] * 50, [10] * 50, LinkCost(0.1, 0.001)) == [0]
    assert len(best_cut([float(i) for i in range(50)], [10] * 50, LinkCost(1e-3, 1e-3))) == 50


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", [Doubling, Tree, partial(Tree, radix=2), Coordinator])
def test_agreement_is_right_and_costs_what_it_may(kind: Callable[..., Any], ranks: int) -> None:
    def run() -> tuple[list[bool], list[bool], int]:
        world = this_world()
        control = kind(world, "test")
        mine = [(place * 7 + world.rank) % 3 != 0 for place in range(100)]
        world.traffic.clear()
        both = unpacked(control.agree(packed(mine), torch.bitwise_and), 100)
        sent = world.traffic.messages
        either = unpacked(control.agree(packed(mine), torch.bitwise_or), 100)
        return both, either, sent

    found = run_local(ranks, run)
    every = [[(place * 7 + rank) % 3 != 0 for place in range(100)] for rank in range(ranks)]
    for both, either, sent in found:
        assert both == [all(column) for column in zip(*every, strict=True)]
        assert either == [any(column) for column in zip(*every, strict=True)]
        if kind is Doubling:
            assert sent <= ceil(log2(ranks)) + (0 if log2(ranks).is_integer() else 1)
        elif kind is not Coordinator:
            assert sent <= kind(this_world_of(ranks), "x").radix + 1
    if kind is Coordinator:
        assert found[0][2] == ranks - 1 and all(sent == 1 for *_, sent in found[1:])


def this_world_of(ranks: int) -> Any:
    return run_local(ranks, this_world)[0]


@given(st.lists(st.booleans(), max_size=200))
def test_bits_are_packed_and_unpacked(flags: list[bool]) -> None:
    assert unpacked(packed(flags), len(flags)) == flags


def test_a_group_knows_its_gradients_when_their_memory_has_moved() -> None:
    """Within a pass: ``share_memory_`` (and with it ``Module.share_memory``) moves a storage and all that lie in it."""
    leaf = torch.zeros(4, requires_grad=True)
    bucket = Bucket([0], [leaf])
    bucket.begin([leaf])
    leaf.grad = bucket.gradient(0)
    leaf.grad.fill_(8.0)
    leaf.grad.share_memory_()
    assert bucket.put(0, leaf.grad)
    bucket.take_back(0.5, [leaf])
    assert leaf.grad.tolist() == [8.0] * 4
