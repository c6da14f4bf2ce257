"""The result of a run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Result:
    """The outcome of a run, the same on every rank."""

    steps: int  # made so far, earlier attempts included
    losses: list[float] = field(default_factory=list)  # of the steps made by this process
    metrics: dict[str, float] = field(default_factory=dict)
    stopped: bool = False  # by a signal, after a checkpoint
    preempted: bool = False  # by SIGTERM or SIGUSR1: it should go on later
