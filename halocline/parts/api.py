"""``hc.pipeline`` and ``hc.place``: a model in stages on parts of the mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from ..errors import MeshError
from ..layout import Layout
from ..sizes import bytes_from
from ..world import Mesh, this_world
from .actions import PipelineSchedule
from .automatic import AutomaticCut, GivenCut
from .borders import Cuts
from .cutting import StageCut
from .pipeline import DivideCalls, Loss, PipelinedModel, first_microbatch
from .record import ModelRecord
from .schedules import make_schedule
from .stages import by_names, cut_before, cut_evenly

STRATEGIES = ("data", "model", "hybrid")


def pipeline(
    model: nn.Module,
    mesh: Mesh | None = None,
    *,
    loss: Loss,
    example: tuple[Any, Any],
    microbatches: int = 1,
    schedule: str | PipelineSchedule = "1f1b",
    stages: Sequence[str] | str | StageCut | None = None,
    memory: str | int | None = None,
    cuts: Sequence[Cuts] = (),
    layout: Layout | None = None,
    axis: str = "stage",
    rounds: int = 1,
    batch_statistics: str = "global",
    strategy: str | None = None,
    partitions: int | None = None,
    replicas: int | None = None,
) -> PipelinedModel:
    """The model in stages along an axis of the mesh; micro-batches go through them.

        mesh = hc.Mesh(stage=2, data=2, depth=2)                  # eight ranks: four for each stage
        pipe = hc.pipeline(UNet(), mesh, loss=criterion, example=(x, y), microbatches=8,
                           stages=["decoder"], cuts=[{0: "data", 2: "depth"}, {0: "data"}])
        optimizer = torch.optim.AdamW(pipe.parameters())
        loss = pipe.step(x, y)                                    # forward and backward; gradients are in .grad
        optimizer.step()

    Loss and gradients are those of one rank that adds up ``loss(model(x_m), y_m) / microbatches`` over
    micro-batches.
    Every rank builds the model; afterwards it holds the parameters of its stage alone. ``example`` has inputs and
    targets of a batch, of which shapes and dtypes count. The forward is recorded on them, loss included, as a list of
    torch calls; any value may be read by any later stage. What depends on values of tensors is refused.

    ``stages`` names the modules with whose first call a new stage begins; without, calls with parameters are
    divided evenly. "auto": rank 0 times each call, and the model is cut where the slowest stage is fastest, receives
    included, among the cuts whose stages fit into ``memory`` ("8GiB") a rank; ``pipe.cut.explain()`` tells. A cut
    that was chosen before (``pipe.cut``, or that of a plan) is taken as it is.
    ``schedule``: "gpipe", "1f1b", "interleaved" (``rounds`` stages on each lane of ranks), "zero-bubble", or a
    :class:`PipelineSchedule`. ``cuts`` has for each tensor of inputs and targets which dims are cut along which axes of
    a stage's ranks; ``layout`` cuts parameters as in ``hc.distribute``.

    ``strategy`` instead of a mesh: "data", "model", or "hybrid" with numbers of ``partitions`` (stages) and
    ``replicas``, whose product is the number of ranks; the batch is cut over replicas.
    """
    if strategy is not None:
        if mesh is not None:
            raise MeshError("hc.pipeline takes a mesh or a strategy, which makes its own mesh; leave one of them out")
        mesh, axis = _mesh_of(strategy, partitions, replicas), "stage"
        cuts = cuts or [{0: "data"}] * (len(_listed(example[0])) + len(_listed(example[1])))
    elif partitions is not None or replicas is not None:
        raise MeshError("partitions and replicas belong to strategy='hybrid' (or 'data', 'model')")
    if mesh is None:
        raise MeshError(
            "hc.pipeline takes a mesh with an axis of stages, such as hc.Mesh(stage=2, data=-1), or a strategy"
        )
    mesh.check_axis(axis)
    lanes = mesh.sizes[axis]
    made = _schedule(schedule, lanes, microbatches, rounds)
    if len(made.lanes) != lanes:
        raise MeshError(f"the schedule has {len(made.lanes)} lanes, and axis {axis!r} {lanes} ranks")
    if memory is not None and stages != "auto":
        raise MeshError("memory limits the stages that are cut automatically; give it with stages='auto'")
    divide_calls: DivideCalls = partial(cut_evenly, count=made.stages)
    if stages == "auto":
        held = [made.in_flight[lane] for lane in made.lane_of]
        limit = None if memory is None else float(bytes_from("memory", memory))
        batch = partial(first_microbatch, example, made.microbatches)
        divide_calls = AutomaticCut(model, batch, mesh.world.outermost, made.stages, held, limit, mesh.size // lanes)
    elif isinstance(stages, StageCut):
        if len(stages.stages) != made.stages:
            raise MeshError(f"the cut has {len(stages.stages)} stages, and the schedule {made.name} has {made.stages}")
        divide_calls = GivenCut(stages)
    elif isinstance(stages, str):
        raise MeshError(f"stages is a list of module names, or 'auto', not {stages!r}")
    elif stages is not None:
        divide_calls = partial(cut_before, names=list(stages))
    meshes = [mesh[axis, place] for place in range(lanes)]
    return PipelinedModel(model, loss, example, meshes, made, divide_calls, cuts, layout or {}, batch_statistics)


def place(
    model: nn.Module,
    parts: Mapping[str, Mesh],
    *,
    loss: Loss,
    example: tuple[Any, Any],
    microbatches: int = 1,
    schedule: str | PipelineSchedule = "gpipe",
    cuts: Sequence[Cuts] = (),
    layout: Layout | None = None,
    batch_statistics: str = "global",
) -> PipelinedModel:
    """Modules on parts of the mesh, by patterns of their names, in the order in which values flow.

        mesh = hc.Mesh(stage=2, data=2)
        parts = {"encoder": mesh["stage", 0], "decoder": mesh["stage", 1]}
        model = hc.place(Net(), parts, loss=criterion, example=(x, y))
        loss = model.step(x, y)

    What crosses from one part to another is moved, each element once, with its gradient on the way back; the meshes may
    have other axes and sizes. Calls outside the named modules run where the last of their operands is made. Else as
    :func:`pipeline`.
    """
    if not parts or not all(isinstance(mesh, Mesh) for mesh in parts.values()):
        raise MeshError(f"hc.place takes {{pattern: mesh}}, such as {{'encoder': mesh['stage', 0]}}; got {parts!r}")
    meshes = list(dict.fromkeys(parts.values()))
    lane_of = [meshes.index(mesh) for mesh in parts.values()]
    if lane_of != sorted(lane_of):
        raise MeshError(
            "hc.place: parts on one mesh stand next to each other, in the order in which the model runs them"
        )
    made = _schedule(schedule, len(meshes), microbatches, 1)

    def divide_calls(record: ModelRecord) -> list[int]:
        return [lane_of[part] for part in by_names(record, list(parts))]

    return PipelinedModel(model, loss, example, meshes, made, divide_calls, cuts, layout or {}, batch_statistics)


def _schedule(schedule: str | PipelineSchedule, lanes: int, microbatches: int, rounds: int) -> PipelineSchedule:
    if isinstance(schedule, PipelineSchedule):
        schedule.check()
        return schedule
    return make_schedule(schedule, lanes, microbatches, rounds)


def _mesh_of(strategy: str, partitions: int | None, replicas: int | None) -> Mesh:
    if strategy not in STRATEGIES:
        raise MeshError(f"strategy is one of {', '.join(STRATEGIES)}, not {strategy!r}")
    ranks = this_world().size
    if strategy == "hybrid" and (partitions is None and replicas is None):
        raise MeshError("strategy='hybrid' takes a number of partitions, or of replicas")
    partitions = {"data": 1, "model": partitions or -1, "hybrid": partitions or -1}[strategy]
    replicas = {"data": replicas or -1, "model": 1, "hybrid": replicas or -1}[strategy]
    if partitions == replicas == -1:
        partitions = ranks
    return Mesh(stage=partitions, data=replicas)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)
