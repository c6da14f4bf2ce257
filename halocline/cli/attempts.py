"""Ranks on this machine, started again after failures and whenever their number changes."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from ..train.checkpoints import CHECKPOINTS, Folder
from ..train.elastic import RankCount, check_ranks, for_ranks
from ..train.launch import RESULT, LaunchError, LocalRanks
from ..train.log import LOG, read_log, with_numbers
from ..train.signals import PREEMPTED
from ..train.template import RankTemplate
from .local_ranks import rank_command
from .output import say, stderr
from .rank_template import serve
from .stopping import Stop

if TYPE_CHECKING:  # which needs pydantic; the other commands do without
    from ..train.settings import Settings

_WAIT_FOR_ROOM = 600.0  # seconds for enough ranks to be available, as torchrun's agents wait for each other
_POLL = 0.2


def on_this_machine(settings: Settings, folder: Path, counts: RankCount, restarts: int) -> dict[str, Any]:
    """Train on ranks that this process starts. Starts them again after a failure, at most ``restarts`` times.

    If a restart makes no progress, the next one has a rank less. When ``counts`` wants another number, the ranks end
    their step and save, and so many go on.
    """
    from ..train.own import check_paths
    from ..train.trust import mark_run

    check_ranks(settings, counts.most)  # before ranks are started, which takes seconds
    check_paths(settings)
    checkpoints = Folder(folder / CHECKPOINTS)
    with ExitStack() as opened:
        # Before the lock is taken, which the template would hold as well.
        template = opened.enter_context(RankTemplate(serve)) if RankTemplate.possible() else None
        checkpoints.claim()  # before any file of a run that may still be active in this folder is changed
        opened.callback(checkpoints.release)
        _write(settings, folder)
        mark_run(folder, settings)
        stop = opened.enter_context(Stop())
        return _attempts(settings, folder, counts, restarts, stop, checkpoints, template)


def _write(settings: Settings, folder: Path) -> None:
    """Write the settings to the run's folder, from which ranks read them."""
    from ..train.config import CONFIG, write_settings

    write_settings(settings, folder / CONFIG)


def _attempts(
    settings: Settings,
    folder: Path,
    counts: RankCount,
    restarts: int,
    stop: Stop,
    checkpoints: Folder,
    template: RankTemplate | None,
) -> dict[str, Any]:
    """Start the ranks until they succeed; LaunchError if they fail too often, or would fail again."""
    command = rank_command("train_rank", str(folder))
    failures, furthest, ranks = 0, -1, counts.most
    while True:
        before, ranks = ranks, _number(counts, stop)
        if ranks != before:
            say(stderr(), f"going on on {ranks} rank{'s' if ranks > 1 else ''}")
            # All of them are cut as the user said, or an error says that they cannot be.
            _write(settings if ranks == counts.most else for_ranks(settings, ranks), folder)
        starting = partial(LocalRanks, command, ranks, folder, settings.deadline, checkpoints.lock, template=template)
        ending = stop.follow(starting, lambda ranks=ranks: counts.wanted() not in (0, ranks))  # type: ignore[misc]
        if ending is None:
            result = with_numbers(json.loads((folder / RESULT).read_text()))
            if result["stopped"] and stop.recalled and not stop.asked:
                continue
            return {**result, "preempted": result["stopped"] and stop.preempted, "restarts": failures}
        words = str(ending)
        if stop.preempted:
            say(stderr(), f"stopped on request before the ranks could write a checkpoint ({escape(words)})")
            raise typer.Exit(PREEMPTED)
        if stop.asked:
            raise LaunchError(f"stopped on request before the ranks could write a checkpoint ({words})")
        if stop.recalled:  # while they started
            continue
        if ending.is_final:  # wrong settings would fail again, unless it is the number of ranks that they do not fit
            if not counts.exclude(ranks):
                raise LaunchError(words)
            say(stderr(), escape(words))
            continue
        if failures == restarts:
            raise LaunchError(words)
        made = _furthest(folder)
        more = ""
        if failures and made <= furthest and counts.lose_one():
            more = ", with one rank less, since a restart made no progress"
        failures, furthest = failures + 1, max(furthest, made)
        say(stderr(), f"{escape(words)}; starting again from the newest state{more}")


def _number(counts: RankCount, stop: Stop) -> int:
    """The number of ranks to start, once there is room for enough of them. LaunchError if that takes too long."""
    end = time.monotonic() + _WAIT_FOR_ROOM
    while not (count := counts.wanted()):
        if stop.asked or time.monotonic() > end:
            raise LaunchError(f"there is room for fewer than {counts.least} ranks; start the run again when there is")
        time.sleep(_POLL)
    return count


def _furthest(folder: Path) -> int:
    """The last step that any attempt has made; -1 if none."""
    if not (folder / LOG).exists():
        return -1
    return max((entry["step"] for entry in read_log(folder, "step")), default=-1)
