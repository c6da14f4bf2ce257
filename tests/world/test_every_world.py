"""Every world keeps the same word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from pairings import mpi_pool

from halocline.testing import CudaWorldTests, RankPool, WorldTests, run_local, shared_pool
from halocline.testing import world_bodies as bodies
from halocline.world import DryWorld, SubWorld, World, joined, this_world

T = TypeVar("T")


def in_a_duplicate(body: Callable[..., T], deadline: float, *arguments: Any) -> T:
    """On a rank of a pool: the world that all tests share is left as it was."""
    world = this_world().duplicate()
    world.set_deadline(deadline)
    joined._GRACE = 0.2
    try:
        return body(world, *arguments)
    except BaseException:
        world.leave()
        raise
    finally:
        world.set_deadline(1.0)  # where other ranks have failed, this one need not wait for them
        world.close()


class ByProcesses(WorldTests):
    """Ranks are processes of a pool."""

    def pool(self) -> RankPool:
        return shared_pool(self.size)

    def run(self, body: Callable[..., T], *arguments: Any, deadline: float = 30.0) -> list[T]:
        return self.pool().run(in_a_duplicate, body, deadline, *arguments)

    def run_while_one_dies(self, body: Callable[..., T], *arguments: Any, deadline: float) -> list[T]:
        outcomes = self.pool().outcomes(in_a_duplicate, body, deadline, *arguments, deadline=30.0)
        return [outcome.value for outcome in outcomes if outcome.kind == "value"]


class TestProcessWorld(ByProcesses):
    pass


class TestProcessWorldWithoutSockets(ByProcesses):
    """Every message by gloo."""

    def run(self, body: Callable[..., T], *arguments: Any, deadline: float = 30.0) -> list[T]:
        return self.pool().run(without_sockets, body, deadline, *arguments)


def without_sockets(body: Callable[..., T], deadline: float, *arguments: Any) -> T:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALOCLINE_WIRE", "0")
        return in_a_duplicate(body, deadline, *arguments)


@pytest.mark.long
class TestMpiWorld(ByProcesses):
    size = 4
    sum_dtypes = (*WorldTests.sum_dtypes, torch.int16, torch.bool)

    def pool(self) -> RankPool:
        return mpi_pool()


class TestLocalWorld(WorldTests):
    sum_dtypes = (*WorldTests.sum_dtypes, torch.int16, torch.bool)

    def run(self, body: Callable[..., T], *arguments: Any, deadline: float = 30.0) -> list[T]:
        return run_local(self.size, lambda: body(this_world(), *arguments), deadline)


def in_some(world: World, body: Callable[..., T], *arguments: Any) -> list[T]:
    """On all ranks but the last but one: their sub-world."""
    part = SubWorld(world, (*range(world.size - 2), world.size - 1))
    return [body(part, *arguments)] if part.rank >= 0 else []


def names_of_events(world: World) -> list[str]:
    names: list[str] = []
    with world.events.listening(lambda event: names.append(type(event).__name__)):
        bodies.pass_on(world, torch.ones(10)).wait()
    return names


class InSomeRanks(WorldTests):
    """A world without one of the ranks. Its events are those of the world of all, by whose numbers they name ranks."""

    def test_events_tell_what_happened(self) -> None:
        assert self.run(names_of_events) == [["Begun", "Waited"]] * self.size


class TestSubWorldOfThreads(InSomeRanks):
    sum_dtypes = TestLocalWorld.sum_dtypes

    def run(self, body: Callable[..., T], *arguments: Any, deadline: float = 30.0) -> list[T]:
        found = run_local(self.size + 1, lambda: in_some(this_world(), body, *arguments), deadline)
        return [result for results in found for result in results]


class TestSubWorldOfProcesses(InSomeRanks):
    def run(self, body: Callable[..., T], *arguments: Any, deadline: float = 30.0) -> list[T]:
        found = shared_pool(self.size + 1).run(in_a_duplicate, in_some, deadline, body, *arguments)
        return [result for results in found for result in results]


class TestDuplicateOfASubWorld(TestSubWorldOfProcesses):
    """Made by its ranks alone, on connections of its own."""

    def run(self, body: Callable[..., T], *arguments: Any, deadline: float = 30.0) -> list[T]:
        return super().run(in_its_duplicate, body, *arguments, deadline=deadline)


def in_its_duplicate(world: World, body: Callable[..., T], *arguments: Any) -> T:
    twin = world.duplicate()
    try:
        return body(twin, *arguments)
    finally:
        twin.close()


class TestDryWorld(WorldTests):
    device = "meta"

    def run(self, body: Callable[..., T], *arguments: Any, deadline: float = 30.0) -> list[T]:
        ranks: list[World] = [DryWorld(rank, self.size) for rank in range(self.size)]
        return [body(world, *arguments) for world in ranks]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestProcessWorldOnOneGpu(ByProcesses, CudaWorldTests):
    """The ranks share the GPU, so that tensors go through host memory."""
