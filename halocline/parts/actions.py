"""Schedules as data: what each lane of ranks does, in order. They are printed, drawn and checked without ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import MeshError

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
Seconds = Mapping[str, float]
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One stage's work on one micro-batch. Prints as ``1F0``: stage 1, forward, micro-batch 0.

    Kinds: F forward; B backward; or its two halves, I the gradient of the stage's inputs, W that of its weights.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that prints so."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise MeshError(f"an action is stage, one of F B I W, and micro-batch, such as 1F0; got {text!r}")
        return cls(int(found[1]), found[2], int(found[3]))


class ActionSpan(NamedTuple):
    """An action with its time in a simulation."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class PipelineSchedule:
    """The actions of each lane, in order. A lane is a set of ranks; ``lane_of`` has the lane of each stage.

    ``in_flight`` is the most micro-batches of which a lane holds activations that the schedule promises, by lane; of a
    lane with several stages each counts.
    """

    name: str
    lanes: tuple[tuple[Action, ...], ...]
    lane_of: tuple[int, ...]
    microbatches: int
    in_flight: tuple[int, ...]

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, lane)) for lane in self.lanes)

    @classmethod
    def parse(cls, text: str, name: str = "own") -> PipelineSchedule:
        """A schedule from its text: a line for each lane. What it promises is what it does."""
        lanes = tuple(tuple(Action.parse(word) for word in line.split()) for line in text.strip().splitlines())
        lane_of = {action.stage: number for number, lane in enumerate(lanes) for action in lane}
        if sorted(lane_of) != list(range(len(lane_of))):
            raise MeshError(f"stages count from 0 without a gap; the schedule has {sorted(lane_of)}")
        count = 1 + max(action.microbatch for lane in lanes for action in lane)
        order = tuple(lane_of[stage] for stage in range(len(lane_of)))
        own = cls(name, lanes, order, count, (0,) * len(lanes))
        return cls(name, lanes, order, count, own.held)

    @property
    def stages(self) -> int:
        """How many stages there are, of all lanes."""
        return len(self.lane_of)

    @cached_property
    def splits(self) -> bool:
        """Has it backward in two halves?"""
        return any(action.kind == WEIGHT for lane in self.lanes for action in lane)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The most forwards of each lane whose activations are held at once."""
        return tuple(_most_held(lane) for lane in self.lanes)

    def check(self) -> None:
        """Raise MeshError unless every action is there once, none waits for ever, and lanes hold what was promised."""
        ends = (INPUT, WEIGHT) if self.splits else (BACKWARD,)
        wanted = {
            Action(s, k, m) for s in range(self.stages) for k in (FORWARD, *ends) for m in range(self.microbatches)
        }
        actions = [action for lane in self.lanes for action in lane]
        wrong = wanted.symmetric_difference(actions) or {a for a in actions if actions.count(a) > 1}
        if wrong:
            raise MeshError(f"schedule {self.name}: {min(wrong)} is missing, twice or not of it")
        for number, lane in enumerate(self.lanes):
            astray = next((action for action in lane if self.lane_of[action.stage] != number), None)
            if astray is not None:
                raise MeshError(f"schedule {self.name}: {astray} is in lane {number}, and its stage is not")
            if self.held[number] > self.in_flight[number]:
                raise MeshError(
                    f"schedule {self.name}: lane {number} holds {self.held[number]} micro-batches at once, and "
                    f"{self.in_flight[number]} are promised"
                )
        self.simulate()

    def in_order(self, stage: int) -> bool:
        """Do the forwards of a stage run in the order of their micro-batches?"""
        lane = self.lanes[self.lane_of[stage]]
        numbers = [action.microbatch for action in lane if action[:2] == (stage, FORWARD)]
        return numbers == sorted(numbers)

    def simulate(
        self,
        seconds: Seconds | Callable[[Action], float] | None = None,
        between: float | Callable[[Action], float] = 0.0,
    ) -> list[list[ActionSpan]]:
        """When each action runs if actions of a kind take so long, and results ``between`` seconds to the next lane.

        Both may also be functions: the seconds of an action, and those for which what it waits for travels. Raises
        MeshError that names the actions that wait for each other for ever.
        """
        takes = seconds if callable(seconds) else _by_kind(seconds)
        travels = between if callable(between) else lambda action: between
        done: dict[Action, float] = {}
        places, now = [0] * len(self.lanes), [0.0] * len(self.lanes)
        spans: list[list[ActionSpan]] = [[] for _ in self.lanes]
        moved = True
        while moved:
            moved = False
            for lane, actions in enumerate(self.lanes):
                while places[lane] < len(actions):
                    action = actions[places[lane]]
                    needs = self.needs(action)
                    if any(need not in done for need in needs):
                        break
                    ready = [done[n] + (travels(action) if self.lane_of[n.stage] != lane else 0.0) for n in needs]
                    begin = max([now[lane], *ready])
                    now[lane] = done[action] = begin + takes(action)
                    spans[lane].append(ActionSpan(action, begin, now[lane]))
                    places[lane] += 1
                    moved = True
        stuck = [actions[place] for actions, place in zip(self.lanes, places, strict=True) if place < len(actions)]
        if stuck:
            waits = ", ".join(f"{a} for {next(n for n in self.needs(a) if n not in done)}" for a in stuck)
            raise MeshError(f"schedule {self.name}: lanes wait for each other for ever: {waits}")
        return spans

    def needs(self, action: Action) -> list[Action]:
        """What must be done before an action, each stage taking from the one before it."""
        stage, kind, microbatch = action
        back = INPUT if self.splits else BACKWARD
        if kind == FORWARD:
            return [Action(stage - 1, FORWARD, microbatch)] if stage else []
        if kind == WEIGHT:
            return [Action(stage, INPUT, microbatch)]
        later = [Action(stage + 1, back, microbatch)] if stage + 1 < self.stages else []
        return [Action(stage, FORWARD, microbatch), *later]

    def bubble(self, seconds: Seconds | None = None, between: float = 0.0) -> float:
        """The share of the lanes' time in which they wait, in :meth:`simulate`."""
        return idle_share(self.simulate(seconds, between))

    def chart(self, seconds: Seconds | None = None, width: int = 4) -> str:
        """A line for each lane; what runs at the same time stands in the same column."""
        spans = self.simulate(seconds)
        unit = min(span.end - span.begin for lane in spans for span in lane)
        lines = []
        for number, lane in enumerate(spans):
            cells = ["." * (width - 1)] * round(max(s[-1].end for s in spans if s) / unit)
            for span in lane:
                for place in range(round(span.begin / unit), round(span.end / unit)):
                    cells[place] = str(span.action)[: width - 1].ljust(width - 1)
            lines.append(f"lane {number}  " + " ".join(cells))
        return "\n".join(lines)


def _by_kind(seconds: Seconds | None) -> Callable[[Action], float]:
    cost = {FORWARD: 1.0, BACKWARD: 2.0, INPUT: 1.0, WEIGHT: 1.0, **(seconds or {})}
    return lambda action: cost[action.kind]


def idle_share(spans: Sequence[Sequence[ActionSpan]]) -> float:
    """The share of time that lanes wait until the last of them is done."""
    end = max(lane[-1].end for lane in spans if lane)
    busy = sum(span.end - span.begin for lane in spans for span in lane)
    return 1 - busy / (end * len(spans))


def _most_held(lane: Sequence[Action]) -> int:
    last = WEIGHT if any(action.kind == WEIGHT for action in lane) else BACKWARD
    held = most = 0
    for action in lane:
        held += (action.kind == FORWARD) - (action.kind == last)
        most = max(most, held)
    return most
