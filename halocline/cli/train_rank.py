"""One rank of a run: trains, shows progress if it is rank 0, and leaves its error for the launcher if it fails."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from ..train.heartbeat import follow_launcher
from ..train.launch import RESULT, this_rank
from ..train.log import json_line, write_whole
from . import end_at_once_on_failure
from .local_ranks import work_as_rank
from .output import number_text, progress_console, set_quiet

if TYPE_CHECKING:  # which needs pydantic; the other commands do without
    from ..train.settings import Settings

_WIDE = 110  # columns of a terminal from which progress is shown in full


class Show:
    """Progress on the terminal: loss, speed, and where the time goes. Where the output is no terminal, a line now and
    then."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self._narrow = console.width < _WIDE
        bar = BarColumn(8 if self._narrow else 40)
        facts = TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=True))
        self._bar = Progress(bar, MofNCompleteColumn(), TimeRemainingColumn(), facts, console=console)
        self._task = self._bar.add_task("training", total=settings.steps, facts="")
        self._plain = None if console.is_terminal else console  # for lines in place of a bar
        self._every = max(1, settings.steps // 20)  # steps between lines

    def __enter__(self) -> Show:
        if self._plain is None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._plain is None:  # else it would print an empty line
            self._bar.stop()

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "step":
            self._step(values)
        else:
            self._bar.console.print(progress_line(kind, values), soft_wrap=True, markup=False)

    def _step(self, values: dict[str, Any]) -> None:
        """Update the bar, or print a line for one step in twenty."""
        facts = step_facts(values, self._narrow)
        if self._plain is None:
            self._bar.update(self._task, completed=values["step"] + 1, facts=facts)
        elif values["step"] % self._every == 0:
            self._plain.print(f"step {values['step']}: {facts}", soft_wrap=True)


def step_facts(values: dict[str, Any], narrow: bool = True) -> str:
    """Loss, speed and waits of a step."""
    shown = {name: values[name] / max(1e-9, values["seconds"]) for name in ("data", "halo", "gradients")}
    data, ranks = f"{shown['data']:.0%}", f"{shown['halo'] + shown['gradients']:.0%}"
    facts = f"loss {values['loss']:.4g}, {number_text(values['samples_per_second'])} samples/s, "
    return facts + (f"waits: data {data}, ranks {ranks}" if narrow else f"waiting for data {data}, for ranks {ranks}")


def progress_line(kind: str, values: dict[str, Any]) -> str:
    """An event other than a step as a line of text."""
    if "text" in values:
        return str(values["text"])
    totals = {
        name: value for name, value in values.items() if name != "step" and "/" not in name
    }  # metrics by class are shown at the end
    units = {"waited": " s", "seconds": " s"}
    rest = ", ".join(f"{name} {value:.4g}{units.get(name, '')}" for name, value in totals.items())
    return f"{kind} at step {values['step']}" + (f": {rest}" if rest else "")


def run_rank(settings: Settings, folder: Path, lock: int | None = None) -> dict[str, Any]:
    """This process's part in a run; the result is the same on every rank. ``lock``: see :class:`Trainer`."""
    from ..train.trainer import Trainer

    began = time.monotonic()
    first = this_rank() == 0
    with Show(settings, progress_console() if first else Console(quiet=True)) as show:
        trainer = Trainer(settings, folder, show if first else (lambda kind, values: None), lock)
        if first:
            (folder / RESULT).unlink(missing_ok=True)  # that of an earlier attempt: this one has not ended
        result = trainer.train()
    outcome = {
        "run": str(folder),
        "steps": result.steps,
        "metrics": result.metrics,
        "stopped": result.stopped,
        "preempted": result.preempted,
        "seconds": time.monotonic() - began,
    }
    if this_rank() == 0:  # asked anew: ranks of a pool learn it when they join
        write_whole(folder / RESULT, json_line(outcome))
    return outcome


def main() -> None:
    """``python -m halocline.cli.train_rank FOLDER``, for the processes that ``halocline train`` starts."""
    from ..train.config import read_settings

    folder, link = Path(sys.argv[1]), follow_launcher()
    set_quiet("--quiet" in sys.argv)
    work_as_rank(folder, lambda: run_rank(read_settings(folder), folder, link.lock))


if __name__ == "__main__":
    end_at_once_on_failure(main)
