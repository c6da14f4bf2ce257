"""How the trials of a sweep share its ranks: how many run side by side follows from what the planner predicts.

A trial on two ranks is rarely twice as fast, so trials side by side are best while there are enough of them; those that
are left at the end get more ranks each. :class:`TrialMix` finds the waves of trials with the shortest total time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ...errors import ConfigError, HaloclineError
from ..planning import HERE
from ..settings import Settings
from .spec import SweepSpec

_LOADING = "import halocline.train.trainer"  # what every trial begins with, on any number of ranks
_LOADING_DEADLINE = 300.0


class TrialMix:
    """Waves of trials: how many ranks each of the next ones gets.

    ``seconds`` are those of one trial, by its number of ranks. A wave of k trials takes ``ranks // k`` for each.

    >>> mix = TrialMix(2, 3, {1: 1.0, 2: 0.6})
    >>> mix.waves(3), mix.seconds(3)
    ([(2, 1), (1, 2)], 1.6)
    """

    def __init__(self, ranks: int, trials: int, seconds: Mapping[int, float]) -> None:
        self.predicted = dict(seconds)
        self._best: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # seconds, trials of the next wave, ranks of each
        for left in range(1, trials + 1):
            waves = []
            for beside in range(min(left, ranks), 0, -1):  # of equal ones the one with more trials comes first
                each = ranks // beside
                if each in seconds:
                    waves.append((seconds[each] + self._best[left - beside][0], beside, each))
            self._best.append(min(waves, key=lambda wave: wave[0]))
        self._open: list[int] = []

    def seconds(self, left: int) -> float:
        """Seconds that a number of trials takes."""
        return self._best[left][0]

    def waves(self, left: int) -> list[tuple[int, int]]:
        """Trials and ranks of each, wave by wave."""
        found = []
        while left:
            _, beside, each = self._best[left]
            found.append((beside, each))
            left -= beside
        return found

    def text(self, left: int) -> str:
        """The waves and what they take, in words."""
        shares: list[tuple[int, int]] = []  # trials and ranks of each, over waves of the same ranks
        for beside, each in self.waves(left):
            same = bool(shares) and shares[-1][1] == each
            shares[-1:] = [(shares[-1][0] + beside, each)] if same else [*shares[-1:], (beside, each)]
        words = ", then ".join(f"{count} on {ranks} rank{'s'[: ranks > 1]} each" for count, ranks in shares)
        times = ", ".join(f"{value:.3g} s on {ranks}" for ranks, value in sorted(self.predicted.items()))
        return f"planned mix: {words}: {self.seconds(left):.3g} s (a trial: {times})"

    def next_ranks(self, left: int) -> int:
        """Ranks of the next trial, where ``left`` have not begun."""
        if not self._open:
            _, beside, each = self._best[left]
            self._open = [each] * beside
        return self._open[-1]

    def begun(self) -> None:
        """The next trial has begun."""
        self._open.pop()


def planned_mix(spec: SweepSpec, folder: Path) -> TrialMix:
    """The mix for all trials of a sweep, by the planner's prices on the machine that the sweep names.

    Trials differ in their settings: the mean of both ends of the space counts.
    """
    numbers = sorted({spec.ranks // beside for beside in range(1, min(spec.ranks, spec.trials) + 1)})
    ends = [spec.settings_of({key: _end(told, at) for key, told in spec.space.items()}) for at in (0, -1)]
    if _costs_alike(*ends):
        ends = ends[:1]
    loading = _seconds_to_load(folder)
    seconds = {}
    refused = ""
    for ranks in numbers:
        try:
            each = [_trial_seconds(settings, spec.machine, ranks) for settings in ends]
        except ConfigError:
            raise
        except HaloclineError as error:  # this cut is refused, or does not fit
            refused = str(error)
            continue
        seconds[ranks] = loading + sum(each) / len(each)
    if not seconds:
        raise ConfigError(f'mode = "auto": no trial can be planned: {refused}; choose mode = "experiment" or "data"')
    return TrialMix(spec.ranks, spec.trials, seconds)


def _end(told: Mapping[str, Any], at: int) -> Any:
    return told["choices"][at] if "choices" in told else (told["low"], told["high"])[at]


def _costs_alike(one: Settings, other: Settings) -> bool:
    """Do two trials differ only in what costs no time?"""
    free = ("optimizer", "schedule", "seed", "clip")
    return all(getattr(one, each.name) == getattr(other, each.name) for each in fields(one) if each.name not in free)


def _trial_seconds(settings: Settings, named: str | None, ranks: int) -> float:
    """Seconds of a trial's steps on a number of ranks. Raises HaloclineError where it cannot run on them."""
    from ...arrangement import DATA
    from ...errors import PlanError
    from ...plan.cost import Prices
    from ...plan.machine import load_machine
    from ...plan.search import price
    from ..planning import subject_of
    from ..precision import Precision, this_device
    from ..task import make_layout, make_task

    precision = Precision(settings.precision, this_device(), False)
    task = make_task(settings, precision.dtype)
    if named is None and not Path(HERE).is_file():
        raise ConfigError(
            'mode = "auto": on which machine? Give machine = a name such as "perlmutter", or run `halocline '
            f'calibrate`, which measures this one and writes {HERE}; or choose mode = "experiment" or "data"'
        )
    machine = load_machine(named or HERE)
    try:
        subject = subject_of(settings, task, precision)
    except PlanError as error:
        raise ConfigError(f'mode = "auto": {error}, or choose mode = "experiment" or "data"') from error
    arrangement = make_layout(settings, task.letters, ranks).arrangement
    beside = arrangement.sizes.get(DATA, 1)
    arrangement = replace(arrangement, sizes={DATA: beside, **arrangement.sizes})
    batch = -(-settings.batch // beside) * beside  # the fullest rank counts
    found = price(subject, machine, arrangement, batch, Prices(machine.device))
    if not found.fits:
        raise PlanError(f"a trial does not fit into the memory of {ranks} ranks of {machine.name}")
    return settings.steps * settings.accumulate * found.seconds


def _seconds_to_load(folder: Path) -> float:
    """What a trial takes before its first step, measured: more ranks do not make it shorter."""
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", _LOADING], check=True, capture_output=True, cwd=folder, timeout=_LOADING_DEADLINE
    )
    return time.monotonic() - began
