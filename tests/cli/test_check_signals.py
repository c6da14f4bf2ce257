"""A check that is asked to end takes its ranks with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE = 120.0


def group_of(leader: int) -> set[int]:
    """The running processes of the group that this process leads."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended
            continue
        if int(group) == leader and state != "Z":
            found.add(int(stat.parent.name))
    return found


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("wait", [0.0, 3.0])
def test_sigterm_ends_the_ranks(wait: float) -> None:
    """``wait``: seconds after the first rank has started: while ranks import torch, and later."""
    command = [sys.executable, "-m", "halocline.cli", "check", "unet3d", "--cut", "depth=4", "--steps", "200"]
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        until = time.monotonic() + DEADLINE
        while len(group_of(run.pid)) < 3 and time.monotonic() < until:  # itself, and at least a rank
            assert run.poll() is None
            time.sleep(0.1)
        time.sleep(wait)
        run.send_signal(signal.SIGTERM)
        assert run.wait(DEADLINE) == 128 + signal.SIGTERM
        until = time.monotonic() + 10
        while (left := group_of(run.pid)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left
    finally:
        run.kill()
