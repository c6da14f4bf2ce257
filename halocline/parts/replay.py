"""One stage on its own ranks: its recorded calls run again on tiles, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..program.autocast import autocast_on_meta
from ..program.streaming.operations import Ref, filler
from ..random import reproducible
from ..random.state import State, current, swap
from ..reduction.owners import leaf_behind
from ..rules.annotate import remember_mesh
from ..rules.families.norm import STATISTICS
from ..tensor import ShardedTensor, Sharding, unwrap, wrap
from ..tree import map_tensors, tensors_in
from ..world import AVERAGED, Mesh, placement_of
from .record import ModelRecord, RecordedCall
from .stages import ModelStage


class CallSite(nn.Module):
    """Stands for the module that a recorded call ran in: errors, choices and batch norms look for it."""

    def __init__(self, path: str, mesh: Mesh, batch_statistics: str) -> None:
        super().__init__()
        self.__dict__["_halocline_path"] = path
        self.__dict__[STATISTICS] = batch_statistics
        remember_mesh(self, mesh)

    def forward(self, run: Callable[[], Any]) -> Any:
        """What the call returns."""
        return run()


@dataclass
class WeightUse:
    """A call that reads parameters: where its results stand in the graph, and a leaf of its own for each parameter."""

    results: list[GradientEdge]
    leaves: list[Tensor]
    parameters: list[Tensor]
    gradients: list[Tensor | None] = field(default_factory=list)


class StageRun:
    """One micro-batch in one stage: what backward needs."""

    def __init__(self) -> None:
        self.leaves: dict[int, Tensor] = {}  # received values that require a gradient: their tiles
        self.outputs: dict[int, Tensor] = {}  # sent values, and the loss: their tiles
        self.uses: list[WeightUse] = []
        self.passed: list[tuple[Tensor, Tensor]] = []  # parameters whose leaf a call returned as it is: leaf, parameter
        self.loss: Tensor | None = None

    def backward(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Add to the gradients of parameters; returns those of received values. The graph is freed."""
        outputs = {n: tile for n, tile in self.outputs.items() if n in gradients and tile.requires_grad}
        if outputs:
            torch.autograd.backward(list(outputs.values()), [gradients[n] for n in outputs])
        return {n: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for n, leaf in self.leaves.items()}

    def backward_inputs(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The gradients of received values; what those of parameters need is kept for :meth:`backward_weights`."""
        outputs = {n: tile for n, tile in self.outputs.items() if n in gradients and tile.requires_grad}
        edges = [edge for use in self.uses for edge in use.results]
        passed, self.passed = self.passed, []
        wanted: list[Any] = [*self.leaves.values(), *edges, *(leaf for leaf, _ in passed)]
        found: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if outputs and wanted:
            seeds = [gradients[n] for n in outputs]
            found = torch.autograd.grad(list(outputs.values()), wanted, seeds, retain_graph=True, allow_unused=True)
        rest = iter(found[len(self.leaves) :])
        for use in self.uses:
            use.gradients = [next(rest) for _ in use.results]
        for _, parameter in passed:
            if (whole := next(rest)) is not None:
                add_gradient(parameter, whole)
        received = zip(self.leaves.items(), found[: len(self.leaves)], strict=True)
        return {n: torch.zeros_like(leaf) if gradient is None else gradient for (n, leaf), gradient in received}

    def backward_weights(self) -> None:
        """Add to the gradients of parameters, call by call: a leaf of its own for each use leaves one way to it."""
        for use in self.uses:
            known = [(edge, g) for edge, g in zip(use.results, use.gradients, strict=True) if g is not None]
            if not known:
                continue
            edges, seeds = zip(*known, strict=True)
            found = torch.autograd.grad(edges, use.leaves, seeds, allow_unused=True)
            for parameter, gradient in zip(use.parameters, found, strict=True):
                if gradient is not None:
                    add_gradient(parameter, gradient)
        self.uses = []


def add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add to ``.grad`` of the leaf behind a parameter, past the hooks that average."""
    leaf = leaf_behind(parameter)
    with torch.no_grad():
        leaf.grad = gradient.detach().clone() if leaf.grad is None else leaf.grad.add_(gradient.detach())


class ReadyCall:
    """A recorded call with all that can be found out before it runs. Made once for a stage, run for each micro-batch.

    ``keeps`` are those of its results that a run returns; ``cloned`` those of them whose memory a later call of the
    stage writes to; ``dies`` the values that no later call of the stage reads.
    """

    def __init__(
        self, record: ModelRecord, call: RecordedCall, site: CallSite, keeps: frozenset[int], cloned: frozenset[int],
        dies: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.call, self.site, self.dies = call, site, dies
        self.new = tuple(dict.fromkeys((*call.makes, *(new for _, new in call.writes))))
        self.keeps = tuple((number, number in cloned) for number in self.new if number in keeps)
        self._fill = filler((call.args, call.kwargs))
        read = [record.values[number] for number in call.reads]
        self._flowing = tuple(value.number for value in read if value.kind in ("made", "input"))
        self._named = tuple((value.number, value.name) for value in read if value.kind in ("parameter", "buffer"))
        self._constants = {value.number: value.constant for value in read if value.constant is not None}

    def operands(
        self, values: Mapping[int, Tensor], tensors: Mapping[str, Tensor], use: WeightUse | None
    ) -> dict[int, Tensor]:
        """What the call reads, by value. With ``use``, parameters are leaves of their own, noted there."""
        known = {number: values[number] for number in self._flowing}
        known.update(self._constants)
        for number, name in self._named:
            tensor = tensors[name]
            known[number] = tensor if use is None or not tensor.requires_grad else _own_leaf(use, tensor)
        return known

    def result(self, known: Mapping[int, Tensor], first_draw: int, seed: int) -> Any:
        """What the call returns for these operands, in the grad mode, autocast and place that it was recorded with."""
        call = self.call
        args, kwargs = (call.args, call.kwargs) if self._fill is None else self._fill(known)
        on_meta = call.autocast is not None and _is_meta(known.values())
        with state_of(call, first_draw, seed, on_meta=on_meta):
            return self.site(lambda: call.function(*args, **kwargs))


class StageProgram:
    """The calls of one stage, ready to run on the tensors of one mesh."""

    def __init__(
        self, record: ModelRecord, stage: ModelStage, mesh: Mesh, batch_statistics: str, keeps: tuple[int, ...] = ()
    ) -> None:
        """``keeps`` are further values that a run returns."""
        self.record, self.stage, self.mesh = record, stage, mesh
        sites = {c.place: CallSite(c.place, mesh, batch_statistics) for c in stage.calls}
        kept, dies, cloned = frozenset((*stage.sends, *keeps)), _last_uses(record, stage), _overwritten(record, stage)
        self._calls = [
            ReadyCall(record, call, sites[call.place], kept, cloned, tuple(dies.get(call.number, ())))
            for call in stage.calls
        ]
        memories = {record.values[old].memory for call in stage.calls for old, _ in call.writes}
        self._copied = {n for n, _ in stage.receives if record.values[n].memory in memories}

    def run(
        self,
        arrived: Mapping[int, tuple[Tensor, Sharding]],
        inputs: Mapping[int, Tensor],
        tensors: Mapping[str, Tensor],
        first_draw: int,
        seed: int,
        split: bool = False,
    ) -> tuple[StageRun, dict[int, Tensor]]:
        """Forward of one micro-batch: what backward needs, and the kept values.

        ``arrived`` has tiles with their shardings, ``tensors`` parameters and buffers by name. ``first_draw``: the
        number that the first draw of this micro-batch has in the library's generator, in whichever stage.
        """
        run, values = StageRun(), dict(inputs)
        for number, (tile, sharding) in arrived.items():
            values[number] = self._received(run, number, tile, sharding)
        kept: dict[int, Tensor] = {}
        device = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
        # Each call says by itself whether it is cast.
        with nullcontext() if device is None else torch.autocast(device, enabled=False):
            for ready in self._calls:
                self._call(run, ready, values, tensors, first_draw, seed, split)
                for number, cloned in ready.keeps:
                    kept[number] = values[number].clone() if cloned else values[number]
                for number in ready.dies:
                    values.pop(number, None)
        run.outputs = {number: unwrap(value) for number, value in kept.items()}
        return run, kept

    def _received(self, run: StageRun, number: int, tile: Tensor, sharding: Sharding) -> Tensor:
        """A tile from another stage as a leaf, whose gradient goes back to that stage."""
        if self.record.values[number].requires_grad and tile.dtype.is_floating_point | tile.dtype.is_complex:
            tile = run.leaves[number] = tile.detach().requires_grad_()
            setattr(tile, AVERAGED, True)  # the border's adjoint takes the mean
        if number in self._copied:
            tile = tile.clone()
        return wrap(tile, sharding) if sharding.axes else tile

    def _call(
        self, run: StageRun, ready: ReadyCall, values: dict[int, Tensor], tensors: Mapping[str, Tensor],
        first_draw: int, seed: int, split: bool,
    ) -> None:  # fmt: skip
        """Run one call: ``values`` gets what it makes and writes."""
        call = ready.call
        use = WeightUse([], [], []) if split and call.grad else None
        known = ready.operands(values, tensors, use)
        result = ready.result(known, first_draw, seed)
        if not self.mesh.world.capabilities.moves_data:  # tensors that the call makes of nothing, on a device
            result = map_tensors(_without_values, result)
        values.update(zip(call.makes, tensors_in(result), strict=True))
        for old, new in call.writes:
            values.setdefault(new, known[old])
        if use is not None and use.leaves:
            _note_use(run, use, [unwrap(values[number]) for number in ready.new])


def _last_uses(record: ModelRecord, stage: ModelStage) -> dict[int, list[int]]:
    """By call: the values that no later call of the stage uses, whose memory may go."""
    made = {number for call in stage.calls for number in call.makes}
    last: dict[int, int] = {}
    for call in stage.calls:
        last |= dict.fromkeys((*call.reads, *call.makes, *(new for _, new in call.writes)), call.number)
    dies: dict[int, list[int]] = {}
    for value, call_number in last.items():
        if value in made or record.values[value].kind == "made":
            dies.setdefault(call_number, []).append(value)
    return dies


def _overwritten(record: ModelRecord, stage: ModelStage) -> frozenset[int]:
    """Values of the stage whose memory a later call of it writes to, by whichever name: other stages get them as they
    are before."""
    written: set[int] = set()
    found = set()
    for call in reversed(stage.calls):
        found |= {n for n in (*call.makes, *(new for _, new in call.writes)) if record.values[n].memory in written}
        written |= {record.values[old].memory for old, _ in call.writes}
    return frozenset(found)


def _note_use(run: StageRun, use: WeightUse, made: list[Tensor]) -> None:
    """Keep for :meth:`StageRun.backward_weights` what a call with parameters made."""
    made = [tile for tile in made if tile.requires_grad]
    if any(tile.grad_fn is None for tile in made):
        # The parameter itself (`weight.flatten(1)` of a matrix): calls that read it later are no uses of their
        # own, so that its gradient is taken along all ways at once, with those of the inputs.
        run.passed += zip(use.leaves, use.parameters, strict=True)
        return
    use.results = [get_gradient_edge(tile) for tile in made]
    if use.results:
        run.uses.append(use)


def _own_leaf(use: WeightUse, parameter: Tensor) -> Tensor:
    """The parameter's values as a leaf that this call alone reads."""
    leaf = leaf_behind(parameter).detach().requires_grad_()
    setattr(leaf, AVERAGED, True)
    if placement_of(parameter) and not isinstance(parameter, ShardedTensor):
        raise AssertionError("placed parameters are refused when the pipeline is made")
    use.leaves.append(leaf)
    use.parameters.append(parameter)
    return wrap(leaf, parameter.sharding) if isinstance(parameter, ShardedTensor) else leaf


def _without_values(tensor: Tensor) -> Tensor:
    return tensor if unwrap(tensor).is_meta else tensor.detach().to("meta")


def _is_meta(tensors: Any) -> bool:
    return any(unwrap(tensor).is_meta for tensor in tensors)


class _Draws(AbstractContextManager[None]):
    """Inside, draws have the numbers that one rank would give them."""

    def __init__(self, seed: int, first: int) -> None:
        self._state, self._mode = State(seed, first, repeated=True), reproducible()

    def __enter__(self) -> None:
        self._before = swap(self._state)
        self._mode.__enter__()

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)  # type: ignore[arg-type]
        swap(self._before)


def state_of(call: RecordedCall, first_draw: int, seed: int, on_meta: bool) -> AbstractContextManager[Any]:
    """The grad mode, autocast and random numbers that the call was recorded with."""
    if call.autocast is None and not call.draws:  # nearly all calls
        return torch.set_grad_enabled(call.grad)
    stack = ExitStack()
    stack.enter_context(torch.set_grad_enabled(call.grad))
    if call.autocast is not None:
        stack.enter_context(torch.autocast(call.autocast[0], call.autocast[1]))
        stack.enter_context(autocast_on_meta() if on_meta else nullcontext())
    if call.draws:
        stack.enter_context(_Draws(seed, first_draw + call.first_draw))
    return stack


def used_up(draws: int) -> None:
    """Go on in the library's generator as one rank would that has drawn so many numbers."""
    current().counter += draws


__all__ = ["Ref", "StageProgram", "StageRun", "add_gradient", "map_tensors", "used_up"]
