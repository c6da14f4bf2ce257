"""Sums by every way equal the plain sum, with the same bits on every rank, whatever the count, size and dtype."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import pytest
import ring_counts
import torch
from ring_counts import best_factors, factorizations
from torch import Tensor

import halocline as hc
from halocline.errors import MeshError, Refused
from halocline.reduction.buckets.cutting import LinkCost
from halocline.reduction.transport import algorithms
from halocline.reduction.transport.algorithms import Algorithm, Round, Span, gather_rounds, scatter_rounds
from halocline.reduction.transport.costs import (
    Costs,
    best_chunk,
    level_seconds,
    measured_links,
    piped_seconds,
    tried,
)
from halocline.reduction.transport.levels import grouped
from halocline.reduction.transport.rings import Rings
from halocline.testing import shared_pool
from halocline.world import Begun, DryWorld, Event, Label, World, run_local
from halocline.world.local import current_local_world

LABEL = Label("sum", "a test", "gradients 7")  # as the seventh engine of a world has it
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64)
HOWS: tuple[str | tuple[int, ...], ...] = ("flat", "levels", "doubling", "leaders:1", "auto")


# ---- schedules, all ranks simulated in one place ----


def simulate(rounds: Sequence[Sequence[Round]], held: Sequence[Tensor]) -> None:
    """Round by round: everybody sends what it had before the round. Both ends must mean the same span."""
    assert len({len(each) for each in rounds}) == 1  # all count alike
    for turn in zip(*rounds, strict=True):
        on_the_way = {}
        for rank, each in enumerate(turn):
            if each.to is not None:
                on_the_way[rank, each.to] = each.sent, held[rank][each.sent.start : each.sent.stop].clone()
        for rank, each in enumerate(turn):
            if each.source is None:
                continue
            span, message = on_the_way.pop((each.source, rank))
            assert span.size == each.received.size > 0
            own = held[rank][each.received.start : each.received.stop]
            own.copy_(message if each.taking == "copy" else own + message)
        assert not on_the_way


def ways(count: int) -> list[Callable[[int], Algorithm]]:
    """Of every kind, as functions of the place; ranks are numbered against their places."""
    ranks = tuple(reversed(range(count)))
    found = [lambda place: Algorithm("doubling", ranks, place)]
    for factors in factorizations(count):
        found.append(lambda place, factors=factors: Algorithm("levels", ranks, place, factors))
        if len(factors) == 2:
            for leaders in {1, factors[0] - 1, factors[0]}:
                found.append(lambda place, f=factors, k=leaders: Algorithm("leaders", ranks, place, f, k))
    return found


@pytest.mark.parametrize("count", [*range(1, 9), 12, 16])
def test_every_schedule_sums(count: int) -> None:
    for make in ways(count):
        by_rank = [make(count - 1 - rank) for rank in range(count)]
        for size in {0, 1, count - 1, count, 31, 64}:
            mine = [torch.arange(size) * 10 + rank for rank in range(count)]
            true = sum(mine, torch.zeros(size, dtype=torch.int64))
            simulate([way.rounds(size) for way in by_rank], mine)
            assert all(torch.equal(each, true) for each in mine), (by_rank[0].name, size)


@pytest.mark.parametrize("count", [1, 3, 4, 7])
def test_scatter_and_gather_alone(count: int) -> None:
    ranks = tuple(sorted(range(count), key=lambda rank: (rank % 2, rank)))
    for size, pieces in ((0, 1), (2, 2), (23, 3), (64, 2)):
        mine = [torch.arange(size) + 100 * rank for rank in range(count)]
        true = sum(mine, torch.zeros(size, dtype=torch.int64))
        shares = algorithms.split(Span(0, size), count)
        for piece in range(pieces):
            simulate([scatter_rounds(size, ranks, ranks.index(rank), piece, pieces) for rank in range(count)], mine)
        for rank, share in enumerate(shares):
            assert torch.equal(mine[rank][share.start : share.stop], true[share.start : share.stop])
        for piece in range(pieces):
            simulate([gather_rounds(size, ranks, ranks.index(rank), piece, pieces) for rank in range(count)], mine)
        assert all(torch.equal(each, true) for each in mine)


def test_messages_and_bytes_are_those_of_the_formulas() -> None:
    for count in (8, 12):
        for factors in factorizations(count):
            size = 4 * count  # divides by all
            rounds = Algorithm("levels", tuple(range(count)), 3, factors).rounds(size)
            assert ring_counts.messages(rounds) == ring_counts.level_messages(factors)
            assert ring_counts.elements_sent(rounds) == sum(ring_counts.level_bytes(factors, size))


def test_leaders_send_their_share_to_other_nodes() -> None:
    on_node, nodes, size = 4, 3, 480
    for leaders in (1, 2, 4):
        for place in range(on_node * nodes):
            rounds = Algorithm("leaders", tuple(range(12)), place, (on_node, nodes), leaders).rounds(size)
            away = sum(each.sent.size for each in rounds if each.to is not None and each.to // 4 != place // 4)
            assert away == (ring_counts.leader_bytes(nodes, leaders, size) if place % 4 < leaders else 0)


def test_factors_that_do_not_multiply_to_the_ranks_are_refused() -> None:
    with pytest.raises(MeshError, match="2 x 3 are 6 ranks, and there are 8"):
        Algorithm("levels", tuple(range(8)), 0, (2, 3))
    with pytest.raises(MeshError, match="3 leaders on nodes of 2"):
        Algorithm("leaders", tuple(range(8)), 0, (2, 4), 3)


@pytest.mark.parametrize(("factors", "steps"), [((256,), 510), ((4, 64), 132), ((4, 8, 8), 34)])
def test_steps_of_256_ranks_in_the_dry_world(factors: tuple[int, ...], steps: int) -> None:
    world = DryWorld(77, 256)
    events: list[Event] = []
    world.events.add(events.append)
    size = 1024
    Rings(world, factors).begin(torch.empty(size, device="meta"), LABEL).wait()
    assert world.traffic.messages == steps
    assert sum(isinstance(event, Begun) for event in events) == steps
    assert world.traffic.transport_bytes == sum(ring_counts.level_bytes(factors, 4 * size))


# ---- ranks as threads ----


def own_world() -> World:
    world = current_local_world()
    assert world is not None
    return world


def values(size: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype."""
    return ((torch.arange(size) + rank) % 5 - 2).to(dtype)


def sums(how: str | tuple[int, ...], sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Several under way at once, begun in one order."""
    world = own_world()
    rings = Rings(world, how)
    mine = [values(size, world.rank, dtype) for size in sizes]
    for pending in [rings.begin(each, LABEL) for each in mine]:
        pending.wait()
    rings.close()
    return mine


@pytest.mark.parametrize("count", range(1, 9))
def test_every_way_is_the_sum(count: int) -> None:
    sizes = (0, 1, count - 1, 101)
    for how in HOWS:
        for dtype in DTYPES if count in (3, 4) else (torch.float64, torch.int64):
            found = run_local(count, lambda how=how, dtype=dtype: sums(how, sizes, dtype))
            for number, size in enumerate(sizes):
                true = sum((values(size, rank, dtype) for rank in range(count)), torch.zeros(size, dtype=dtype))
                assert all(torch.equal(each[number], true) for each in found), (how, dtype, size)


@pytest.mark.parametrize("factors", factorizations(8) + factorizations(12)[1:4])
def test_every_factorization_has_one_result(factors: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halocline.reduction.transport.rings.CHUNK", 256)  # many chunks
    torch.manual_seed(1)
    count = math.prod(factors)
    given = torch.randn(count, 211, dtype=torch.float64)

    def add_up() -> Tensor:
        world = own_world()
        rings = Rings(world, factors)
        mine = given[world.rank].clone()
        rings.begin(mine, LABEL).wait()
        rings.close()
        return mine

    found = run_local(count, add_up)
    assert all(torch.equal(found[0], each) for each in found)
    torch.testing.assert_close(found[0], given.sum(0), rtol=1e-12, atol=1e-12)


def test_memory_that_does_not_lie_in_a_row() -> None:
    def add_up() -> tuple[Tensor, Tensor]:
        rings = Rings(own_world(), "levels")
        wide = torch.ones(4, 6, dtype=torch.complex64)
        rings.begin(wide[:, ::2], LABEL).wait()
        share = rings.reduce_scatter(torch.arange(7).to(torch.complex64))
        gathered = rings.all_gather(share, 7)
        rings.close()
        return wide, gathered

    for wide, gathered in run_local(3, add_up):
        assert torch.equal(wide, torch.tensor([3.0, 1.0] * 3).expand(4, 6).to(torch.complex64))
        assert torch.equal(gathered, 3 * torch.arange(7).to(torch.complex64))


def test_what_cannot_be_summed_is_refused() -> None:
    rings = Rings(DryWorld(0, 2), "levels")
    with pytest.raises(Refused, match="truth values"):
        rings.begin(torch.ones(2, dtype=torch.bool), LABEL)
    with pytest.raises(MeshError, match="a share of 3 elements"):
        rings.all_gather(torch.ones(3), 4)
    for wrong in ("fastest", "leaders:x", "leaders:"):
        with pytest.raises(MeshError, match="give auto, flat"):
            Rings(DryWorld(0, 2), wrong)
    with pytest.raises(MeshError, match="2 x 3 are 6 ranks"):
        Rings(DryWorld(0, 2), (2, 3))


def test_rings_that_are_dropped_end_their_thread() -> None:
    def dropped() -> object:
        rings = Rings(own_world(), "levels")
        rings.begin(torch.ones(4), LABEL).wait()
        return rings.thread

    for thread in run_local(2, dropped):
        end = time.monotonic() + 5
        while thread.alive and time.monotonic() < end:  # type: ignore[attr-defined]
            time.sleep(0.05)
        assert not thread.alive  # type: ignore[attr-defined]


# ---- levels of the machine ----


def test_ranks_are_grouped_by_node_however_they_are_placed() -> None:
    block, cyclic = grouped([7, 7, 3, 3, 9, 9]), grouped([7, 3, 9, 7, 3, 9])
    assert (block.ranks, block.factors) == ((0, 1, 2, 3, 4, 5), (2, 3))
    assert (cyclic.ranks, cyclic.factors) == ((0, 3, 1, 4, 2, 5), (2, 3))
    assert grouped([5, 5, 5]).factors == grouped([1, 2, 3]).factors == (3,)
    assert grouped([1]).factors == (1,)


def test_nodes_of_different_sizes_are_one_ring(caplog: pytest.LogCaptureFixture) -> None:
    found = grouped([1, 1, 2, 1])
    assert (found.ranks, found.factors) == ((0, 1, 3, 2), (4,))
    assert "(1 and 3)" in caplog.text


def test_levels_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOCLINE_LEVELS", "2,2")
    assert Rings(DryWorld(0, 8), "levels").levels.factors == (2, 2, 2)
    for wrong, words in (("3", "do not divide by 3"), ("a", "give numbers")):
        with pytest.raises(MeshError, match=words):
            grouped([0] * 8, wrong)


# ---- what is chosen ----


def test_the_slowest_level_and_the_chunks_say_what_a_sum_takes() -> None:
    links = (LinkCost(1e-5, 1e-10), LinkCost(1e-4, 1e-8))
    inside, between = level_seconds((2, 4), links, 1 << 26)
    assert between == pytest.approx(6 * (1e-4 + (1 << 26) * 1e-8 / 8))
    piped = piped_seconds((2, 4), links, 1 << 26, 1 << 20)
    assert max(inside, between) < piped < inside + between + 64 * 6e-4
    assert best_chunk((2, 4), links, 1 << 26) > best_chunk((2, 4), (LinkCost(0, 1e-9), LinkCost(0, 1e-8)), 1 << 26)


def test_the_factorization_follows_the_links() -> None:
    def uneven(factors: tuple[int, ...]) -> list[LinkCost]:
        """Two ranks on a node, and slow links beyond."""
        return [LinkCost(0, 1e-10 if factor == 2 and level == 0 else 1e-8) for level, factor in enumerate(factors)]

    assert best_factors(8, uneven, 1 << 20)[0] == 2
    assert best_factors(8, lambda factors: [LinkCost(1e-3, 0)] * len(factors), 8) == (2, 2, 2)


def test_costs_are_lines_between_what_was_tried() -> None:
    costs = Costs({"flat": (1.0, 2.0, 4.0, 16.0), "levels": (1.5, 1.97, 3.97, 15.0), "doubling": (0.1, 3.0)})
    assert costs.seconds("flat", 1 << 10) == 1.0 and costs.seconds("flat", 1 << 17) == pytest.approx(2.0)
    assert costs.seconds("flat", 7 << 20) == pytest.approx(14.0)
    assert costs.seconds("flat", 9 << 20) == pytest.approx(18.0)
    assert [costs.best(size) for size in (1, 1 << 17, 1 << 26)] == ["doubling", "flat", "levels"]


def test_all_ranks_learn_the_same_costs() -> None:
    def measure() -> tuple[object, object]:
        world = own_world()
        rings = Rings(world, (2, 2))
        links = measured_links(rings._scheduler, world, grouped([0, 0, 1, 1]))
        found = tried(["flat", "doubling"], lambda name, size: world.rank + size, world)
        rings.close()
        return links, found

    found = run_local(4, measure)
    assert all(each == found[0] for each in found)
    assert found[0][1] == {"flat": (1027.0, 131075.0, 2097155.0, 8388611.0), "doubling": (1027.0, 131075.0)}


# ---- ranks as processes ----


def sums_of_processes(how: str | tuple[int, ...], sizes: Sequence[int]) -> list[bool]:
    world = hc.Mesh(data=-1).world
    rings = Rings(world, how)
    good = []
    for dtype in (torch.float32, torch.bfloat16):
        mine = [values(size, world.rank, dtype) for size in sizes]
        for pending in [rings.begin(each, LABEL) for each in mine]:
            pending.wait()
        for each, size in zip(mine, sizes, strict=True):
            good.append(torch.equal(each, sum(values(size, rank, dtype) for rank in range(world.size))))
    share = rings.reduce_scatter(values(1_000_003, world.rank, torch.float32))
    whole = rings.all_gather(share, 1_000_003)
    good.append(torch.equal(whole, sum(values(1_000_003, rank, torch.float32) for rank in range(world.size))))
    rings.close()
    return good


@pytest.mark.parametrize(
    "how",
    [
        "levels",
        "doubling",
        *(pytest.param(how, marks=pytest.mark.long) for how in ("leaders:2", "flat", (2, 2), "auto")),
    ],
)
def test_processes_sum_messages_of_all_sizes(how: str | tuple[int, ...]) -> None:
    """Words, what fits into the kernel's buffers, and what lies in shared memory; more chunks than are under way."""
    found = shared_pool(4).run(sums_of_processes, how, (0, 1, 3, 5_000, 300_001, 2_500_000))
    assert all(all(each) for each in found), found


def same_choice() -> list[str]:
    rings = Rings(hc.Mesh(data=-1).world)
    found = [rings.way(size) for size in (1, 1 << 16, 1 << 20, 1 << 26)]
    assert rings.seconds(1 << 26) > 0
    rings.close()
    return found


def test_all_ranks_choose_alike() -> None:
    found = shared_pool(4).run(same_choice)
    assert all(each == found[0] for each in found)
