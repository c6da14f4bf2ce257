"""A rank that dies, hangs or sums something else in the middle of sums: all others hear of it, by its number."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import halocline as hc
from halocline.errors import RankFailure
from halocline.reduction.transport.rings import Rings
from halocline.testing.pool import RankPool
from halocline.world import Label, run_local
from halocline.world.local import current_local_world
from halocline.world.mesh import forget

LABEL = Label("sum", "a test", "gradients")
ELEMENTS = 3_000_000


def meet_fault(how: str | tuple[int, ...], kind: str, culprit: int, deadline: float) -> list[str]:
    """One good sum; then several are begun, and one rank fails. What each wait says, and a sum begun after it."""
    forget()
    world = hc.init(deadline=deadline) or hc.Mesh(data=-1).world
    rings = Rings(world, how)
    rings.begin(torch.ones(ELEMENTS), LABEL).wait()
    if world.rank == culprit and kind == "hangs":
        time.sleep(600)
    under_way = [rings.begin(torch.ones(ELEMENTS + (kind == "differs" and world.rank == culprit)), LABEL)]
    if world.rank == culprit and kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    said = []
    try:
        under_way += [rings.begin(torch.ones(ELEMENTS), LABEL) for _ in range(3)]
        for pending in under_way:
            pending.wait()
        rings.begin(torch.ones(3), LABEL).wait()
    except RankFailure as error:
        said.append(str(error))
    try:
        rings.begin(torch.ones(3), LABEL).wait()
    except RankFailure as error:
        said.append(str(error))
    return said


@pytest.mark.long
@pytest.mark.parametrize("how", [(2, 2), "doubling"])
@pytest.mark.parametrize("kind", ["dies", "hangs", "differs"])
def test_a_rank_that_fails_is_named_by_all_others(how: str | tuple[int, ...], kind: str) -> None:
    with RankPool(4) as pool:
        pool.run(time.sleep, 0.0)
        outcomes = pool.outcomes(meet_fault, how, kind, 1, 3.0, deadline=16.0)
    for outcome in outcomes:
        if outcome.rank == 1 and kind != "differs":
            assert outcome.kind in ("died", "hung")
            continue
        assert outcome.kind == "value" and len(outcome.value) == 2, outcome
        assert "rank 1" in outcome.value[0] or kind == "differs"


def test_a_rank_that_raises_is_heard_by_threads() -> None:
    def add_up() -> None:
        world = current_local_world()
        assert world is not None
        rings = Rings(world, "levels")
        rings.begin(torch.ones(5), LABEL).wait()
        if world.rank == 1:
            raise ValueError("lost")
        with pytest.raises(RankFailure, match="rank 1 failed first"):
            rings.begin(torch.ones(5), LABEL).wait()
        with pytest.raises(RankFailure):
            rings.begin(torch.ones(5), LABEL)

    with pytest.raises(ValueError, match="lost"):
        run_local(3, add_up)


def test_silence_ends_at_the_deadline() -> None:
    def add_up() -> str:
        world = current_local_world()
        assert world is not None
        rings = Rings(world, "levels")
        if world.rank == 1:
            time.sleep(1.0)
            return ""
        with pytest.raises(RankFailure, match=r"within 0\.3 s") as raised:
            rings.begin(torch.ones(5), LABEL).wait()
        return str(raised.value)

    assert "nothing came from rank 1" in run_local(2, add_up, deadline=0.3)[0]
