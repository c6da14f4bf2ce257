"""Which part of a model on which kind of ranks: chosen by measured times, memory and price (as HeterPS does)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..errors import MeshError
from ..layout import Layout
from ..sizes import bytes_from, size_text
from ..world import Mesh
from .actions import PipelineSchedule
from .automatic import GivenCut, measured_costs
from .borders import Cuts
from .cutting import LATENCY, OPTIMIZER, PER_BYTE, CallCosts, CutTables, StageCut, step_seconds
from .pipeline import Loss, PipelinedModel, first_microbatch
from .record import ModelRecord, meta_copy, record_model
from .schedules import make_schedule

CHOOSE_BY = ("time", "price")
HOUR = 3600.0


@dataclass(frozen=True)
class RankKind:
    """Equal ranks: their part of the mesh, the memory of each ("2GiB"), and the price of each for an hour."""

    mesh: Mesh
    memory: str | int | None = None
    price: float = 1.0


@dataclass(frozen=True)
class KindChoice:
    """One way to lay a model on kinds of ranks, with what it is predicted to take."""

    names: tuple[str, ...]  # of the kinds of its stages
    cut: StageCut
    seconds: float  # of a step
    price: float  # of a thousand steps
    memory: tuple[int, ...]  # bytes of a rank, by stage
    fits: bool

    def __str__(self) -> str:
        where = ", then ".join(
            f"{stage.first} to {stage.last} on {name} ({size_text(memory)} a rank)"
            for name, stage, memory in zip(self.names, self.cut.stages, self.memory, strict=True)
        )
        told = "" if self.fits else "; it does not fit"
        return f"{where}: {1e3 * self.seconds:.3g} ms a step, {self.price:.3g} for a thousand{told}"


class PlacedByCost(PipelinedModel):
    """What :func:`place_by_cost` returns. ``choices`` are all that were compared, the taken one first."""

    choices: tuple[KindChoice, ...] = ()

    def explain(self) -> str:
        """A line for each choice."""
        return "\n".join(map(str, self.choices))


def place_by_cost(
    model: nn.Module,
    kinds: Mapping[str, RankKind],
    *,
    loss: Loss,
    example: tuple[Any, Any],
    microbatches: int = 1,
    by: str = "time",
    only: Sequence[str] | None = None,
    cuts: Sequence[Cuts] = (),
    layout: Layout | None = None,
    batch_statistics: str = "global",
) -> PlacedByCost:
    """The model on one kind of ranks, or its beginning on one and its end on another: whatever costs least and fits.

        mesh = hc.Mesh(data=9)
        kinds = {"cpu": RankKind(mesh["data", 0:8], "4GiB", price=0.05), "gpu": RankKind(mesh["data", 8:9], price=2.0)}
        model = place_by_cost(ClickNet(), kinds, loss=criterion, example=(x, y), microbatches=4,
                              layout={"table.weight": {0: "data"}}, cuts=[{0: "data"}] * 2)
        print(model.explain())

    The first rank of each kind times every call of a micro-batch; ranks of a kind share the work. ``by`` "time" takes
    the fastest step, "price" the cheapest. ``only`` names the kinds in their order, such as ("cpu",), in place of a
    choice among all. Parameters that ``layout`` cuts take their share of memory. Else as :func:`halocline.place`. By
    all ranks together.
    """
    if by not in CHOOSE_BY:
        raise MeshError(f"by is {' or '.join(CHOOSE_BY)}, not {by!r}")
    if not kinds or not all(isinstance(kind, RankKind) for kind in kinds.values()):
        raise MeshError(f"place_by_cost takes {{name: RankKind(mesh, memory, price)}}; got {kinds!r}")
    batch = first_microbatch(example, microbatches)
    count = len(example[0]) if isinstance(example[0], tuple | list) else 1
    device = next(model.parameters()).device
    record = record_model(meta_copy(model), loss, tuple(batch[:count]), tuple(batch[count:]), device)
    costs = {
        name: measured_costs(
            record, model, batch, kind.mesh.world.outermost, kind.mesh.size, kind.mesh.members[0], True
        )
        for name, kind in kinds.items()
    }
    orders = [tuple(only)] if only is not None else _orders(list(kinds))
    unknown = [name for order in orders for name in order if name not in kinds]
    if unknown:
        raise MeshError(f"no kind of ranks is called {unknown[0]!r}; they are {', '.join(kinds)}")
    found = [_best_of(record, order, kinds, costs, microbatches, layout or {}, by) for order in orders]
    choices = sorted(found, key=lambda choice: _rank(choice, by))
    taken = choices[0]
    if not taken.fits and only is None:
        raise MeshError("no kind of ranks has the memory for this model, and no two of them: " + str(taken))
    meshes = [kinds[name].mesh for name in taken.names]
    schedule = _schedule(len(meshes), microbatches)
    divide: Callable[[ModelRecord], list[int]] = GivenCut(taken.cut)
    made = PlacedByCost(model, loss, example, meshes, schedule, divide, cuts, layout or {}, batch_statistics)
    made.choices = tuple(choices)
    return made


def _orders(names: list[str]) -> list[tuple[str, ...]]:
    """Each kind alone, and each two of them."""
    return [(name,) for name in names] + [(a, b) for a in names for b in names if a != b]


def _schedule(lanes: int, microbatches: int) -> PipelineSchedule:
    return make_schedule("1f1b", lanes, microbatches)


def _rank(choice: KindChoice, by: str) -> tuple[bool, float]:
    return not choice.fits, choice.seconds if by == "time" else choice.price


def _best_of(
    record: ModelRecord, order: tuple[str, ...], kinds: Mapping[str, RankKind], costs: Mapping[str, CallCosts],
    microbatches: int, layout: Layout, by: str,
) -> KindChoice:  # fmt: skip
    """The best place to cut between these kinds."""
    tables = [CutTables(record, costs[name]) for name in order]
    end = len(record.calls)
    places = [n for n in range(1, end) if tables[0].allowed[n]] if len(order) == 2 else []
    cuts: list[tuple[int, ...]] = [(0, begin, end) for begin in places] or [(0, end)]
    schedule = _schedule(len(order), microbatches)
    held = [schedule.in_flight[lane] for lane in range(len(order))]
    own, every = [kinds[name] for name in order], []
    for points in cuts:
        spans = list(pairwise(points))
        stages = tuple(table.forecast(*span, most) for table, span, most in zip(tables, spans, held, strict=True))
        dense = [_bytes(record, *span, layout, kind.mesh) for span, kind in zip(spans, own, strict=True)]
        memory = tuple(
            int(OPTIMIZER * size + stage.activations / kind.mesh.size)
            for (size, _), stage, kind in zip(dense, stages, own, strict=True)
        )
        cost = max(table.cost[span] for table, span in zip(tables, spans, strict=True))
        cut = StageCut(tuple(points[1:-1]), float(cost), stages)
        averaged = max(_sum_seconds(size, kind.mesh.size) for (_, size), kind in zip(dense, own, strict=True))
        seconds = step_seconds(schedule, cut) + averaged
        price = 1000 * seconds / HOUR * sum(kind.price * kind.mesh.size for kind in own)
        fits = all(used <= _room(kind) for kind, used in zip(own, memory, strict=True))
        every.append(KindChoice(order, cut, seconds, price, memory, fits))
    return min(every, key=lambda choice: _rank(choice, by))


def _room(kind: RankKind) -> float:
    return math.inf if kind.memory is None else float(bytes_from("memory", kind.memory))


def _bytes(record: ModelRecord, begin: int, end: int, layout: Layout, mesh: Mesh) -> tuple[float, int]:
    """Bytes of a rank's parameters in these calls, and of those of them that are averaged over the ranks."""
    held, averaged = 0.0, 0
    values = {value.name: value for value in record.values if value.kind == "parameter"}
    for name in record.parameters_of(record.calls[begin:end]) & set(values):
        axes = [axis for pattern, dims in layout.items() if fnmatchcase(name, pattern) for axis in dims.values()]
        parts = torch.Size([mesh.sizes.get(axis, 1) for axis in axes]).numel()
        held += values[name].bytes / parts
        averaged += values[name].bytes if parts == 1 else 0
    return held, averaged


def _sum_seconds(size: int, ranks: int) -> float:
    return 0.0 if ranks == 1 else LATENCY + 2 * (ranks - 1) / ranks * size * PER_BYTE
