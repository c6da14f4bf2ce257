"""The schedules that are built in, each as a list of actions for each lane."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..errors import MeshError, did_you_mean
from .actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, PipelineSchedule


def gpipe(lanes: int, microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards; every micro-batch is in flight."""
    rows = [
        [Action(lane, kind, m) for kind in (FORWARD, BACKWARD) for m in range(microbatches)] for lane in range(lanes)
    ]
    return _made("gpipe", rows, range(lanes), microbatches, [microbatches] * lanes)


def one_forward_one_backward(lanes: int, microbatches: int) -> PipelineSchedule:
    """Forward and backward in turn; of stage s at most ``stages - s`` micro-batches are in flight."""
    rows = []
    for lane in range(lanes):
        warm = min(microbatches, lanes - lane - 1)
        row = [Action(lane, FORWARD, m) for m in range(warm)]
        for m in range(microbatches):
            if warm + m < microbatches:
                row.append(Action(lane, FORWARD, warm + m))
            row.append(Action(lane, BACKWARD, m))
        rows.append(row)
    return _made("1f1b", rows, range(lanes), microbatches, [min(microbatches, lanes - lane) for lane in range(lanes)])


def interleaved(lanes: int, microbatches: int, rounds: int = 2) -> PipelineSchedule:
    """Each lane has ``rounds`` stages, lanes apart; micro-batches go through in groups of as many as there are lanes.

    The bubble is ``rounds`` times smaller, for as many more messages.
    """
    if microbatches % lanes:
        raise MeshError(
            f"interleaved: micro-batches go in groups of {lanes}, one for each lane; {microbatches} is no multiple of "
            f"{lanes}"
        )
    total, rows, promised = microbatches * rounds, [], []
    for lane in range(lanes):

        def at(kind: str, place: int, lane: int = lane) -> Action:
            turn = place // lanes % rounds
            stage = (turn if kind == FORWARD else rounds - 1 - turn) * lanes + lane
            return Action(stage, kind, place // (lanes * rounds) * lanes + place % lanes)

        warm = total if microbatches == lanes else min(total, (lanes - lane - 1) * 2 + (rounds - 1) * lanes)
        row = [at(FORWARD, place) for place in range(warm)]
        for place in range(total):
            if warm + place < total:
                row.append(at(FORWARD, warm + place))
            row.append(at(BACKWARD, place))
        rows.append(row)
        promised.append(min(total, warm + 1))
    return _made("interleaved", rows, [s % lanes for s in range(lanes * rounds)], microbatches, promised)


def zero_bubble(lanes: int, microbatches: int) -> PipelineSchedule:
    """Backward in halves: the gradient of inputs goes on at once, that of weights fills what would be waiting.

    No lane holds more micro-batches than there are lanes, as the first lane of 1F1B does (ZB-H1).
    """
    rows: list[list[Action]] = [[] for _ in range(lanes)]
    done: dict[Action, int] = {}
    counts = [dict.fromkeys((FORWARD, INPUT, WEIGHT), 0) for _ in range(lanes)]
    now = 0
    while any(count[WEIGHT] < microbatches for count in counts):
        chosen = []
        for lane, count in enumerate(counts):
            forward, back = count[FORWARD], count[INPUT]
            before, after = Action(lane - 1, FORWARD, forward), Action(lane + 1, INPUT, back)
            can_go_back = back < forward and (lane == lanes - 1 or done.get(after, now + 1) <= now)
            room = forward - count[WEIGHT] < lanes
            can_go_on = forward < microbatches and room and (lane == 0 or done.get(before, now + 1) <= now)
            # The last lane keeps the others supplied; a lane whose room is short gives it free first.
            if can_go_back:
                chosen.append(Action(lane, INPUT, back))
            elif can_go_on and forward - back < lanes - lane:
                chosen.append(Action(lane, FORWARD, forward))
            elif count[WEIGHT] < back:
                chosen.append(Action(lane, WEIGHT, count[WEIGHT]))
        now += 1
        for action in chosen:
            done[action] = now
            rows[action.stage].append(action)
            counts[action.stage][action.kind] += 1
    return _made("zero-bubble", rows, range(lanes), microbatches, [min(microbatches, lanes)] * lanes)


SCHEDULES: dict[str, Callable[..., PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}


def make_schedule(name: str, lanes: int, microbatches: int, rounds: int = 1) -> PipelineSchedule:
    """A built-in schedule by name; ``rounds`` stages for each lane, of which only interleaved takes more than one."""
    if name not in SCHEDULES:
        raise MeshError(
            f"no schedule is called {name!r}{did_you_mean(name, SCHEDULES)}; there are {', '.join(SCHEDULES)}"
        )
    if microbatches < 1:
        raise MeshError(f"a pipeline takes at least one micro-batch, not {microbatches}")
    if name == "interleaved":
        return interleaved(lanes, microbatches, rounds if rounds > 1 else 2)
    if rounds > 1:
        raise MeshError(f"{name}: one stage for each lane; several take schedule='interleaved'")
    return SCHEDULES[name](lanes, microbatches)


def _made(
    name: str, rows: list[list[Action]], lane_of: Iterable[int], microbatches: int, promised: list[int]
) -> PipelineSchedule:
    lanes = tuple(map(tuple, rows))
    made = PipelineSchedule(name, lanes, tuple(lane_of), microbatches, tuple(promised))
    made.check()
    return made
