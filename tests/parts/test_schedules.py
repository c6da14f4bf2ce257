"""Schedules as data: what they promise, without ranks."""

import pytest

from halocline.errors import MeshError
from halocline.parts import Action, PipelineSchedule, make_schedule

SIZES = [(lanes, count) for lanes in (1, 2, 3, 4, 6) for count in (1, 2, 3, 4, 8, 12)]


@pytest.mark.parametrize(("lanes", "count"), SIZES)
def test_bubbles_are_those_of_theory(lanes: int, count: int) -> None:
    theory = (lanes - 1) / (count + lanes - 1)
    plain = make_schedule("1f1b", lanes, count)
    assert make_schedule("gpipe", lanes, count).bubble() == pytest.approx(theory)
    assert plain.bubble() == pytest.approx(theory)
    assert plain.held == tuple(min(count, lanes - lane) for lane in range(lanes))
    halves = make_schedule("zero-bubble", lanes, count)
    assert halves.bubble() < plain.bubble() or lanes == 1
    assert max(halves.held) <= lanes
    if count % lanes == 0:
        for rounds in (2, 3):
            share = make_schedule("interleaved", lanes, count, rounds).bubble()
            assert share / (1 - share) == pytest.approx((lanes - 1) / (rounds * count))


def test_a_schedule_prints_reads_back_and_is_drawn() -> None:
    schedule = make_schedule("1f1b", 2, 3)
    assert str(schedule) == "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"
    read = PipelineSchedule.parse(str(schedule))
    assert read.lanes == schedule.lanes
    assert read.in_flight == (2, 1)
    read.check()
    assert Action.parse("12W3") == Action(12, "W", 3)
    assert schedule.chart().splitlines()[1].startswith("lane 1  ... 1F0 1B0 1B0")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0F0 0B0\n1B0 1F0", "wait for each other for ever: 0B0 for 1B0, 1B0 for 1F0"),
        ("0F0 0F1 0B0 0B1\n1F1 1B1 1F0 1B0", None),
        ("0B0 0F0", "0B0 for 0F0"),
        ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1", "0B1 is missing"),
        ("0F0 0I0", "missing"),
        ("0X0", "such as 1F0"),
        ("1F0 1B0", "count from 0"),
    ],
)
def test_own_schedules_are_checked(text: str, said: str | None) -> None:
    def check() -> None:
        PipelineSchedule.parse(text).check()

    if said is None:
        check()
    else:
        with pytest.raises(MeshError, match=said):
            check()


def test_a_promise_of_memory_is_held_to() -> None:
    made = make_schedule("gpipe", 2, 4)
    with pytest.raises(MeshError, match="lane 0 holds 4 micro-batches at once, and 2 are promised"):
        PipelineSchedule("small", made.lanes, made.lane_of, 4, (2, 4)).check()


def test_unknown_schedules_and_counts_are_refused() -> None:
    with pytest.raises(MeshError, match="did you mean gpipe"):
        make_schedule("gpip", 2, 2)
    with pytest.raises(MeshError, match="groups of 3"):
        make_schedule("interleaved", 3, 4)
    with pytest.raises(MeshError, match="one stage for each lane"):
        make_schedule("1f1b", 3, 4, rounds=2)
    with pytest.raises(MeshError, match="at least one micro-batch"):
        make_schedule("1f1b", 3, 0)
