"""Several runs on the same ranks, in turns of some steps, under one limit of memory.

Each run has its own folder, log, checkpoints and random numbers, and ends with the numbers that it has alone, to the
bit. Where the next run's step and what the others keep do not fit together, the state of others goes to a file
(:mod:`.spill`). All ranks take the same turns; each of them spills what it must.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from ..errors import ConfigError
from ..random.state import State, current, swap
from ..reduction import engine_of
from ..sizes import size_text
from ..world import this_world
from ..world.agreement import agree
from .result import Result
from .settings import Settings
from .signals import StopRequest
from .spill import SpillFile, bytes_in, state_of
from .task import START
from .trainer import Listener, Trainer

SPILL = "spill"  # folder in that of a run


@dataclass
class Shared:
    """The outcome of runs in turns: results in their order, and how this rank spent its time."""

    results: list[Result]
    own_seconds: list[float]  # set-up and steps of each run: what it takes alone
    seconds: float  # from the first set-up to the last end
    switching: float = 0.0  # of these: putting out and bringing back
    spilled: int = 0  # bytes put out, all turns together
    most_kept: int = 0  # bytes of state that were in memory at once, when turns began


@dataclass
class _Run:
    """One of them, and what of this process belongs to it while it has its turn."""

    trainer: Trainer | None  #: None once it has ended
    file: SpillFile
    needs: int | None = None  # bytes of a step; None: unknown
    waiting: int = 0  # bytes of data that its loader holds ready
    seconds: float = 0.0
    result: Result | None = None
    started: bool = False
    steps: Generator[None, bool | None, Result] = field(init=False)
    _random: tuple[State, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = self.active.steps()
        next(self.steps)
        self.leave()

    @property
    def active(self) -> Trainer:
        """Its trainer, while it has not ended."""
        if self.trainer is None:
            raise AssertionError("this run has ended")
        return self.trainer

    def enter(self) -> None:
        """Random numbers go on where this run has stopped."""
        state, generator = self._random
        swap(state)
        torch.set_rng_state(generator)

    def leave(self) -> None:
        """Keep the random state, and free the gradients, as the next step would."""
        self._random = current(), torch.get_rng_state()
        self.active.optimizer.zero_grad(set_to_none=True)

    def kept(self) -> int:
        """Bytes in memory between steps."""
        if self.result is not None:
            return 0
        return bytes_in(state_of(self.active.model, self.active.optimizer)) + self.waiting * self.started

    def run_turn(self, turn: int, stop: bool) -> None:
        """Make ``turn`` steps, or save and stop."""
        began = time.perf_counter()
        try:
            for _ in range(turn):
                if stop and self.started:
                    self.steps.send(True)
                else:
                    self.started = True
                    next(self.steps)
        except StopIteration as ended:
            self.result = ended.value
        self.seconds += time.perf_counter() - began


def train_together(runs: Sequence[tuple[Settings, Path, Listener]], limit: int | None = None, turn: int = 10) -> Shared:
    """Train these runs in turns of ``turn`` steps. By all ranks together, which make them alike.

    ``limit`` is the bytes of a rank's memory for weights, gradients, optimizer state, activations and batches of all
    runs together; each must fit alone.
    """
    _check(runs)
    began, stop, members = time.perf_counter(), StopRequest(), list[_Run]()
    shared = Shared([], [], 0.0)
    try:
        with stop:
            for settings, folder, tell in runs:
                members.append(_made(settings, folder, tell, stop))
                if limit is not None:
                    agree(this_world(), partial(_check_alone, members[-1], folder, limit), START)
                    _spill(members[-1], shared)
            _take_turns(members, limit, turn, shared)
    finally:
        for each in members:
            each.steps.close()
            each.file.remove()
    shared.results = [each.result for each in members if each.result is not None]
    shared.own_seconds = [each.seconds for each in members]
    shared.seconds = time.perf_counter() - began
    return shared


def _check(runs: Sequence[tuple[Settings, Path, Listener]]) -> None:
    folders = [folder.resolve() for _, folder, _ in runs]
    if len(set(folders)) < len(folders):
        raise ConfigError("two of these runs have one folder; give each its own")
    for settings, folder, _ in runs:
        if settings.gradients.lag or settings.gradients.overlap == "next-forward":
            raise ConfigError(
                f"{folder}: gradients.lag and gradients.overlap = 'next-forward' leave gradients under way when a "
                "step ends, and another run begins then; leave them as they are"
            )
        if settings.copies.every:
            raise ConfigError(f"{folder}: copies.every keeps copies for one run at a time; leave it 0 for several")


def _made(settings: Settings, folder: Path, tell: Listener, stop: StopRequest) -> _Run:
    began = time.perf_counter()
    trainer = Trainer(settings, folder, tell)
    trainer.stop = stop
    file = SpillFile(folder / SPILL / f"rank-{trainer.mesh.rank}.bin")
    made = _Run(trainer, file)
    needed = trainer.forecast()
    if needed is not None:
        made.needs, made.waiting = needed.total, needed.data
    made.seconds = time.perf_counter() - began
    return made


def _check_alone(run: _Run, folder: Path, limit: int) -> None:
    if run.needs is not None and run.needs > limit:
        raise ConfigError(
            f"{folder}: a step needs {size_text(run.needs)} on this rank, and the limit for all runs is "
            f"{size_text(limit)}; take a smaller batch, split = 0, more ranks, or a higher limit"
        )


def _take_turns(members: list[_Run], limit: int | None, turn: int, shared: Shared) -> None:
    stop = False
    while left := [each for each in members if each.result is None]:
        for run in left:
            began = time.perf_counter()
            if limit is not None:
                _make_room(run, members, limit, shared)
            run.file.restore()
            shared.switching += time.perf_counter() - began
            shared.most_kept = max(shared.most_kept, sum(each.kept() for each in members))
            run.enter()
            run.run_turn(turn, stop)
            if run.result is None:
                run.leave()
            # Agreed on by all ranks, as each run's end is.
            stop = stop or (run.result is not None and run.result.stopped)
            if run.result is not None:
                run.trainer = None  # and its memory with it
                gc.collect()


def _make_room(run: _Run, members: list[_Run], limit: int, shared: Shared) -> None:
    """Put out others until the run's step fits: those first whose turn is furthest away."""
    at = members.index(run)
    others = [each for each in members[at + 1 :] + members[:at] if each.result is None and not each.file.is_out]
    while others and (run.needs is None or run.needs + sum(each.kept() for each in others) > limit):
        _spill(others.pop(), shared)


def _spill(run: _Run, shared: Shared) -> None:
    run.active.checkpoints.wait()  # it holds a copy until it is written
    engine = engine_of(run.active.model)
    if engine is not None:
        engine.let_go()
    shared.spilled += run.file.spill(state_of(run.active.model, run.active.optimizer))
