"""Trainings that are killed, stopped, starved and damaged at random moments, and what came of each.

A trial starts ``halocline train`` on a few ranks, does one thing to it, and starts it again if it has ended. In the end
its losses must be those of an undisturbed run, to the bit; no process and no file may be left over, and no checkpoint
lost that was complete.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halocline.train.checkpoints import CHECKPOINTS
from halocline.train.checkpoints.inspect import verify_checkpoint
from halocline.train.log import read_log
from halocline.train.signals import PREEMPTED
from halocline.train.template import RankTemplate

from .chaos_faults import Strike
from .chaos_links import Links
from .chaos_run import LINKS, OUTSIDE, STEPS, ChaosError, Run, at_random, raw_log
from .chaos_template import serve

DEFECTS = ("hung", "orphans", "lost", "different", "leftovers")


@dataclass
class Trial:
    """One trial: what was done, when, and what came of it."""

    trial: int
    case: str
    ranks: int
    moment: str = ""
    outcome: str = ""  # recovered, reported, or a defect
    seconds: float = 0.0
    again: float | None = None  # seconds from the fault until training went on
    said: str = ""  # the error that the run reported
    detail: str = ""


#: Faults inside a rank: the place, the largest count, and what happens.
INSIDE: dict[str, tuple[str, int, str]] = {
    "kill in an exchange": ("exchange", 60, "kill"),
    "stop in an exchange": ("exchange", 60, "stop"),
    "kill in an optimizer step": ("optimizer", STEPS, "kill"),
    "kill in a rename": ("rename", 4, "kill"),
    "slow rank": ("step", STEPS - 1, "slow"),
    "out of memory": ("step", STEPS - 2, "memory"),
    "full disk": ("step", STEPS - 2, "full"),
}
RANKS = (2, 2, 2, 2, 3, 3, 3, 4, 4, 8)  # of a trial, drawn from these; on nodes two to four
MOUNTED = ("small disk", "read-only folder")
_LOSES_ONE = ("flip a bit", "remove a file")  # faults that take the newest checkpoint itself


def cases() -> list[str]:
    """The kinds of fault that this machine can make."""
    return [*OUTSIDE, *INSIDE, *(MOUNTED if _can_mount() else ()), *(LINKS if Links.possible() else ())]


def _can_mount() -> bool:
    """May this process mount a file system of its own?"""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    with tempfile.TemporaryDirectory() as name:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", name], capture_output=True, check=False).returncode:
            return False
        subprocess.run(["umount", name], capture_output=True, check=False)
    return True


# ---- a trial ----


class Stage:
    """What trials share: the process that commands are forked of, the nodes, and the curves of undisturbed runs."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.template = RankTemplate(serve, "benchmarks.chaos_template")
        self._links: Links | None = None
        self._curves: dict[tuple[int, bool], list[float]] = {}
        self._usual: dict[tuple[int, bool], float] = {}  # seconds of undisturbed runs

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.template.__exit__()
        if self._links is not None:
            self._links.close()

    def run(self, folder: Path, ranks: int, on_nodes: bool) -> Run:
        """A run that is not started yet. On a busy machine its ranks wait as long as an undisturbed run takes."""
        if on_nodes and self._links is None:
            self._links = Links()
        run = Run(folder, ranks, self.template, self._links if on_nodes else None)
        if (ranks, on_nodes) in self._usual:
            run.deadline = max(2.0 + 2.0 * ranks, self._usual[ranks, on_nodes])
        return run

    def reference(self, ranks: int, on_nodes: bool) -> list[float]:
        """The losses of an undisturbed run. On a busy machine the limit becomes five times its seconds."""
        if (ranks, on_nodes) not in self._curves:
            with tempfile.TemporaryDirectory(prefix="halocline-chaos-") as name:
                run, began = self.run(Path(name), ranks, on_nodes), time.monotonic()
                run.start()
                try:
                    if run.wait(3 * self.limit) != 0:
                        raise ChaosError(f"the undisturbed run fails: {_last_line(''.join(run.words()))}")
                finally:
                    run.end()
                self._curves[ranks, on_nodes] = [entry["loss"] for entry in read_log(run.out, "step")]
            self._usual[ranks, on_nodes] = usual = time.monotonic() - began
            self.limit = max(self.limit, 5 * usual)
        return self._curves[ranks, on_nodes]


def make_trial(number: int, seed: int, stage: Stage, case: str | None = None) -> Trial:
    """One trial, by its number and the seed alone."""
    rng = random.Random(seed * 100_003 + number)
    there = cases()
    trial = Trial(number, case or there[number % len(there)], rng.choice(RANKS))
    on_nodes = trial.case in LINKS
    trial.ranks = min(4, trial.ranks) if on_nodes else trial.ranks
    reference = stage.reference(trial.ranks, on_nodes)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="halocline-chaos-") as name:
        run = stage.run(Path(name), trial.ranks, on_nodes)
        if rng.random() < 0.5:  # half of the runs come back from memory where they can
            run.more = ("copies.every=1",)
        mounted = run.out / CHECKPOINTS if trial.case in MOUNTED else None
        try:
            if mounted is not None:
                mounted.mkdir(parents=True)
                _mount(mounted, "size=400k" if trial.case == "small disk" else "size=64m")
            _carry_out(trial, run, rng, reference, stage.limit, mounted)
        finally:
            run.end()
            if run.links is not None:
                run.links.mend()
            if mounted is not None:
                subprocess.run(["umount", "-l", str(mounted)], capture_output=True, check=False)
    trial.seconds = round(time.monotonic() - began, 2)
    return trial


def _mount(folder: Path, options: str) -> None:
    told = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if subprocess.run(told, capture_output=True, check=False).returncode:
        raise ChaosError(f"no file system can be mounted at {folder}")


def _carry_out(
    trial: Trial, run: Run, rng: random.Random, reference: list[float], limit: float, mounted: Path | None
) -> None:
    """Start, strike, wait for the end, start again if need be, and judge."""
    shared = _shared_memory()
    mark = run.folder / "struck"
    if trial.case in INSIDE:
        place, most, what = INSIDE[trial.case]
        rank = 0 if place == "rename" or what == "full" else rng.randrange(run.ranks)
        strike = Strike(rank, place, rng.randrange(1, most + 1), what, str(mark))
        trial.moment = f"rank {strike.rank}, {place} {strike.count}"
        run.start(**strike.variables())
    else:
        run.start()
        if trial.case == "read-only folder":
            trial.moment = at_random(run, rng, limit)
            run.struck = time.time()
            told = ["mount", "-o", "remount,ro", str(mounted)]
            subprocess.run(told, capture_output=True, check=False)
        elif trial.case in (outside := {**OUTSIDE, **LINKS}):
            trial.moment = at_random(run, rng, limit)
            outside[trial.case](run, rng)
    status = run.wait(limit)
    if mark.exists():
        run.struck = mark.stat().st_mtime
    left = run.end()
    if status is None:
        return _judged(trial, "hung", f"still running after {limit:g} s; processes {left}")
    if left:
        return _judged(trial, "orphans", f"processes {left} outlived the run")
    if status not in (0, PREEMPTED) and status > 0:
        trial.said = _last_line(run.texts[-1] if run.texts else "")
        silent = [
            number
            for number, (each, words) in enumerate(zip(run.started, run.words(), strict=True))
            if (each.returncode or 0) > 0 and not _last_line(words).startswith("halocline train: ")
        ]
        if silent:
            return _judged(
                trial, "different", f"status {status} without a line that says why ({silent}): {trial.said!r}"
            )
    if run.links is not None:
        run.links.mend()
    if mounted is not None:
        subprocess.run(["mount", "-o", "remount,rw,size=64m", str(mounted)], capture_output=True, check=False)
    _finish(trial, run, status, reference, limit, shared)
    return None


def _finish(trial: Trial, run: Run, status: int, reference: list[float], limit: float, shared: set[str]) -> None:
    """Resume the run where it has not come to its end, and compare its curve."""
    newest = _newest_good(run)
    if run.steps() < STEPS or status != 0:
        run.start()
        ended = run.wait(limit)
        left = run.end()
        if ended is None:
            return _judged(trial, "hung", f"the resumed run still ran after {limit:g} s")
        if ended != 0 or left:
            return _judged(trial, "orphans" if left else "lost", f"status {ended}: {_last_line(run.texts[-1])}")
        resumed = _resumed_at(run.texts[-1])
        if resumed < newest:
            return _judged(trial, "lost", f"resumed at step {resumed}, though step {newest} was complete")
    losses = [entry["loss"] for entry in read_log(run.out, "step")]
    if losses != reference:
        return _judged(trial, "different", f"losses {losses}, not {reference}")
    broken = [words for step in run.checkpoints.steps() for words in verify_checkpoint(run.checkpoints, step).problems]
    hidden = [entry.name for entry in run.checkpoints.root.iterdir() if entry.name.startswith(".")]
    ours = sorted(name for name in _shared_memory() - shared if "halocline" in name)
    if (broken and trial.case not in _LOSES_ONE) or hidden or ours:
        return _judged(trial, "leftovers", f"{broken} {hidden} {ours}")
    trial.again = _seconds_until_training(run)
    return _judged(trial, "reported" if trial.said else "recovered", "")


def _shared_memory() -> set[str]:
    """Names in shared memory, where it is a folder."""
    place = Path("/dev/shm")
    return {entry.name for entry in place.iterdir()} if place.is_dir() else set()


def _judged(trial: Trial, outcome: str, detail: str) -> None:
    trial.outcome, trial.detail = outcome, detail


def _newest_good(run: Run) -> int:
    """The newest step whose checkpoint is complete; 0 if there is none."""
    good = [step for step in run.checkpoints.steps() if not verify_checkpoint(run.checkpoints, step).problems]
    return max(good, default=0)


def _resumed_at(text: str) -> int:
    """The step at which a run said that it resumed; 0 where it began anew."""
    for line in text.splitlines():
        if line.startswith("resumed at step "):
            return int(line.split()[3].rstrip(":"))
    return 0


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("halocline train: ")] or text.splitlines() or [""]
    return lines[-1][:400]


def _seconds_until_training(run: Run) -> float | None:
    """Seconds from the fault to the first step of the attempt after it; None if no attempt followed."""
    starts = [each["time"] for each in raw_log(run.out) if each.get("kind") == "data" and each["time"] > run.struck]
    if not run.struck or not starts:
        return None
    steps = [each["time"] for each in raw_log(run.out) if each.get("kind") == "step" and each["time"] >= starts[0]]
    return round(steps[0] - run.struck, 2) if steps else None


# ---- all trials ----


def measure_chaos(
    trials: int, seed: int, limit: float, journal: Path | None, tell: Callable[[Trial], None], case: str | None = None
) -> dict[str, Any]:
    """Make the trials that ``journal`` does not have yet, and count what came of all."""
    done = _read_journal(journal, seed)
    with ExitStack() as opened:
        stage = opened.enter_context(Stage(limit)) if len(done) < trials else None
        for number in range(trials):
            if number not in done and stage is not None:
                done[number] = made = make_trial(number, seed, stage, case)
                if journal is not None:
                    with journal.open("a") as file:
                        file.write(json.dumps({"seed": seed, **asdict(made)}) + "\n")
                tell(made)
    return summary([done[number] for number in range(trials)], seed)


def _read_journal(journal: Path | None, seed: int) -> dict[int, Trial]:
    """Trials that an earlier call has made with this seed."""
    found: dict[int, Trial] = {}
    for line in journal.read_text().splitlines() if journal is not None and journal.exists() else []:
        entry = json.loads(line)
        if entry.pop("seed") == seed:
            found[entry["trial"]] = Trial(**entry)
    return found


def summary(trials: list[Trial], seed: int) -> dict[str, Any]:
    """Counts of outcomes, in all and by kind of fault."""
    counts = Counter(trial.outcome for trial in trials)
    by_case = {case: dict(Counter(t.outcome for t in trials if t.case == case)) for case in {t.case for t in trials}}
    again = [trial.again for trial in trials if trial.again is not None]
    return {
        "trials": len(trials),
        "recovered": counts["recovered"],
        "reported": counts["reported"],
        **{name: counts[name] for name in DEFECTS},
        "cases": dict(sorted(by_case.items())),
        "seed": seed,
        "seconds_to_training": round(statistics.median(again), 2) if again else None,
        "longest_trial": max((trial.seconds for trial in trials), default=0.0),
        "defects": [asdict(trial) for trial in trials if trial.outcome in DEFECTS],
    }
