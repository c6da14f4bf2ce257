"""Runs the trials of a sweep, each in processes of its own, and remembers them in a journal.

Only this process asks and tells Optuna. After a kill, of a trial or of the sweep itself, the journal and the folders of
the trials say what is left: finished trials stay, and a trial that had begun goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..config import CONFIG, write_settings
from ..launch import Ending, LocalRanks
from ..log import read_log, with_numbers
from .spec import SweepSpec

JOURNAL, TRIALS, RESULT, SPEC, SECONDS = "journal.log", "trials", "result.json", "sweep.json", "seconds"
_POLL = 0.2  # seconds between looks at the trials


@dataclass(frozen=True)
class TrialRecord:
    """How a trial ended."""

    number: int
    values: dict[str, Any]
    state: str  # "complete", "pruned" or "failed"
    value: float | None
    seconds: float
    ranks: int


class RunningTrial:
    """The processes of one trial, started and watched by a thread; restarted if they are killed."""

    def __init__(self, command: Sequence[str], folder: Path, ranks: int, restarts: int) -> None:
        self.folder, self.ranks = folder, ranks
        self._command, self._restarts = [*command, str(folder)], restarts
        self._processes: LocalRanks | None = None
        self.ending: Ending | None = None
        self.pruned = False
        self.began = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"halocline trial {folder.name}")
        self._thread.start()

    def _run(self) -> None:
        with (self.folder / "output.log").open("ab") as log:
            for _ in range(self._restarts + 1):
                self._processes = LocalRanks(
                    self._command, self.ranks, self.folder, output=log.fileno(), errors=log.fileno()
                )
                self.ending = self._processes.wait()
                if self.ending is None or self.ending.status >= 0 or self.pruned:  # only what was killed starts again
                    return

    @property
    def over(self) -> bool:
        """Has it ended?"""
        return not self._thread.is_alive()

    def prune(self) -> None:
        """Let it write a checkpoint and end."""
        self.pruned = True
        if self._processes is not None:
            self._processes.signal(signal.SIGTERM)


class SweepRunner:
    """One sweep in a folder of its own; goes on with an earlier one that it finds there."""

    def __init__(self, spec: SweepSpec, folder: Path, command: Sequence[str], tell: Callable[[str], None]) -> None:
        try:
            optuna: Any = import_module("optuna")
            journal: Any = import_module("optuna.storages.journal")
        except ModuleNotFoundError as error:
            raise ConfigError("halocline sweep needs Optuna: pip install 'halocline[sweep]'") from error
        self._optuna, self.spec, self.folder, self._command, self._tell = optuna, spec, folder, list(command), tell
        (folder / TRIALS).mkdir(parents=True, exist_ok=True)
        self._check_same_spec()
        self.records: list[TrialRecord] = []
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        storage = optuna.storages.JournalStorage(journal.JournalFileBackend(str(folder / JOURNAL)))
        self._study = optuna.create_study(
            storage=storage,
            study_name="sweep",
            load_if_exists=True,
            direction=spec.direction,
            sampler=self._sampler(),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=3)
            if spec.pruner == "median"
            else optuna.pruners.NopPruner(),
        )

    def _sampler(self) -> Any:
        """A sampler whose next trial depends on the trials so far, not on when the sweep was started."""
        samplers = self._optuna.samplers
        known = len(list((self.folder / TRIALS).iterdir()))
        seed = self.spec.seed + 1000 * known
        return samplers.RandomSampler(seed) if self.spec.sampler == "random" else samplers.TPESampler(seed=seed)

    def _check_same_spec(self) -> None:
        """Raise ConfigError if the folder holds a sweep of another space or target."""
        path, told = self.folder / SPEC, asdict(self.spec)
        if path.exists():
            before = json.loads(path.read_text())
            for key in ("target", "space", "metric", "direction"):
                if before[key] != json.loads(json.dumps(told[key])):
                    raise ConfigError(f"{self.folder} holds a sweep with another {key}; give another --out")
        path.write_text(json.dumps(told))

    def run(self) -> list[TrialRecord]:
        """Run all trials that are left; returns those of this and of earlier calls."""
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
        running: dict[int, tuple[RunningTrial, Any, int]] = {}
        while True:
            begun = len(self._study.get_trials())
            left = max(0, self.spec.trials - begun) + len(waiting)
            free = self.spec.ranks - sum(each.ranks for each, _, _ in running.values())
            ranks = self.spec.ranks_for(left + len(running))
            if left and ranks <= free:
                trial = waiting.pop(0) if waiting else self._ask()
                running[trial.number] = (self._start(trial, ranks), trial, 0)
                continue
            if not running:
                break
            time.sleep(_POLL)
            for number, (each, trial, seen) in list(running.items()):
                running[number] = (each, trial, self._report(each, trial, seen))
                if each.over:
                    del running[number]
                    self._end(each, trial)
        self.records = [self._record(trial) for trial in self._study.get_trials()]
        return self.records

    def _ask(self) -> Any:
        """A new trial, whose settings are on disk before anything else: a kill from now on loses nothing."""
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
        return RunningTrial(self._command, folder, ranks, self.spec.restarts)

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
        seconds = time.monotonic() - running.began + _seconds(running.folder)
        (running.folder / SECONDS).write_text(json.dumps({"seconds": seconds, "ranks": running.ranks}))
        value = _value(running.folder, self.spec.metric)
        if running.pruned:
            self._study.tell(trial.number, state=states.PRUNED)
        elif running.ending is not None or value is None:
            words = running.ending.words if running.ending is not None else f"it has no {self.spec.metric}"
            self._tell(f"trial {trial.number} failed: {words}")
            self._study.tell(trial.number, state=states.FAIL)
        else:
            self._tell(f"trial {trial.number}: {self.spec.metric} {value:.6g} after {seconds:.1f} s")
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
