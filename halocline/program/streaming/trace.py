"""Records what a model computes, as a list of operations that can each be computed box by box.

The model runs once on meta tensors that are cut along all spatial dims in a dry world. Every call of a rule is written
down with its recipe, which says what any box of the result needs. Work on whole tensors (a dense head) is written down
as it is called. Weights stay the user's own tensors; work on them alone runs at once, under autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..._torch_private import torch_function_enabled
from ...errors import Refused
from ...random.state import State, current, swap
from ...rules import Operand, Recipe, dispatch, follow, shard
from ...rules.asking_torch import planned
from ...rules.executor import recorders, run_rule
from ...rules.plan import recipe_of
from ...rules.recipe import as_called
from ...rules.table import entries, name_of
from ...tensor import ShardedTensor, here, watch
from ...tree import map_tensors, tensors_in
from ...world import Mesh
from ..record import dry
from .operations import Operation, Ref, Trace, Value

_AXES = ("first", "second", "third")
_DEVICE = Tensor.device.__get__
_FILLED = {Tensor.new_zeros: 0.0, Tensor.new_ones: 1.0}


class Recorder(TorchFunctionMode):
    """Sees every torch function that the model calls, and writes down those that touch the sample."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.operations: list[Operation] = []
        self._device = device
        self._numbers: dict[int, int] = {}  # of each tensor, by its identity
        self._alive: list[Tensor] = []  # so that no identity returns
        self._twins: dict[int, Tensor] = {}  # on meta, of tensors outside
        self._stale: dict[int, str] = {}  # values whose memory was written to under another name
        self._aliases: dict[int, int] = {}  # value to the first value of the same memory
        self._paused = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Send what touches the sample to rules or to whole work; everything else runs as it is."""
        kwargs = kwargs or {}
        if self._paused or not torch_function_enabled():
            return function(*args, **kwargs)
        if not any(id(t) in self._numbers for t in tensors_in((args, kwargs))):
            return function(*args, **kwargs)
        if function == _DEVICE:
            return self._device
        if function in (Tensor.to, Tensor.type_as) and id(args[0]) not in self._numbers:
            return args[0].to(self._device, args[1].dtype)  # a tensor from outside, made like one of the sample
        if function is torch.as_tensor:  # torch asks modes alone about it
            function, args = Tensor.to, (args[0], *(value for value in kwargs.values() if value is not None), *args[1:])
            kwargs = {}
        args, kwargs = map_tensors(self._on_meta, (self._stay(function, args), kwargs))
        tensors = tensors_in((args, kwargs))
        if not any(isinstance(tensor, ShardedTensor) for tensor in tensors):
            return self._whole_work(function, args, kwargs, tensors)
        with self.paused() if _is_direct(function) else self:  # what a composite calls is seen one by one
            result = dispatch(function, types, args, kwargs)
        unknown = [t for t in tensors_in(result) if id(t) not in self._numbers]
        if unknown:
            self._direct_answer(function, args, kwargs, unknown[0])
        return result

    def rule_call(self, function: Any, describe: Any, args: Any, kwargs: Any, by_value: bool) -> Any:
        """Run a rule in the dry world, and write it down with its recipe."""
        with self.paused():
            tensors = tensors_in((args, kwargs))
            count = current().counter
            result = run_rule(function, describe, args, kwargs, by_value)
            if result is NotImplemented:
                return result
            with planned():
                recipe = recipe_of(describe, args, kwargs, tensors)
        drawn = (current().seed, count) if current().counter > count else None
        self._write(function, args, kwargs, tensors_in(result), recipe, drawn)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is written down: the local work of a call that is."""
        before, self._paused = self._paused, True
        recorder = recorders.pop(get_ident(), None)
        try:
            yield
        finally:
            self._paused = before
            if recorder is not None:
                recorders[get_ident()] = recorder

    def enter(self, twin: Tensor, tensor: Tensor) -> int:
        """An input of the model: the user's tensor, and what stands for it in the recording."""
        return self._number(twin, tensor, tensor.requires_grad)

    def number_of(self, tensor: Tensor) -> int:
        """The value that a tensor is; one from outside is entered now."""
        return self._numbers[id(self._on_meta(tensor))]

    def _number(self, tensor: Tensor, outside: Tensor | None = None, requires_grad: bool = False) -> int:
        """Enter a tensor as a new value; the dims that the recording cuts are those that may be computed in tiles."""
        tiled = tuple(sorted(tensor.sharding.dims_by_axis())) if isinstance(tensor, ShardedTensor) else ()
        self._alive.append(tensor)
        self._numbers[id(tensor)] = len(self.values)
        self.values.append(Value(tuple(tensor.shape), tensor.dtype, tiled, outside, requires_grad))
        return len(self.values) - 1

    def _on_meta(self, tensor: Tensor) -> Tensor:
        """A tensor from outside as a meta tensor with a number; others as they are."""
        if id(tensor) in self._numbers:
            return tensor
        twin = self._twins.get(id(tensor))
        if tensor.is_meta and self._device.type != "meta":
            raise Refused(
                "a tensor made in the model",
                here(),
                "hc.stream has not seen how it was made",
                "make it with a torch function of the sample, or outside the model",
            )
        if twin is None:
            with self.paused(), torch.no_grad():
                twin = self._twins[id(tensor)] = tensor.detach().to("meta")
            self._alive.append(tensor)
            self._number(twin, tensor, tensor.requires_grad)
        return twin

    def _stay(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """``x.to(device)`` where it is already: the recorded tensors are on meta."""
        if function is not Tensor.to:
            return args
        return tuple(a for a in args if not isinstance(a, torch.device | str) or torch.device(a) != self._device)

    def _whole_work(self, function: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Work on whole tensors, such as a dense head."""
        versions, count = [tensor._version for tensor in tensors], current().counter
        with self.paused():
            try:
                result = function(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                if "meta" not in str(error):
                    raise
                raise _needs_values(function) from error
        made = tensors_in(result)
        written = [t for t, old in zip(tensors, versions, strict=True) if t._version != old]
        self._check_writes(function, written, made)
        if written or any(id(tensor) not in self._numbers for tensor in made):
            drawn = (current().seed, count) if current().counter > count else None
            self._write(function, args, kwargs, made, None, drawn)
        return result

    def _check_writes(self, function: Any, written: list[Tensor], made: list[Tensor]) -> None:
        """Writes to memory outside the recorded values, or that show in no result, cannot be repeated tile by tile."""
        for tensor in written:
            if self.values[self._numbers[id(tensor)]].outside is not None or not any(tensor is one for one in made):
                raise _writes_outside(function)

    def _direct_answer(self, function: Any, args: Any, kwargs: Any, made: Tensor) -> None:
        """A cut tensor that no rule made: a conversion of dtype, or a new tensor of one number."""
        entry = entries().get(function)
        family = entry.family if entry is not None and isinstance(made, ShardedTensor) else ""
        if name_of(function) == "Tensor.data":
            with torch.no_grad():
                return self._write(Tensor.detach, args, kwargs, [made], same_everywhere(made, Tensor.detach), None)
        if family == "pointwise":
            return self._write(function, args, kwargs, [made], same_everywhere(made, function), None)
        if function in _FILLED or function is Tensor.new_full:
            value = _FILLED.get(function, args[2] if len(args) > 2 else kwargs.get("fill_value"))
            return self._write(torch.full, (), {}, [made], _constant(made, value, self._device), None)
        raise Refused(
            name_of(function), here(), "hc.stream cannot compute its result in parts", "call it outside the model"
        )

    def _write(
        self, function: Any, args: Any, kwargs: Any, made: list[Tensor], recipe: Recipe | None, drawn: Any
    ) -> None:
        """Add one operation, and the values that it makes."""
        tensors = tensors_in((args, kwargs))
        operands = tuple(self._numbers[id(self._on_meta(tensor))] for tensor in tensors)
        for operand in operands:
            if operand in self._stale:
                raise Refused(
                    name_of(function),
                    here(),
                    f"it reads memory that {self._stale[operand]} wrote to through another view",
                    "write out of place, or read the tensor that was written to",
                )
        recorded = map_tensors(lambda tensor: Ref(self._numbers[id(self._on_meta(tensor))]), (args, kwargs))
        grad = torch.is_grad_enabled() and not name_of(function).startswith("detach")
        flows = grad and any(self.values[operand].requires_grad for operand in operands)
        written = made and tensors and made[0] is tensors[0]
        if written and self.values[operands[0]].outside is not None:
            raise _writes_outside(function)
        results = tuple(self._number(t, requires_grad=flows and t.dtype.is_floating_point) for t in made)
        self._note_memory(function, operands, results, recipe, bool(written))
        call = (
            name_of(function),
            here(),
            function,
            *recorded,
            operands,
            results,
            recipe,
            grad,
            drawn,
            _autocast(),
            bool(written),
        )
        self.operations.append(Operation(*call))

    def _note_memory(
        self, function: Any, operands: tuple[int, ...], results: tuple[int, ...], recipe: Recipe | None, written: bool
    ) -> None:
        """A write makes other views of the same memory stale: what they show has changed."""
        if not operands:
            return
        memory = self._aliases.get(operands[0], operands[0])
        if written:
            others = [v for v in (memory, *self._aliases) if self._aliases.get(v, v) == memory]
            self._stale |= {value: name_of(function) for value in others if value not in results}
        if written or (recipe is not None and recipe.view):
            self._aliases |= dict.fromkeys(results, memory)


def _is_direct(function: Any) -> bool:
    """Is it answered without a rule?"""
    entry = entries().get(function)
    return entry is not None and entry.kind == "direct"


def _autocast() -> tuple[str, torch.dtype] | None:
    """The autocast that is on."""
    on = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    return None if on is None else (on, torch.get_autocast_dtype(on))


def _writes_outside(function: Any) -> Refused:
    return Refused(
        name_of(function),
        here(),
        "it writes values of the sample into a tensor that the model keeps or was given, or into part of one",
        "compute a new tensor instead, or run this model without hc.stream",
    )


def _needs_values(function: Any) -> Refused:
    return Refused(
        name_of(function),
        here(),
        "it needs the values of a tensor, and hc.stream records shapes before anything is computed",
        "take the value outside the model, or give the branch a fixed answer",
    )


def same_everywhere(made: Tensor, function: Any) -> Recipe:
    """The recipe of a function of one tensor, element by element, such as a change of dtype."""
    operand = Operand(0, tuple(made.shape), made.dtype, frozenset())
    return Recipe(space=operand.shape, reads=(follow(operand),), local=as_called(function), runs_empty=True)


def _constant(made: Tensor, value: float, device: torch.device) -> Recipe:
    """A new tensor of one number."""
    dtype = made.dtype

    def local(work: Any) -> Tensor:
        return torch.full([interval.size for interval in work.box], value, dtype=dtype, device=device)

    return Recipe(space=tuple(made.shape), reads=(), local=local, runs_empty=True)


def _virtual_cuts(tensor: Tensor) -> dict[int, str]:
    """Every spatial dim of a batch is cut, as far as it can be."""
    dims = [dim for dim in range(2, tensor.ndim) if tensor.shape[dim] > 1][: len(_AXES)]
    return {dim: _AXES[dim - 2] for dim in dims}


def trace(model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Record one forward of ``model`` on these arguments, without computing it."""
    tensors = tensors_in((args, kwargs))
    device = max(tensors, key=Tensor.numel).device
    largest = max(tensor.ndim for tensor in tensors)
    watch(model)
    draws = current()
    recorder = Recorder(device)
    axes = dict.fromkeys(_AXES[: max(0, largest - 2)], 2) or {_AXES[0]: 1}
    ranks = prod(axes.values())
    with dry(ranks - 1, ranks):  # the last rank, since the first tells the user what a real run would gather
        mesh, inputs = Mesh(**axes), list[int]()
        swap(State(draws.seed, draws.counter))

        def enter(tensor: Tensor) -> Tensor:
            """An input of the model, on meta and cut along all spatial dims."""
            twin = tensor.detach().to("meta")
            cuts = _virtual_cuts(tensor) if tensor.ndim == largest else {}
            entered = shard(twin, mesh, cuts) if cuts else twin
            inputs.append(recorder.enter(entered, tensor))
            return entered

        given, named = map_tensors(enter, (args, kwargs))
        recorders[get_ident()] = recorder.rule_call
        try:
            with recorder:
                answer = forward(*given, **named)
        finally:
            recorders.pop(get_ident(), None)
        drawn = current().counter - draws.counter
    with recorder.paused():
        outputs = [recorder.number_of(tensor) for tensor in tensors_in(answer)]
        found = iter(outputs)
        answer = map_tensors(lambda tensor: Ref(next(found)), answer)
    return Trace(recorder.values, recorder.operations, inputs, outputs, answer, drawn, device)
