"""One forward of a network as calls of rules, each with its recipe: what a layout of the weights is priced from.

The network runs once on plain meta tensors. Every torch function with a rule is written down with the recipe of that
rule, so that for any layout the executor's own planner can say what the call would move and sum.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch_private import torch_function_enabled
from ..errors import HaloclineError
from ..program import dry
from ..program.autocast import autocast_on_meta
from ..program.record import OperationWatch
from ..program.streaming.trace import same_everywhere
from ..random.state import State, current, swap
from ..rules import Recipe
from ..rules.asking_torch import planned, planning
from ..rules.executor import recorders
from ..rules.plan import recipe_of
from ..rules.table import RuleEntry, entries, name_of
from ..tensor import here, watch
from ..tree import map_tensors, tensors_in
from ..world import this_world
from ..world.events import Computed

_DEVICE = Tensor.device.__get__
LONGEST = 256  # calls of a block that may repeat


@dataclass(frozen=True)
class CallValue:
    """A tensor of the forward: an input, a parameter (by name), a constant, or what a call made."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    parameter: str | None = None
    input: int | None = None  # which of the inputs it is

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class RuleCall:
    """One call: operands and results by number of their values. Without a recipe it needs every operand whole."""

    name: str
    place: str
    key: Hashable  # equal for calls that cost the same under the same cuts
    recipe: Recipe | None
    operands: tuple[int, ...]
    results: tuple[int, ...]
    work: tuple[Computed, ...]  # of the whole call, without number, time and place
    sign: int = 0  # equal for calls that also read from equally far before: by it blocks that repeat are found


@dataclass
class Calls:
    """The calls of one forward, in order."""

    values: list[CallValue] = field(default_factory=list)
    calls: list[RuleCall] = field(default_factory=list)
    made: dict[int, tuple[int, int]] = field(default_factory=dict)  # by value: the call, and which of its results
    parameters: dict[str, int] = field(default_factory=dict)  # by name: the value of each that takes part
    inputs: list[int] = field(default_factory=list)  # the values of the model's inputs

    def add(self, call: RuleCall, signs: dict[Hashable, int]) -> None:
        """The next call."""
        index = len(self.calls)
        reads = tuple(self._seen(n, index) for n in call.operands)
        self.calls.append(replace(call, sign=signs.setdefault((call.key, reads), len(signs))))
        self.made |= {n: (index, which) for which, n in enumerate(call.results)}

    def _seen(self, value: int, index: int) -> Hashable:
        """An operand as a block sees it: how long before it was made; parameters by shape."""
        if self.values[value].parameter is not None:
            return "parameter", self.values[value].shape
        if value not in self.made:
            return "outside", value
        before, which = self.made[value]
        return (index - before, which) if index - before <= LONGEST else ("far", value)

    def forget(self, count: int) -> None:
        """All calls but the first ``count``."""
        del self.calls[count:]
        self.made = {n: place for n, place in self.made.items() if place[0] < count}


class RuleRecorder(TorchFunctionMode):
    """Sees every torch function that the network calls, and writes down those that make tensors."""

    def __init__(self, parameters: dict[int, str], device: torch.device) -> None:
        super().__init__()
        self.found = Calls()
        self._parameters, self._device = parameters, device
        self._twins: dict[int, Tensor] = {}  # on meta, of constants
        self._numbers: dict[int, int] = {}  # of each tensor, by its identity
        self._alive: list[Tensor] = []  # so that no identity returns
        self._keys: dict[Hashable, int] = {}
        self._signs: dict[Hashable, int] = {}
        self._inside: list[Any] = []  # composites that run
        self._paused = False  # while one call runs by itself
        self._table = entries()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused or planning() or not torch_function_enabled():
            return function(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if not any(tensor.is_meta for tensor in tensors):
            return function(*args, **kwargs)  # a constant: computed as it is, so that nothing on meta gets into caches
        if function == _DEVICE:
            return self._device
        if function is Tensor.to or function is Tensor.type_as:
            if not args[0].is_meta:
                return args[0].to(args[1].dtype)
            args = tuple(a for a in args if not isinstance(a, torch.device | str))
        args, kwargs = map_tensors(self._on_meta, (args, kwargs))
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        entry = self._table.get(function)
        if entry is None or entry.kind == "direct":
            return self._run(function, None, args, kwargs)
        if entry.kind == "rule":
            return self.rule_call(function, entry.run, args, kwargs)
        return self._composite(function, entry, args, kwargs)

    def rule_call(self, function: Any, describe: Any, args: Any, kwargs: Any, by_value: bool = True) -> Any:
        """Run a call of a rule on whole tensors, and write it down with its recipe."""
        try:
            with planned():
                recipe = recipe_of(describe, args, kwargs, tensors_in((args, kwargs)))
        except HaloclineError:
            recipe = None
        return self._run(function, recipe, args, kwargs)

    def enter(self, tensor: Tensor, place: int) -> None:
        """An input of the model."""
        self._add(tensor, CallValue(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, input=place))

    def _composite(self, function: Any, entry: RuleEntry, args: Any, kwargs: Any) -> Any:
        """What a composite calls is seen one by one; on plain tensors it may call the function itself."""
        if function in self._inside:
            return self._run(function, None, args, kwargs)
        calls = len(self.found.calls)
        self._inside.append(function)
        try:
            with self:
                return entry.run(*args, **kwargs)
        except (HaloclineError, AttributeError, TypeError, RuntimeError, AssertionError):
            self.found.forget(calls)  # it knows cut tensors alone
            return self._run(function, None, args, kwargs)
        finally:
            self._inside.pop()

    def _run(self, function: Any, recipe: Recipe | None, args: Any, kwargs: Any) -> Any:
        """Run a call on meta tensors, and write it down with its recipe and the work that it does.

        Calls that make nothing new and do no work are left out. A call without a recipe takes whole operands.
        """
        given = tensors_in((args, kwargs))
        operands = tuple(self._number(tensor) for tensor in given)
        recorder = recorders.pop(get_ident(), None)
        before, self._paused = self._paused, True
        work: list[Computed] = []
        try:
            with OperationWatch(this_world(), lambda event, *_: work.append(event)):
                result = _result(function, recipe, args, kwargs)
        finally:
            self._paused = before
            if recorder is not None:
                recorders[get_ident()] = recorder
        made = tensors_in(result)
        new = [tensor for tensor in made if id(tensor) not in self._numbers]
        inplace = recipe is not None and recipe.inplace
        if not (new or inplace or work) or not given:
            return result
        if recipe is None and len(made) == 1 and made[0].shape == given[0].shape:
            recipe = same_everywhere(made[0], torch.clone)
        results = tuple(self._add(tensor) for tensor in made)
        if recipe is not None and len(recipe.outputs) != len(results):
            recipe = None
        key = (function, recipe is None, _picture((args, kwargs)), tuple(self.found.values[n].shape for n in results))
        number = self._keys.setdefault(key, len(self._keys))
        events = tuple(event._replace(number=0, time=0.0, place="") for event in work)
        call = RuleCall(name_of(function), here(), number, recipe, operands, results, events)
        self.found.add(call, self._signs)
        return result

    def _on_meta(self, tensor: Tensor) -> Tensor:
        """A constant as a meta tensor; others as they are."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._twins:
            self._alive.append(tensor)
            self._twins[id(tensor)] = tensor.detach().to("meta")
        return self._twins[id(tensor)]

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor's value; one that no call has made is entered now, as a parameter or a constant."""
        if id(tensor) not in self._numbers:
            name = self._parameters.get(id(tensor))
            self._add(tensor, CallValue(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, parameter=name))
        return self._numbers[id(tensor)]

    def _add(self, tensor: Tensor, value: CallValue | None = None) -> int:
        """A new value, which the tensor stands for from now on: also where a call has written to a known one."""
        self._alive.append(tensor)
        number = self._numbers[id(tensor)] = len(self.found.values)
        value = value or CallValue(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
        self.found.values.append(value)
        if value.parameter is not None:
            self.found.parameters[value.parameter] = number
        if value.input is not None:
            self.found.inputs.append(number)
        return number


def _result(function: Any, recipe: Recipe | None, args: Any, kwargs: Any) -> Any:
    """Of the function itself; rules also run under names of functions that take other arguments."""
    try:
        return function(*args, **kwargs)
    except (TypeError, RuntimeError, ValueError):
        if recipe is None:
            raise
        operands = tensors_in((args, kwargs))
        made = [
            torch.empty(output.shape, dtype=output.dtype or operands[0].dtype, device=operands[0].device)
            for output in recipe.outputs
        ]
        flows = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
        made = [each.requires_grad_() if flows and each.is_floating_point() else each for each in made]
        return made[0] if len(made) == 1 else tuple(made)


def _picture(value: Any) -> Hashable:
    """Arguments as part of a key: tensors by shape and dtype."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(map(_picture, value))
    if isinstance(value, dict):
        return "dict", tuple((name, _picture(item)) for name, item in value.items())
    return type(value).__name__, repr(value)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Inside, draws leave no trace: ranks that do not record draw the same numbers afterwards."""
    states = random.getstate(), np.random.get_state()
    before = swap(State(current().seed, current().counter))
    try:
        with torch.random.fork_rng():
            yield
    finally:
        swap(before)
        random.setstate(states[0])
        np.random.set_state(states[1])


def record_calls(
    model: nn.Module,
    inputs: Sequence[Any],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    keywords: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
) -> Calls:
    """The calls of one forward of ``model``, whose tensors and arguments are on meta.

    What it makes of neither is made on ``device`` and computed. No generator moves on.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    recorder = RuleRecorder(names, device or torch.get_default_device())
    watch(model)
    for place, tensor in enumerate(tensors_in((inputs, dict(keywords or {})))):
        recorder.enter(tensor, place)
    with dry(0, 1), _generators_kept():
        recorders[get_ident()] = recorder.rule_call
        try:
            with recorder, around(), autocast_on_meta():
                model(*inputs, **(keywords or {}))
        finally:
            recorders.pop(get_ident(), None)
    return recorder.found
