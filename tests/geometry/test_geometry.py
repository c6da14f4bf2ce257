"""Properties of the integers everything stands on, against brute force. No torch."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from halocline.geometry import (
    Adaptive,
    DimMove,
    Interval,
    Mirror,
    Partition,
    Same,
    Transposed,
    Window,
    plan_transfer,
    whole,
)

sizes = st.integers(1, 40)
parts = st.integers(1, 5)
exhaustive = settings(max_examples=300, deadline=None, derandomize=True)


@st.composite
def cut_points(draw: st.DrawFn, size: int, count: int) -> tuple[int, ...]:
    inner = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
    return (0, *inner, size)


def windows(draw: st.DrawFn) -> Window:
    return Window(draw(st.integers(1, 7)), draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(0, 6)))


def hull(indices: list[int]) -> tuple[Interval, ...]:
    return (Interval(min(indices), max(indices) + 1),)


@given(st.data())
@exhaustive
def test_window_needs_the_hull_of_its_taps(data: st.DataObject) -> None:
    window = windows(data.draw)
    lo = data.draw(st.integers(0, 20))
    out = Interval(lo, lo + data.draw(st.integers(1, 20)))
    taps = [window.stride * i - window.padding + window.dilation * t for i in range(*out) for t in range(window.kernel)]
    assert window.need(out) == hull(taps)


@given(st.data())
@exhaustive
def test_transposed_needs_every_input_that_reaches_it(data: st.DataObject) -> None:
    access = Transposed(*(data.draw(st.integers(1, top)) for top in (7, 4, 3)), data.draw(st.integers(0, 6)))
    lo = data.draw(st.integers(0, 20))
    out = Interval(lo, lo + data.draw(st.integers(1, 20)))
    reach = {
        j
        for j in range(-60, 60)
        for t in range(access.kernel)
        if access.stride * j - access.padding + access.dilation * t in range(*out)
    }
    (need,) = access.need(out)
    assert all(need.lo <= j < need.hi for j in reach)
    # Between taps a stride may skip inputs, but the ends are tight or the need is empty.
    assert not reach or (need.lo <= min(reach) and need.hi > max(reach))


@given(sizes, sizes, st.data())
@exhaustive
def test_adaptive_and_mirror_follow_torch(n: int, m: int, data: st.DataObject) -> None:
    adaptive = Adaptive(n, m)
    lo = data.draw(st.integers(0, m - 1))
    out = Interval(lo, data.draw(st.integers(lo + 1, m)))
    covered = [i for j in range(*out) for i in range(j * n // m, -(-(j + 1) * n // m))]
    assert adaptive.need(out) == hull(covered)
    for mode, most in (("reflect", n - 1), ("replicate", 9), ("circular", n)):
        before, after = data.draw(st.integers(0, most)), data.draw(st.integers(0, most))
        mirror = Mirror(n, before, mode)
        total = n + before + after
        runs = mirror.need(Interval(0, total))
        needed = {mirror.source(i) for i in range(total)}
        assert needed == {i for run in runs for i in range(*run)}
        if mode == "circular":
            assert [mirror.source(i) for i in range(total)] == [i for run in runs for i in range(*run)]


@given(st.data())
@exhaustive
def test_carried_cuts_are_cuts_of_the_output(data: st.DataObject) -> None:
    size, count, out = data.draw(sizes), data.draw(parts), data.draw(st.integers(0, 50))
    points = data.draw(cut_points(size, count))
    accesses = [windows(data.draw), Transposed(3, 2, 1, 1), Adaptive(size, max(1, out)), Mirror(size, 1, "reflect")]
    for access in accesses:
        carried = Partition(access.propagate_cut(points, out))
        assert carried.parts == count and carried.size == out
    assert Same().propagate_cut(points, size) == points


@st.composite
def dim_moves(draw: st.DrawFn) -> tuple[tuple[DimMove, ...], dict[str, int]]:
    """Two or three dims, each owned and needed along axes of a mesh or whole; each axis used once on each side."""
    mesh = {axis: draw(st.integers(1, 3)) for axis in "abc"}
    owners = draw(st.permutations(["a", "b", "c", None, None]))
    needers = draw(st.permutations(["a", "b", "c", None, None]))
    dims = []
    for owner, needer in list(zip(owners, needers, strict=True))[: draw(st.integers(1, 3))]:
        size = draw(st.integers(1, 7))
        owned = Partition(draw(cut_points(size, mesh[owner]))).pieces() if owner else (whole(size),)
        filled = draw(st.booleans())
        needs = []
        for _ in range(mesh[needer] if needer else 1):
            runs = draw(st.lists(st.tuples(st.integers(-3, 9), st.integers(0, 9)), min_size=1, max_size=2))
            needs.append(tuple(Interval(lo, lo + length) for lo, length in runs))
        dims.append(DimMove(size, owner, owned, needer, tuple(needs), filled))
    return tuple(dims), mesh


@given(dim_moves())
@exhaustive
def test_transfers_bring_each_needed_element_once(case: tuple[tuple[DimMove, ...], dict[str, int]]) -> None:
    """Play all ranks: what is sent is what is expected, and the target holds just what was asked for."""
    dims, mesh = case
    ranks = [dict(zip(mesh, where, strict=True)) for where in product(*(range(n) for n in mesh.values()))]

    def rank_at(where: dict[str, int]) -> int:
        return ranks.index({axis: where[axis] for axis in mesh})

    transfers = [plan_transfer(dims, where, rank_at) for where in ranks]
    for rank, (where, transfer) in enumerate(zip(ranks, transfers, strict=True)):
        expected = expected_target(dims, where)
        found = {target: index for source, target in pairs(transfer.own) for index in [globally(dims, where, source)]}
        for peer, targets in transfer.receives:
            sources = dict(transfers[peer].sends)[rank]
            for source, target in pairs(tuple(zip(sources, targets, strict=True))):
                assert target not in found  # once only
                found[target] = globally(dims, ranks[peer], source)
        assert found == expected
        for peer, _ in transfer.sends:
            assert rank in dict(transfers[peer].receives)


def pairs(boxes):
    for source, target in boxes:
        yield from zip(
            product(*(range(i.lo, i.hi) for i in source)), product(*(range(i.lo, i.hi) for i in target)), strict=True
        )


def globally(dims, where, local):
    return tuple(
        dim.holds(where[dim.owner_axis] if dim.owner_axis else 0).lo + i for dim, i in zip(dims, local, strict=True)
    )


def expected_target(dims, where):
    """By hand: lay the runs side by side, and keep what lies inside the operand."""
    lines = []
    for dim in dims:
        line, offset = {}, 0
        for run in dim.needs[where[dim.need_axis] if dim.need_axis else 0]:
            run = run if dim.filled else run.intersect(whole(dim.size))
            line.update({offset + k: i for k, i in enumerate(range(run.lo, run.hi)) if 0 <= i < dim.size})
            offset += run.size
        lines.append(line)
    return {
        tuple(t for t, _ in choice): tuple(i for _, i in choice)
        for choice in product(*(line.items() for line in lines))
    }
