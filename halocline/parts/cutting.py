"""Where to cut a recorded model into stages: dynamic programming over the chain of calls.

The slowest stage decides how fast a pipeline is. A stage's cost is the time of its calls and of what it receives. Of
all ways to cut the chain, the one whose largest cost is least is taken, among those that fit into memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ..errors import MeshError
from .actions import FORWARD, INPUT, WEIGHT, Action, PipelineSchedule
from .record import ModelRecord

Table = npt.NDArray[np.float64]
OPTIMIZER = 4.0  # times a parameter's bytes: itself, its gradient, two moments
PER_BYTE = 1e-9  # seconds to move a byte between stages
LATENCY = 5e-5


@dataclass(frozen=True)
class CallCosts:
    """Predicted seconds of each call, forward and backward of one micro-batch on the ranks of a stage."""

    seconds: tuple[float, ...]
    per_byte: float = PER_BYTE
    latency: float = LATENCY  # of each border that a stage receives from
    forward: tuple[float, ...] = ()  # of these seconds, those of forward; without, a third


@dataclass(frozen=True)
class StageForecast:
    """What is predicted of one stage, for one micro-batch."""

    first: str
    last: str
    calls: int
    seconds: float
    received: int  # bytes from earlier stages; as many go back as gradients
    parameters: int  # bytes
    activations: int  # bytes of all micro-batches in flight
    forward: float = 0.0  # of the seconds

    @property
    def memory(self) -> float:
        """Parameters with gradients and moments, and activations."""
        return OPTIMIZER * self.parameters + self.activations


@dataclass(frozen=True)
class StageCut:
    """A way to cut: ``begins`` are the numbers of the first calls of all stages but the first."""

    begins: tuple[int, ...]
    cost: float  # of the slowest stage, its receives included
    stages: tuple[StageForecast, ...] = field(default=())

    @property
    def imbalance(self) -> float:
        """The slowest stage's seconds over the mean."""
        seconds = [stage.seconds for stage in self.stages]
        return max(seconds) * len(seconds) / sum(seconds)

    def of_calls(self, record: ModelRecord) -> list[int]:
        """The stage of each call; MeshError for the record of another model than was cut."""
        for stage, begin in zip(self.stages, (0, *self.begins), strict=True):
            here = str(record.calls[begin]) if begin < len(record.calls) else "nothing"
            if here != stage.first:
                raise MeshError(
                    f"these stages are of another model: call {begin} was {stage.first}, and here it is {here}; cut "
                    "this model, with these shapes"
                )
        return [sum(call.number >= begin for begin in self.begins) for call in record.calls]

    def explain(self) -> str:
        """A line for each stage."""
        lines = [f"{len(self.stages)} stages; the slowest takes {self.imbalance:.2f} of the mean"]
        for number, stage in enumerate(self.stages):
            lines.append(
                f"stage {number}: {stage.calls} calls, {stage.first} to {stage.last}: {1e3 * stage.seconds:.2f} ms, "
                f"{stage.memory / 2**20:.1f} MiB, receives {stage.received / 2**20:.2f} MiB a micro-batch"
            )
        return "\n".join(lines)


def step_seconds(
    schedule: PipelineSchedule, cut: StageCut, per_byte: float = PER_BYTE, latency: float = LATENCY
) -> float:
    """Predicted seconds of all micro-batches through the stages of a cut, without sums of gradients."""
    stages = cut.stages

    def takes(action: Action) -> float:
        stage = stages[action.stage]
        back = stage.seconds - stage.forward
        return stage.forward if action.kind == FORWARD else back / 2 if action.kind in (INPUT, WEIGHT) else back

    def travels(action: Action) -> float:
        border = action.stage if action.kind == FORWARD else action.stage + 1
        return latency + per_byte * stages[border].received if action.kind != WEIGHT else 0.0

    return max(lane[-1].end for lane in schedule.simulate(takes, travels) if lane)


class CutTables:
    """Costs and memory of every interval of calls, by its first call and the call after its last."""

    def __init__(self, record: ModelRecord, costs: CallCosts) -> None:
        self.record, count = record, len(record.calls)
        self.starts: Table = np.concatenate([[0.0], np.cumsum(costs.seconds)])
        forward = costs.forward or tuple(seconds / 3 for seconds in costs.seconds)
        self._forward: Table = np.concatenate([[0.0], np.cumsum(forward)])
        arrives, borders = np.zeros((count + 1, count + 2)), np.zeros((count + 1, count + 2))
        for value, reads in _reads(record).items():
            made, size = record.values[value].made, record.values[value].bytes
            before = made
            for read in reads:  # of intervals that begin after it was made or last read
                arrives[before + 1 : read + 1, read + 1] += size
                borders[before + 1 : read + 1, read + 1] += 1
                before = read
        self.received: Table = np.cumsum(arrives, axis=1)[:, : count + 1]
        needed = np.cumsum(borders, axis=1)[:, : count + 1] > 0
        seconds = self.starts[None, :] - self.starts[:, None]
        self.cost: Table = seconds + costs.per_byte * 2 * self.received + costs.latency * needed
        self.allowed = np.ones(count + 1, dtype=bool)
        for together in record.together:
            self.allowed[min(together) + 1 : max(together) + 1] = False
        made_bytes = [_new_bytes(record, call) for call in range(count)]
        self.activations: Table = np.concatenate([[0.0], np.cumsum(made_bytes)])
        self._first_use = _first_uses(record)

    def parameters(self, begin: int, end: int) -> int:
        """Bytes of the parameters that an interval reads."""
        names = self.record.parameters_of(self.record.calls[begin:end])
        return sum(self._first_use[name] for name in names if name in self._first_use)

    def forecast(self, begin: int, end: int, in_flight: int) -> StageForecast:
        """What is predicted of an interval."""
        calls, held = self.record.calls, self.activations[end] - self.activations[begin]
        return StageForecast(
            str(calls[begin]), str(calls[end - 1]), end - begin, float(self.starts[end] - self.starts[begin]),
            int(self.received[begin, end]), self.parameters(begin, end), int(held) * in_flight,
            float(self._forward[end] - self._forward[begin]),
        )  # fmt: skip


def best_cut(
    record: ModelRecord, costs: CallCosts, stages: int, in_flight: Sequence[int], memory: float | None = None
) -> StageCut:
    """The cut into ``stages`` whose slowest stage is fastest; MeshError where none fits into ``memory`` bytes a rank.

    ``in_flight``: micro-batches that each stage holds.
    """
    tables = CutTables(record, costs)
    count = len(record.calls)
    best = np.full((stages + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    came = np.zeros((stages + 1, count + 1), dtype=np.int64)
    places = np.flatnonzero(tables.allowed)
    for stage in range(stages):
        last = stage == stages - 1
        for end in [count] if last else places[places > stage]:
            starts = places[(places < end) & np.isfinite(best[stage, places])]
            if not len(starts):
                continue
            worst = np.maximum(best[stage, starts], tables.cost[starts, end])
            for choice in np.argsort(worst, kind="stable"):
                begin = int(starts[choice])
                if memory is None or tables.forecast(begin, int(end), in_flight[stage]).memory <= memory:
                    best[stage + 1, end], came[stage + 1, end] = worst[choice], begin
                    break
    if not np.isfinite(best[stages, count]):
        raise MeshError(_unfit(tables, stages, memory))
    ends = [count]
    for stage in range(stages, 0, -1):
        ends.insert(0, int(came[stage, ends[0]]))
    pairs = list(pairwise(ends))
    made = tuple(tables.forecast(a, b, in_flight[number]) for number, (a, b) in enumerate(pairs))
    return StageCut(tuple(ends[1:-1]), float(best[stages, count]), made)


def _unfit(tables: CutTables, stages: int, memory: float | None) -> str:
    if memory is None:
        return f"the model has too few places to cut for {stages} stages: {int(tables.allowed.sum()) - 2}"
    return (
        f"no cut into {stages} stages fits into {memory / 2**20:.1f} MiB a rank; take more stages, more ranks inside "
        "each, smaller micro-batches, or a schedule that holds fewer"
    )


def _reads(record: ModelRecord) -> Mapping[int, list[int]]:
    """The calls that read each made value, in order."""
    found: dict[int, list[int]] = {}
    for call in record.calls:
        for value in call.reads:
            if record.values[value].made >= 0:
                found.setdefault(value, []).append(call.number)
    return found


def _new_bytes(record: ModelRecord, call: int) -> int:
    """Bytes of memory that a call makes and backward may want."""
    reads = {record.values[value].memory for value in record.calls[call].reads}
    made = {record.values[v].memory: record.values[v] for v in record.calls[call].makes}
    return sum(value.bytes for memory, value in made.items() if memory not in reads and value.requires_grad)


def _first_uses(record: ModelRecord) -> dict[str, int]:
    return {value.name: value.bytes for value in record.values if value.kind == "parameter"}
