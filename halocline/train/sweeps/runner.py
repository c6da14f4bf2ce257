"""Runs the trials of a sweep, each in processes of its own, and remembers them in a journal.

Only this process asks and tells Optuna. After a kill, of a trial or of the sweep itself, the journal and the folders of
the trials say what is left: finished trials stay, and a trial that had begun goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..config import CONFIG, write_settings
from ..log import read_log, with_numbers, write_whole
from .backends import Backend, make_backend
from .mix import TrialMix, planned_mix
from .running import RunningTrial
from .spec import SweepSpec

JOURNAL, TRIALS, RESULT, SPEC, SECONDS = "journal.log", "trials", "result.json", "sweep.json", "seconds"
_POLL = 0.2  # seconds between looks at the trials
_NOTED = 2.0  # seconds after which the times are written anew
#: What must be as it was when a sweep goes on: results of other settings could not be compared.
_FIXED = ("target", "space", "metric", "direction", "settings", "seed", "sampler")


@dataclass(frozen=True)
class TrialRecord:
    """How a trial ended."""

    number: int
    values: dict[str, Any]
    state: str  # "complete", "pruned" or "failed"
    value: float | None
    seconds: float
    ranks: int


class SweepRunner:
    """One sweep in a folder of its own; resumes an earlier one that it finds there."""

    def __init__(self, spec: SweepSpec, folder: Path, command: Sequence[str], tell: Callable[[str], None]) -> None:
        try:
            optuna: Any = import_module("optuna")
            journal: Any = import_module("optuna.storages.journal")
        except ModuleNotFoundError as error:
            raise ConfigError("halocline sweep needs Optuna: pip install 'halocline[sweep]'") from error
        self._optuna, self.spec, self.folder, self._command, self._tell = optuna, spec, folder, list(command), tell
        (folder / TRIALS).mkdir(parents=True, exist_ok=True)
        self._check_same_spec()
        self._backend: Backend = make_backend(spec)
        self.records: list[TrialRecord] = []
        self.mix: TrialMix | None = planned_mix(spec, folder) if spec.mode == "auto" else None
        self._clock = _Clock(folder / SECONDS)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = optuna.storages.JournalStorage(journal.JournalFileBackend(str(folder / JOURNAL)))
        self._study = optuna.create_study(
            storage=storage,
            study_name="sweep",
            load_if_exists=True,
            direction=spec.direction,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=3)
            if spec.pruner == "median"
            else optuna.pruners.NopPruner(),
        )

    def _sampler(self, number: int) -> Any:
        """The sampler of one trial: with "random" its settings depend on its number alone, whenever it is asked for."""
        samplers = self._optuna.samplers
        seed = (1_000_003 * self.spec.seed + number) % (1 << 32)
        return samplers.RandomSampler(seed) if self.spec.sampler == "random" else samplers.TPESampler(seed=seed)

    def _check_same_spec(self) -> None:
        """Raise ConfigError if the folder holds a sweep whose trials are others."""
        path, told = self.folder / SPEC, asdict(self.spec)
        if path.exists():
            before = json.loads(path.read_text())
            for key in _FIXED:
                if key in before and before[key] != json.loads(json.dumps(told[key])):
                    raise ConfigError(f"{self.folder} holds a sweep with another {key}; give another --out")
        write_whole(path, json.dumps(told))

    def run(self) -> list[TrialRecord]:
        """Run all trials that are left; returns those of this and of earlier calls."""
        self._began, self._ended = time.monotonic(), 0
        states = self._optuna.trial.TrialState
        waiting = []
        for trial in self._study.get_trials():
            if trial.state == states.RUNNING and trial.params.keys() != self.spec.space.keys():
                self._study.tell(trial.number, state=states.FAIL)  # killed while its settings were drawn
            elif trial.state == states.RUNNING:
                value = _value(self._folder(trial.number), self.spec.metric)
                if value is None:
                    waiting.append(trial)
                else:  # it had ended, and the sweep was killed before it knew
                    self._study.tell(trial.number, value)
        with self._backend:
            self._run_all(waiting)
        self.records = [self._record(trial) for trial in self._study.get_trials()]
        return self.records

    def _run_all(self, waiting: list[Any]) -> None:
        """Start those that wait and new trials, as ranks become free, until all have ended."""
        running: dict[int, tuple[RunningTrial, Any, int]] = {}
        while True:
            begun = len(self._study.get_trials(deepcopy=False))
            left = max(0, self.spec.trials - begun) + len(waiting)
            free = self.spec.ranks - sum(each.ranks for each, _, _ in running.values())
            ranks = self._ranks_of_next(left)
            if left and ranks <= free:
                trial = waiting.pop(0) if waiting else self._ask(begun)
                running[trial.number] = (self._start(trial, ranks), trial, 0)
                if self.mix is not None:
                    self.mix.begun()
                self._clock.note()
                continue
            if not running:
                break
            time.sleep(_POLL)
            if self._clock.is_due():
                self._clock.note()
                for each, _, _ in running.values():
                    _note_seconds(each)
            for number, (each, trial, seen) in list(running.items()):
                running[number] = (each, trial, self._report(each, trial, seen))
                if each.over:
                    del running[number]
                    self._end(each, trial)
                    self._clock.note()

    @property
    def seconds(self) -> float:
        """What the sweep has taken so far, earlier calls included."""
        return self._clock.seconds

    @property
    def mix_text(self) -> str:
        """How the planner shares the ranks; empty in other modes."""
        return "" if self.mix is None else self.mix.text(self.spec.trials)

    def _ranks_of_next(self, left: int) -> int:
        """Ranks of the next trial, where ``left`` have not begun."""
        if self.mix is not None and left:
            return self.mix.next_ranks(min(left, self.spec.trials))
        return self.spec.ranks if self.spec.mode == "data" else 1

    def _ask(self, number: int) -> Any:
        """A new trial, whose settings are on disk before anything else: a kill from now on loses nothing."""
        self._study.sampler = self._sampler(number)
        trial = self._study.ask()
        values = self.spec.suggested(trial)
        folder = self._folder(trial.number)
        folder.mkdir(parents=True, exist_ok=True)
        write_settings(self.spec.settings_of(values), folder / CONFIG)
        return trial

    def _folder(self, number: int) -> Path:
        return self.folder / TRIALS / f"{number:04d}"

    def _start(self, trial: Any, ranks: int) -> RunningTrial:
        """Start or resume a trial."""
        folder = self._folder(trial.number)
        if not (folder / CONFIG).exists():  # the sweep was killed before it wrote them
            folder.mkdir(parents=True, exist_ok=True)
            write_settings(self.spec.settings_of(dict(trial.params)), folder / CONFIG)
        self._tell(f"trial {trial.number} on {ranks} rank{'s'[: ranks > 1]}")
        return RunningTrial(self._backend.start, self._command, folder, ranks, self.spec.restarts, _seconds(folder))

    def _report(self, running: RunningTrial, trial: Any, seen: int) -> int:
        """Tell Optuna of new validations, and prune the trial if it says so. Returns how many it knows of.

        A trial that an earlier call began is never pruned.
        """
        if self.spec.pruner == "none" or running.pruned:
            return seen
        values = [entry for entry in read_log(running.folder, "validation") if self.spec.metric in entry]
        for entry in values[seen:]:
            trial.report(entry[self.spec.metric], entry["step"])
        if len(values) > seen and not running.over and trial.should_prune():
            self._tell(f"trial {trial.number} is pruned at step {values[-1]['step']}")
            running.prune()
        return len(values)

    def _end(self, running: RunningTrial, trial: Any) -> None:
        """Tell Optuna how a trial ended."""
        states = self._optuna.trial.TrialState
        seconds = _note_seconds(running)
        value = _value(running.folder, self.spec.metric)
        if running.pruned and value is None:  # else it had ended before it could be stopped
            self._study.tell(trial.number, state=states.PRUNED)
        elif running.failure or value is None:
            words = running.failure or f"it has no {self.spec.metric}"
            self._tell(f"trial {trial.number} failed: {words}")
            self._study.tell(trial.number, state=states.FAIL)
        else:
            self._ended += 1
            pace = (time.monotonic() - self._began) / self._ended
            left = self.spec.trials - len([each for each in self._study.get_trials() if each.state.is_finished()]) - 1
            rest = f", {left} left, about {max(0, left) * pace:.0f} s" if left > 0 else ""
            self._tell(f"trial {trial.number}: {self.spec.metric} {value:.6g} after {seconds:.1f} s{rest}")
            self._study.tell(trial.number, value)

    def _record(self, trial: Any) -> TrialRecord:
        folder = self._folder(trial.number)
        names = {"COMPLETE": "complete", "PRUNED": "pruned"}
        told = json.loads((folder / SECONDS).read_text()) if (folder / SECONDS).exists() else {}
        return TrialRecord(
            trial.number,
            dict(trial.params),
            names.get(trial.state.name, "failed"),
            trial.value if trial.state.name == "COMPLETE" else None,
            told.get("seconds", 0.0),
            told.get("ranks", 1),
        )


class _Clock:
    """Seconds of a sweep over all calls, written to a file every now and then: a kill loses the last two at most."""

    def __init__(self, path: Path) -> None:
        self._path, self._began, self._noted = path, time.monotonic(), 0.0
        self._before = float(json.loads(path.read_text())["seconds"]) if path.exists() else 0.0

    @property
    def seconds(self) -> float:
        """Up to the last note: after the sweep none are added, and a call that had nothing to do adds none."""
        return self._before + (self._noted - self._began if self._noted else 0.0)

    def is_due(self) -> bool:
        """Is it time to write?"""
        return time.monotonic() - self._noted > _NOTED

    def note(self) -> None:
        """Write the seconds so far."""
        self._noted = time.monotonic()
        write_whole(self._path, json.dumps({"seconds": self.seconds}))


def _note_seconds(running: RunningTrial) -> float:
    """Write what a trial has taken, earlier attempts included; returns it."""
    write_whole(running.folder / SECONDS, json.dumps({"seconds": running.seconds, "ranks": running.ranks}))
    return running.seconds


def _seconds(folder: Path) -> float:
    """Seconds of earlier attempts."""
    path = folder / SECONDS
    return float(json.loads(path.read_text())["seconds"]) if path.exists() else 0.0


def _value(folder: Path, metric: str) -> float | None:
    """The metric of a trial's last validation."""
    path = folder / RESULT
    if not path.exists():
        return None
    result = with_numbers(json.loads(path.read_text()))
    found = None if result["stopped"] else result["metrics"].get(metric)
    return None if found is None or found != found else float(found)
