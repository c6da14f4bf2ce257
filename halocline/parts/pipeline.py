"""A model in stages on parts of the mesh: what ``hc.pipeline`` and ``hc.place`` return."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..distribute import distribute
from ..errors import MeshError
from ..layout import Layout
from ..random import same_state
from ..random.state import current
from ..reduction import ENGINE, same_weights
from ..reduction.owners import leaf_behind
from ..tree import tensors_in
from ..world import Label, Mesh
from ..world.tags import crossing_tag
from .actions import PipelineSchedule
from .borders import Border, Cuts, find_borders, shard_input
from .cutting import StageCut
from .executor import LaneExecutor, Microbatches
from .gradients import clip_gradients, sum_tied
from .part import PartOfModel, check_model, layout_for, put_back
from .record import ModelRecord, hooks_of, meta_copy, python_state, record_model, take_python_state
from .replay import StageProgram, used_up
from .stages import Staged, divide
from .state import optimizer_state, state_dict, take_optimizer_state, take_state

Loss = Callable[..., Tensor]
DivideCalls = Callable[[ModelRecord], list[int]]
Inputs = dict[int, Tensor]  # by value


class Prepared:
    """What a step of inputs of one signature needs."""

    def __init__(
        self, staged: Staged, executor: LaneExecutor | None, cuts: Sequence[Cuts], batched: list[bool]
    ) -> None:
        """``executor`` is None on ranks of no lane; ``batched`` says which tensors are divided into micro-batches."""
        self.staged, self.executor, self.cuts, self.batched = staged, executor, cuts, batched
        self.loss_dtype = staged.record.values[staged.record.loss].dtype

    def inputs_of(self, stage: int, tensors: Sequence[Tensor], microbatch: int, count: int, mesh: Mesh) -> Inputs:
        """What a stage reads of the whole batch ``tensors``, in one of ``count`` micro-batches, cut over its mesh."""
        return {
            number: shard_input(
                _slice(tensors[place], microbatch, count) if self.batched[place] else tensors[place],
                self.cuts[place], mesh,
            )
            for place, number in enumerate(self.staged.record.inputs)
            if number in self.staged.stages[stage].inputs
        }  # fmt: skip


class PipelinedModel:
    """Made by :func:`halocline.pipeline` and :func:`halocline.place`, by all ranks together.

    ``step(inputs, targets)`` is forward and backward of a batch; then the ``parameters()`` of each rank have
    their gradients.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, example: tuple[Any, Any], meshes: Sequence[Mesh],
        schedule: PipelineSchedule, divide_calls: DivideCalls, cuts: Sequence[Cuts], layout: Layout,
        batch_statistics: str,
    ) -> None:  # fmt: skip
        """``meshes`` are those of the lanes."""
        check_model(model)
        _check_apart(meshes)
        self.model, self.schedule, self.meshes = model, schedule, tuple(meshes)
        self._loss, self._divide, self._cuts, self._statistics = loss, divide_calls, tuple(cuts), batch_statistics
        self._world = meshes[0].world.outermost
        self._world.engines += 1
        self._key, self._steps = f"pipeline {self._world.engines}", itertools.count()
        self._device = next(model.parameters()).device
        self.lane = next((lane for lane, mesh in enumerate(meshes) if mesh.is_member), None)
        same_state(self._world)
        tensors = [*model.parameters(), *model.buffers()]
        same_weights([tensor.detach() for tensor in tensors], self._world)
        self._meta = meta_copy(model)
        self._modules = list(model.named_modules())
        self._loss_modules = [(f"loss {n}", m) for n, m in loss.named_modules()] if isinstance(loss, nn.Module) else []
        staged = self._record(*_batch_of(example))
        self._names = self._owned(staged)
        self._layouts = [layout_for(PartOfModel(self._meta, names), self._meta, layout) for names in self._names]
        self.part = PartOfModel(model, self._names[self.lane] if self.lane is not None else ())
        if self.lane is not None:
            distribute(self.part, meshes[self.lane], layout=self._layouts[self.lane], batch_statistics=batch_statistics)
        put_back(model, self.part)
        self._prepared: dict[Any, Prepared] = {}
        self._piles = False  # whether gradients have piled up since the last step that averaged
        self._hooks, self._frozen = hooks_of(self._modules), _frozen(self.part)
        self._prepare(*_batch_of(example), staged)
        self.in_flight = 0  #: the most micro-batches whose activations this rank held in the last step

    @property
    def cut(self) -> StageCut | None:
        """What ``stages="auto"`` chose, with its prediction."""
        return getattr(self._divide, "cut", None)

    # A step ----------------------------------------------------------------------------------------------------------

    def step(self, inputs: Any, targets: Any = (), *, average: bool = True, scale: float = 1.0) -> Tensor:
        """Forward and backward of all micro-batches; the mean of their losses, on every rank.

        ``inputs`` (one tensor, or a tuple of the model's arguments) and ``targets`` are whole batches, on every rank;
        ranks of stages that do not read one may bring it on the meta device. With ``average=False`` gradients pile up
        on each rank, until a step that averages. ``scale`` multiplies the loss in backward.
        """
        inputs, targets = _batch_of((inputs, targets))
        prepared, tensors = self._prepare(inputs, targets), tensors_in((inputs, targets))
        self._check_flow(tensors)
        record, count = prepared.staged.record, self.schedule.microbatches
        key, losses = f"{self._key}/{next(self._steps)}", list[Tensor]()
        self._begin_pile()
        if self.lane is not None and prepared.executor is not None:
            state, mesh = current(), self.meshes[self.lane]
            batch = Microbatches(
                key, lambda microbatch, stage: prepared.inputs_of(stage, tensors, microbatch, count, mesh),
                state.seed, state.counter, record.draws, scale / count,
            )  # fmt: skip
            with self.part.__dict__[ENGINE].paused(), torch.enable_grad():
                ran = prepared.executor.run(batch, self.part.tensors())
            losses, self.in_flight = ran.losses, ran.in_flight
        used_up(count * record.draws)
        if average:
            self._average(key)
        return self._tell_loss(losses, prepared, key)

    def _check_flow(self, tensors: Sequence[Tensor]) -> None:
        """Refuse gradients that the record does not know of: they would end at the borders between stages."""
        if any(tensor.requires_grad for tensor in tensors):
            raise MeshError("an input or target requires a gradient, of which each stage would make its part alone; "
                            "give the pipeline x.detach()")  # fmt: skip
        thawed = next((name for name, parameter in self._frozen.items() if parameter.requires_grad), None)
        if thawed is not None:
            raise MeshError(f"{thawed} required no gradient when the pipeline was made, and does now: gradients would "
                            "not reach all of its stages; make a new pipeline")  # fmt: skip

    def _begin_pile(self) -> None:
        """What earlier steps have left of a shared parameter is the same sum on all of its lanes: the first one keeps
        it, to which :func:`sum_tied` adds what comes now."""
        if not self._piles:
            self._piles = True
            for name, lanes in self._tied.items():
                parameter = self._own(name)
                if parameter is not None and self.lane != lanes[0]:
                    leaf_behind(parameter).grad = None

    def _average(self, key: str) -> None:
        """Gradients become means over the ranks of each stage, and sums over the stages that share a parameter."""
        if self.lane is not None and self.meshes[self.lane].size > 1:  # one rank's gradients are means already
            leaves = [leaf_behind(parameter) for parameter in self.part.parameters()]
            came = [leaf for leaf in leaves if leaf.grad is not None]
            if came:  # the engine averages what is there when a backward ends: this one adds nothing
                torch.autograd.backward(came, [_nothing_for(leaf) for leaf in came])
        sum_tied(self._tied, self.meshes, self.part, self.lane, self._layouts, self._meta, key)
        self._piles = False

    def _tell_loss(self, losses: list[Tensor], prepared: Prepared, key: str) -> Tensor:
        """The mean over micro-batches, from the ranks that have the losses to all others."""
        stage, dtype = prepared.staged.loss_stage, prepared.loss_dtype
        home = self.meshes[self.schedule.lane_of[stage]].members
        others = [rank for rank in range(self._world.size) if rank not in home]
        label = Label("the loss of a pipeline", f"stage {stage}", "control")
        tag = crossing_tag(f"{key}/loss", 0, 1, dtype)
        if self._world.rank in home:
            mean = torch.stack([loss.reshape(()) for loss in losses]).mean()
            mine = [rank for place, rank in enumerate(others) if home[place % len(home)] == self._world.rank]
            self._world.begin_tagged([(rank, mean.reshape(1).to(dtype), tag) for rank in mine], [], label).wait()
            return mean
        source = home[others.index(self._world.rank) % len(home)]
        buffer = torch.empty(1, dtype=dtype, device=self._device)
        return self._world.begin_tagged([], [(source, buffer, tag)], label).wait()[0].reshape(())

    # What is prepared once for each signature -------------------------------------------------------------------------

    def _prepare(self, inputs: Any, targets: Any, staged: Staged | None = None) -> Prepared:
        """What a step of tensors like these needs; made by all ranks together when they are the first of their kind."""
        if hooks_of(self._modules) != self._hooks:
            raise MeshError("hooks of the model's modules have changed since the pipeline was made, and the record of "
                            "its calls does not have them; register them before hc.pipeline")  # fmt: skip
        flags = tuple(self._plain_state().items())
        tensors = tensors_in((inputs, targets))
        on = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
        autocast = None if on is None else (on, torch.get_autocast_dtype(on))
        key = (tuple((tuple(t.shape), t.dtype) for t in tensors), flags, autocast)
        if key not in self._prepared:
            self._prepared[key] = self._prepared_for(inputs, targets, staged or self._record(inputs, targets))
        return self._prepared[key]

    def _plain_state(self) -> dict[tuple[str, str], Any]:
        """Plain attributes of the model's modules, and of a loss that is a module: a change needs another record."""
        return python_state((*self._modules, *self._loss_modules))

    def _record(self, inputs: Any, targets: Any) -> Staged:
        """The calls of one micro-batch on shapes, divided into stages."""
        take_python_state(self._meta, python_state(self._modules))
        count, batched = self.schedule.microbatches, _batched(tensors_in((inputs, targets)))
        if not batched or not any(batched):
            raise MeshError("a pipeline takes a batch whose first dim it divides into micro-batches")
        size = tensors_in((inputs, targets))[0].shape[0]
        if size % count:
            raise MeshError(f"a batch of {size} does not divide into {count} equal micro-batches")
        flags = iter(batched)

        def small(value: Any) -> Any:
            return tuple(_slice(v, 0, count) if next(flags) else v for v in value)

        record = record_model(self._meta, self._loss, small(inputs), small(targets), self._device)
        staged = divide(record, self._divide(record))
        if len(staged.stages) != self.schedule.stages:
            raise MeshError(f"the model was cut into {len(staged.stages)} stages, and the schedule "
                            f"{self.schedule.name} has {self.schedule.stages}")  # fmt: skip
        return staged

    def _prepared_for(self, inputs: Any, targets: Any, staged: Staged) -> Prepared:
        """Borders between the stages, and this rank's programs."""
        for stage, call in staged.writing().items():
            if not self.schedule.in_order(stage):
                raise MeshError(f"{call} writes to a buffer, and schedule {self.schedule.name} runs the forwards of "
                                f"stage {stage} in another order of micro-batches than one rank")  # fmt: skip
        tensors = tensors_in((inputs, targets))
        cuts = [*self._cuts, *({} for _ in tensors)][: len(tensors)]
        batched, count = _batched(tensors), self.schedule.microbatches
        shown = {
            number: ((_slice(t, 0, count) if batched[place] else t).detach().to("meta"), cuts[place])
            for place, (number, t) in enumerate(zip(staged.record.inputs, tensors, strict=True))
        }
        if self._owned(staged) != self._names and any(
            not names <= mine for names, mine in zip(self._owned(staged), self._names, strict=True)
        ):
            raise MeshError("inputs of this shape take other calls through the model, which need parameters of other "
                            "stages; make a pipeline of its own for them")  # fmt: skip
        meshes = [self.meshes[lane] for lane in self.schedule.lane_of]
        parts = [PartOfModel(self._meta, names) for names in self._names]
        layouts = [self._layouts[lane] for lane in self.schedule.lane_of]
        borders = find_borders(
            staged, meshes, [parts[lane] for lane in self.schedule.lane_of], shown, layouts, self._statistics
        )
        self._tied = self._tied_over_lanes()
        if self.lane is None:
            return Prepared(staged, None, cuts, batched)
        return Prepared(staged, self._executor(self.lane, staged, borders), cuts, batched)

    def _executor(self, lane: int, staged: Staged, borders: Sequence[Border]) -> LaneExecutor:
        """Runs the stages of this rank's lane."""
        mine = [s for s in staged.stages if self.schedule.lane_of[s.number] == lane]
        loss = (staged.loss_stage, staged.record.loss)
        programs = {
            s.number: StageProgram(
                staged.record, s, self.meshes[lane], self._statistics, (loss[1],) if s.number == loss[0] else ()
            )
            for s in mine
        }
        return LaneExecutor(self.schedule, lane, programs, borders, loss, self._world, self._device)

    def _owned(self, staged: Staged) -> list[frozenset[str]]:
        """Names of the parameters and buffers of each lane. Those that nothing reads are the first lane's."""
        lanes = [set[str]() for _ in self.meshes]
        for stage in staged.stages:
            lanes[self.schedule.lane_of[stage.number]] |= stage.tensors
        every = {name for name, _ in (*self._meta.named_parameters(), *self._meta.named_buffers())}
        lanes[0] |= every - set().union(*lanes)
        return [frozenset(lane) for lane in lanes]

    def _tied_over_lanes(self) -> dict[str, tuple[int, ...]]:
        """Parameters that several lanes hold, with those lanes."""
        named = dict(self._meta.named_parameters())
        lanes = {name: tuple(n for n, names in enumerate(self._names) if name in names) for name in named}
        return {name: of for name, of in sorted(lanes.items()) if len(of) > 1 and named[name].requires_grad}

    def _own(self, name: str) -> Tensor | None:
        return self.part.tensors().get(name)

    # Parameters ------------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank's stages: hand them to an optimizer."""
        return self.part.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their names in the model."""
        return self.part.named_parameters()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages so that their common norm is at most ``max_norm``; returns the norm.

        By all ranks together.
        """
        mesh = None if self.lane is None else self.meshes[self.lane]
        once = {name for name, lanes in self._tied.items() if lanes[0] != self.lane}
        return clip_gradients(self.part, mesh, once, self._world, max_norm, norm_type)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of all stages, whole, on every rank, as the model on one device has them. By all ranks
        together."""
        return state_dict(self._meta, self.part, self.lane, self.meshes, self._names)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the tensors of this rank's stages from a state dict of the whole model."""
        take_state(self.part, state)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        """The optimizer's state of all stages, whole, on every rank, by parameter name. By all ranks together."""
        return optimizer_state(self.part, self.lane, self.meshes, self._names, self._meta, optimizer)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Take the state of this rank's parameters. The other pipeline may have had other stages and cuts."""
        take_optimizer_state(self.part, optimizer, state)


def _frozen(part: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that take no gradient."""
    return {name: parameter for name, parameter in part.named_parameters() if not parameter.requires_grad}


def _nothing_for(leaf: Tensor) -> Tensor:
    """A gradient that adds nothing to that of a leaf, and keeps a sparse one sparse."""
    assert leaf.grad is not None
    if not leaf.grad.is_sparse:
        return leaf.new_zeros(()).expand_as(leaf)
    rows, values = leaf.new_zeros((1, 0), dtype=torch.int64), leaf.new_zeros((0, *leaf.shape[1:]))
    return torch.sparse_coo_tensor(rows, values, leaf.shape, check_invariants=False)


def _batch_of(batch: tuple[Any, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Inputs and targets as tuples of tensors."""
    both = []
    for value in batch:
        values = tuple(value) if isinstance(value, tuple | list) else (value,)
        wrong = next((each for each in values if not isinstance(each, Tensor)), None)
        if wrong is not None:
            raise MeshError(f"a pipeline takes tensors, or tuples of them, as inputs and targets; got a "
                            f"{type(wrong).__name__}")  # fmt: skip
        both.append(values)
    return both[0], both[1]


def first_microbatch(batch: tuple[Any, Any], count: int) -> list[Tensor]:
    """The tensors of the first of ``count`` micro-batches."""
    tensors = tensors_in(_batch_of(batch))
    return [_slice(t, 0, count) if batched else t for t, batched in zip(tensors, _batched(tensors), strict=True)]


def _batched(tensors: Sequence[Tensor]) -> list[bool]:
    """Which tensors have the batch as their first dim: those of the first one's size there."""
    return [t.ndim > 0 and t.shape[0] == tensors[0].shape[0] for t in tensors]


def _slice(tensor: Tensor, number: int, count: int) -> Tensor:
    size = tensor.shape[0] // count
    return tensor[number * size : (number + 1) * size]


def _check_apart(meshes: Sequence[Mesh]) -> None:
    for one, other in itertools.combinations(meshes, 2):
        if set(one.members) & set(other.members):
            raise MeshError(f"two parts of the mesh share ranks ({one.members} and {other.members}); take parts that "
                            "are the same or have none in common")  # fmt: skip
