"""A world that is closed leaves no threads, sockets or communicators behind, and refuses to be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import halocline as hc
from halocline.testing import shared_pool
from halocline.world import Label

LABEL = Label("sum", "a test")


def resources() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


def duplicates_that_close(wide: bool) -> tuple[list[tuple[int, int]], str]:
    world = hc.Mesh(data=-1).world
    everyone, seen = tuple(range(world.size)), []
    for _ in range(4):
        made = world.duplicate(wide)
        total = made.sum(torch.ones(100_000), everyone, LABEL)  # by a group of its own
        assert bool((made.sum(torch.ones(3), everyone, LABEL) == total[:3]).all())
        made.close()
        made.close()  # nothing more happens
        seen.append(resources())
    with pytest.raises(hc.RankFailure, match="this world is closed") as error:
        made.sum(torch.ones(3), everyone, LABEL)
    return seen, str(error.value)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("wide", [False, True])
def test_a_duplicate_releases_all_it_had(wide: bool) -> None:
    for rank, (seen, text) in enumerate(shared_pool(3).run(duplicates_that_close, wide)):
        # The first may start what stays, such as torch's own threads. What an earlier test left may still go.
        assert all(now <= before for after in seen[2:] for now, before in zip(after, seen[1], strict=True)), seen
        assert f"rank {rank}" in text
