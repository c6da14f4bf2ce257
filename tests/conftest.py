"""Shared by all tests: one thread a process, GPU tests only where there is one, the sweep's counts at the end."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from halocline.testing.place import RankPlace
from halocline.testing.pool import renew_shared_pools

# Test modules import helpers from tests/support, and a few from each other; ranks find them by name.
sys.path.extend(str(folder) for folder in sorted(Path(__file__).parent.iterdir()) if folder.is_dir())


def pytest_configure() -> None:
    # In the background of a shell Ctrl-C is ignored; here it is tested.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    RankPlace.forked = True  # 3 s less for each rank
    torch.set_num_threads(1)
    if "XDG_STATE_HOME" not in os.environ:  # not the home folder; workers of xdist inherit it
        os.environ["XDG_STATE_HOME"] = state = tempfile.mkdtemp(prefix="halocline-tests-")
        atexit.register(shutil.rmtree, state, ignore_errors=True)
    gc.freeze()  # torch stays: full collections, of which every measurement of memory makes some, pass it over


# Rooms whose files take longest come first, so that no worker is left with one of them at the end.
SLOW_ROOMS = ("world", "train", "kernels", "reduction", "benchmarks", "doctor", "rules", "testing", "data")


def _turn(item: pytest.Item) -> int:
    room = item.path.parent.name
    return SLOW_ROOMS.index(room) if room in SLOW_ROOMS else len(SLOW_ROOMS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True, scope="module")
def _rested_ranks() -> Iterator[None]:
    yield
    renew_shared_pools()


_counts: dict[str, dict[str, int]] = {}


def _sweep_counts() -> dict[str, dict[str, int]]:
    sweep = sys.modules.get("test_sweep")
    return {family: dict(counts) for family, counts in sweep.COUNTS.items()} if sweep else {}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The process that ran the sweep hands its counts to the one that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["sweep"] = _sweep_counts()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    _counts.update(getattr(node, "workeroutput", {}).get("sweep", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the random sweep tried, with the ranges it drew from."""
    counts = {**_counts, **_sweep_counts()}
    if not counts:
        return
    import ranges

    bounds = {name: value for name, value in vars(ranges).items() if name.isupper() and isinstance(value, tuple)}
    terminalreporter.section("random sweep")
    terminalreporter.line(f"ranges: {bounds}")
    for family, verdicts in counts.items():
        terminalreporter.line(f"{family}: {dict(sorted(verdicts.items()))}")
