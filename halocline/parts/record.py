"""A model's forward and its loss as a list of torch calls over numbered values, recorded on shapes.

The outermost torch functions are recorded, as the model calls them: whatever a function is made of inside runs again
when the call is replayed. Any part of the list can run on other ranks than the rest, since all that it reads are
values, parameters and buffers by name, and constants.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch_private import module_hooks, storage_key, torch_function_enabled
from ..errors import Refused
from ..program.autocast import autocast_on_meta
from ..program.streaming.operations import Ref
from ..random import reproducible
from ..random.backward import BACKWARD
from ..random.state import State, current, swap
from ..rules.table import name_of
from ..tensor import here, watch
from ..tree import map_tensors, tensors_in

_DEVICE = Tensor.device.__get__
#: Functions that change a tensor's place in autograd, and would do so on the recorded tensor alone.
_LOST = frozenset((Tensor.requires_grad_, Tensor.detach_, Tensor.register_hook, Tensor.retain_grad, Tensor.set_))
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
Autocast = tuple[str, torch.dtype]


@dataclass
class RecordedValue:
    """A tensor of the record. ``name`` is that of a parameter, a buffer or an input; ``made`` the call, else -1."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    memory: int  # equal for values that share it
    kind: str = "made"  # or "parameter", "buffer", "input", "constant"
    name: str = ""
    made: int = -1
    constant: Tensor | None = field(default=None, repr=False)

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass
class RecordedCall:
    """One torch call. ``args`` and ``kwargs`` have references in the places of tensors."""

    number: int
    place: str
    function: Callable[..., Any] = field(repr=False)
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)
    reads: tuple[int, ...]
    makes: tuple[int, ...]  # of each tensor of the result, in order
    writes: tuple[tuple[int, int], ...]  # a value that is written to, and its number from then on
    grad: bool
    autocast: Autocast | None
    first_draw: int  # numbers of the library's generator that calls before have used
    draws: int

    def __str__(self) -> str:
        return f"{name_of(self.function)} in {self.place}"


@dataclass
class ModelRecord:
    """``together``: sets of calls that share memory one of them writes to, and must run on the same ranks."""

    values: list[RecordedValue]
    calls: list[RecordedCall]
    inputs: list[int]  # value numbers of the inputs' tensors, in order
    loss: int
    together: list[frozenset[int]]
    draws: int

    def parameters_of(self, calls: Sequence[RecordedCall]) -> set[str]:
        """Names of parameters and buffers that these calls read."""
        read = {number for call in calls for number in call.reads}
        return {v.name for n in read if (v := self.values[n]).kind in ("parameter", "buffer")}

    def parameter_of(self, number: int) -> str | None:
        """The name of a parameter, if the value is one."""
        value = self.values[number]
        return value.name if value.kind == "parameter" else None


class TorchCallRecorder(TorchFunctionMode):
    """Writes down every torch function that touches a tensor of the model, and runs it on meta tensors."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.values: list[RecordedValue] = []
        self.calls: list[RecordedCall] = []
        self.together: list[frozenset[int]] = []
        self._device = device
        self._numbers: dict[int, int] = {}  # of tensors now, by identity
        self._alive: list[Tensor] = []  # so that no identity returns
        self._nodes: dict[int, tuple[Any, int]] = {}  # of each tensor: its node of autograd, and writes to its memory
        self._writes: dict[int, int] = {}  # how often memory was written to
        self._stale: dict[int, frozenset[int]] = {}  # values whose memory was written to by another name: these calls
        self._buffers: dict[str, set[int]] = {}  # calls that read a buffer
        self._written_buffers: set[str] = set()
        self._twins: dict[int, Tensor] = {}  # on meta, of constants

    def enter(self, tensor: Tensor, kind: str, name: str = "", constant: Tensor | None = None) -> int:
        """A tensor from outside."""
        return self._number(tensor, -1, kind, name, constant)

    def number_of(self, tensor: Tensor) -> int:
        """The value that a tensor is."""
        return self._numbers[id(self._known(tensor))]

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch_function_enabled():
            return function(*args, **kwargs)
        if function == _DEVICE and id(args[0]) in self._numbers:
            return self._device
        if function in BACKWARD or function in _LOST or getattr(function, "__name__", "") == "__set__":
            raise Refused(name_of(function), here(), "the record of a model has forward calls alone, and would lose it",
                          "do it outside the model, on its outputs or parameters")  # fmt: skip
        args, kwargs = map_tensors(self._known, (args, kwargs))
        tensors = tensors_in((args, kwargs))
        versions, count = [tensor._version for tensor in tensors], current().counter
        result = self._run(function, args, kwargs)
        written = [t for t, old in zip(tensors, versions, strict=True) if t._version != old]
        if not tensors_in(result) and not written:
            return result
        result = map_tensors(self._on_meta, result)
        self._write(function, args, kwargs, result, written, count)
        return result

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        with autocast_on_meta() if _autocast() else nullcontext():
            if function is Tensor.to:
                args = tuple(a for a in args if not isinstance(a, torch.device | str))
                kwargs = {key: value for key, value in kwargs.items() if key != "device"}
                if len(args) == 1 and not {"dtype", "memory_format", "copy", "other"} & kwargs.keys():
                    return args[0]
            try:
                return function(*args, **kwargs)
            except (NotImplementedError, RuntimeError) as error:
                if isinstance(error, Refused) or "meta" not in str(error).lower():
                    raise
                raise Refused(
                    name_of(function), here(), "it needs the values of a tensor, and a model is recorded on shapes",
                    "take the value outside the model, or give the branch a fixed answer",
                ) from error  # fmt: skip

    def _write(self, function: Any, args: Any, kwargs: Any, result: Any, written: list[Tensor], count: int) -> None:
        number = len(self.calls)
        reads = tuple(dict.fromkeys(self._numbers[id(tensor)] for tensor in tensors_in((args, kwargs))))
        recorded = map_tensors(lambda tensor: Ref(self._numbers[id(tensor)]), (args, kwargs))
        self._note_reads(number, reads)
        writes = tuple(self._note_write(number, function, tensor) for tensor in written)
        makes = []
        for tensor in tensors_in(result):
            if not any(tensor is one for one in written):
                self._number(tensor, number)
            makes.append(self._numbers[id(tensor)])
        self.calls.append(RecordedCall(
            number, here(), function, recorded[0], recorded[1], reads, tuple(makes), writes, torch.is_grad_enabled(),
            _autocast(), count, current().counter - count,
        ))  # fmt: skip

    def _note_reads(self, call: int, reads: tuple[int, ...]) -> None:
        for number in reads:
            value = self.values[number]
            if number in self._stale:
                self.together.append(self._stale[number] | {call})
            if value.kind == "buffer":
                self._buffers.setdefault(value.name, set()).add(call)

    def _note_write(self, call: int, function: Any, tensor: Tensor) -> tuple[int, int]:
        """The value that a tensor was, and the one that it is now. Other views of its memory become stale."""
        old = self.values[self._numbers[id(tensor)]]
        if old.kind in ("parameter", "input", "constant"):
            raise Refused(name_of(function), here(), f"it writes into {old.name or 'a tensor'}, {_ROLES[old.kind]}",
                          "compute a new tensor instead")  # fmt: skip
        self._writes[old.memory] = self._writes.get(old.memory, 0) + 1
        for number, value in enumerate(self.values):
            if value.memory == old.memory and number != old.number:
                makers = {each for each in (value.made, old.made) if each >= 0}
                self._stale[number] = self._stale.get(number, frozenset()) | makers | {call}
        kind, name = (old.kind, old.name) if old.kind == "buffer" else ("made", "")
        if kind == "buffer":
            self._written_buffers.add(name)
        return old.number, self._number(tensor, call, kind, name)

    def finish(self) -> list[frozenset[int]]:
        """The sets of calls that must stay together."""
        return self.together + [frozenset(self._buffers[name]) for name in sorted(self._written_buffers)]

    def _number(self, tensor: Tensor, made: int, kind: str = "made", name: str = "", constant: Any = None) -> int:
        number, memory = len(self.values), storage_key(tensor)
        self._alive.append(tensor)
        self._numbers[id(tensor)] = number
        self._nodes[id(tensor)] = tensor.grad_fn, self._writes.get(memory, 0)
        shape, dtype, flows = tuple(tensor.shape), tensor.dtype, tensor.requires_grad
        self.values.append(RecordedValue(number, shape, dtype, flows, memory, kind, name, made, constant))
        return number

    def _on_meta(self, tensor: Tensor) -> Tensor:
        """A result; one that was made on a device, such as a range of numbers, as a meta tensor."""
        return tensor if tensor.is_meta else tensor.detach().to("meta")

    def _known(self, tensor: Tensor) -> Tensor:
        """A tensor among arguments: a value, or a constant, which is one from now on."""
        if id(tensor) in self._numbers:
            node, writes = self._nodes[id(tensor)]
            now = self._writes.get(self.values[self._numbers[id(tensor)]].memory, 0)
            if writes == now and tensor.grad_fn is not node:
                raise _unseen(tensor)
            return tensor
        if id(tensor) in self._twins:
            return self._twins[id(tensor)]
        if tensor.is_meta or tensor.grad_fn is not None:
            raise _unseen(tensor)
        if tensor.requires_grad:
            raise Refused("a parameter of another module", here(), "it requires a gradient, and is none of the model's",
                          "make it a parameter of the model")  # fmt: skip
        twin = self._twins[id(tensor)] = tensor.detach().to("meta")
        self._alive.append(tensor)
        self._number(twin, -1, "constant", "", tensor)
        return twin


_ROLES = {"parameter": "a parameter", "input": "an input", "constant": "which the model keeps outside its buffers"}


def _unseen(tensor: Tensor) -> Refused:
    maker = tensor.grad_fn.name() if tensor.grad_fn is not None else "code that calls no torch function"
    return Refused(
        maker, here(), "it made a tensor that the record of torch calls has not seen (an autograd Function of the "
        "model's own, a reentrant checkpoint, compiled code)",
        "write it with torch functions, or use checkpoint(use_reentrant=False)",
    )  # fmt: skip


def _autocast() -> Autocast | None:
    on = next((kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)), None)
    return None if on is None else (on, torch.get_autocast_dtype(on))


def meta_copy(model: nn.Module) -> nn.Module:
    """The model without values: parameters and buffers on meta, tied ones still tied."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        twin = torch.empty_like(parameter, device="meta", requires_grad=False)
        memo[id(parameter)] = nn.Parameter(twin, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, memo)


def python_state(modules: Iterable[tuple[str, nn.Module]]) -> dict[tuple[str, str], Any]:
    """Plain attributes of named modules, such as a rate, a mode or a size: what a record has taken for fixed."""
    return {
        (place, name): value
        for place, module in modules
        for name, value in module.__dict__.items()
        if not name.startswith("_") and _is_plain(value)
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def hooks_of(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, int]]:
    """The hooks of named modules that run with a forward or its backward, each by its module and its number."""
    return [(place, number) for place, module in modules for number in module_hooks(module)]


def take_python_state(model: nn.Module, state: dict[tuple[str, str], Any]) -> None:
    """Give the modules of a copy those attributes."""
    modules = dict(model.named_modules())
    for (place, name), value in state.items():
        modules[place].__dict__[name] = value


def record_model(
    model: nn.Module, loss: Callable[..., Tensor], inputs: Any, targets: Any, device: torch.device
) -> ModelRecord:
    """Record ``loss(model(*inputs), *targets)`` of a model from :func:`meta_copy`, on tensors of these shapes."""
    watch(model)
    recorder, plain = TorchCallRecorder(device), python_state(model.named_modules())
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            recorder.enter(tensor, kind, name)
    given, wanted = map_tensors(lambda tensor: tensor.detach().to("meta").clone(), (inputs, targets))
    entered = [recorder.enter(t, "input", f"input {place}") for place, t in enumerate(tensors_in((given, wanted)))]
    before = swap(State(0, 0))
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), reproducible(), recorder:
            answer = loss(model(*given), *wanted)
        draws = current().counter
    finally:
        swap(before)
    changed = [
        place
        for place, value in python_state(model.named_modules()).items()
        if not isinstance(value, tuple) and plain.get(place, model) != value  # networks note shapes, as tuples
    ]
    if changed:
        module, name = changed[0]
        raise Refused(
            f"{name} =", module or type(model).__name__,
            "forward changes an attribute, which would happen only when the model is recorded",
            "change it outside forward, or make it a buffer",
        )  # fmt: skip
    if not isinstance(answer, Tensor) or answer.numel() != 1 or not answer.requires_grad:
        raise Refused("the loss", "hc.pipeline", "it is no tensor of one element that depends on parameters",
                      "let the loss return such a tensor")  # fmt: skip
    return ModelRecord(recorder.values, recorder.calls, entered, recorder.number_of(answer), recorder.finish(), draws)
