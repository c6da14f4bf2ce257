"""Ranks that agree: numbers compared, rows gathered, errors of one rank raised on all."""

from __future__ import annotations

import pytest
import torch

from halocline.errors import DataError, RankFailure
from halocline.testing import run_local
from halocline.world import Label, World, this_world
from halocline.world.agreement import agree, errors_on_any_rank, extremes, gather_rows

LABEL = Label("agreement", "a test")


def test_extremes_of_whole_numbers() -> None:
    def ranks(world: World) -> list[list[int]]:
        numbers = torch.tensor([world.rank, -5, -(2**63) if world.rank else 2**63 - 1])
        return [each.tolist() for each in extremes(world, numbers, LABEL)]

    for least, most in run_local(3, lambda: ranks(this_world())):
        assert least == [0, -5, -(2**63)] and most == [2, -5, 2**63 - 1]


def test_rows_of_some_ranks_reach_all() -> None:
    def ranks(world: World) -> list[list[int]]:
        return gather_rows(world, torch.tensor([world.rank, 7]), LABEL, (0, 2)).tolist()

    assert run_local(3, lambda: ranks(this_world())) == [[[0, 7], [2, 7]]] * 3


def test_the_highest_rank_speaks_for_each_place() -> None:
    def ranks(world: World) -> object:
        errors = {} if world.rank == 0 else {1: f"of rank {world.rank}"}
        return errors_on_any_rank(world, errors, 3, LABEL, alike=world.rank)

    assert run_local(3, lambda: ranks(this_world())) == [({1: (2, "of rank 2")}, range(3))] * 3


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    def ranks(world: World) -> str:
        def work() -> int:
            if world.rank == 1:
                raise DataError("no such file")
            return world.rank

        with pytest.raises(DataError if world.rank == 1 else RankFailure) as told:
            agree(world, work, LABEL)
        assert agree(world, lambda: world.rank, LABEL) == world.rank  # and the ranks are still in step
        return str(told.value)

    own = "rank {}, agreement in a test: rank 1 failed: no such file"
    assert run_local(3, lambda: ranks(this_world())) == [own.format(0), "no such file", own.format(2)]


def test_a_lone_rank_raises_its_own_error() -> None:
    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        run_local(1, lambda: agree(this_world(), work, LABEL))
