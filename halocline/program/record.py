"""Write down a step: every local operation, forward and backward, and every exchange and sum, in order.

The same recorder serves a dry run (one rank of any number, on meta tensors) and a real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .._torch_private import TorchDispatchMode, in_backward, item_operator, schema_of
from ..errors import Refused
from ..rules import planning
from ..tensor import here
from ..tree import tensors_in
from ..world import Begun, Computed, DryWorld, Event, Mesh, Summed, World, as_world
from .work import flops, size_of


@dataclass(frozen=True)
class Record:
    """What one rank does in a step, in order."""

    rank: int
    ranks: int
    events: tuple[Event, ...]

    @property
    def operations(self) -> list[Computed]:
        """Local operations in the order in which they ran, backward's and the optimizer's too."""
        return [event for event in self.events if isinstance(event, Computed)]

    @property
    def exchanges(self) -> list[Begun]:
        """Messages between ranks, in the order in which they were begun."""
        return [event for event in self.events if isinstance(event, Begun)]

    @property
    def sums(self) -> list[Summed]:
        """All-reduces, with the bytes of one rank's operand."""
        return [event for event in self.events if isinstance(event, Summed)]

    @property
    def flops(self) -> float:
        """Floating-point operations of this rank alone."""
        return sum(operation.flops for operation in self.operations)

    @property
    def messages(self) -> int:
        """Point-to-point messages that this rank sends."""
        return sum(len(exchange.sends) for exchange in self.exchanges)

    @property
    def sent_bytes(self) -> int:
        """What the transport is handed: messages, and rings at the size of what they sum."""
        return sum(size for e in self.exchanges for _, size in e.sends) + sum(total.bytes for total in self.sums)

    def to_json(self) -> str:
        """The events as objects with their type in "event"; dtypes as text."""
        events = [{"event": type(event).__name__, **event._asdict()} for event in self.events]
        return json.dumps({"rank": self.rank, "ranks": self.ranks, "events": events}, default=str)


class OperationWatch(TorchDispatchMode):
    """Calls ``seen(event, function, args, kwargs)`` for each local operation inside that takes time on a device.

    It stands below autograd, so that it sees operations of backward too. What is run to plan a call is left out.
    """

    def __init__(self, world: World, seen: Callable[[Computed, Any, Any, Any], object]) -> None:
        super().__init__()
        self._world, self._seen = world, seen

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not planning() and not is_free(function):
            self._seen(computed(self._world, function, args, result), function, args, kwargs or {})
        return result


class _OperationEvents(OperationWatch):
    """Emits local operations as events of the world."""

    def __init__(self, world: World) -> None:
        super().__init__(world, lambda event, *_: world.emit(event))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is item_operator and args[0].is_meta:
            raise Refused(
                "item",
                here(),
                "it needs a value, and a dry run has shapes only (a branch on data, or .item())",
                "take the value outside the recorded step, or give the branch a fixed answer",
            )
        return super().__torch_dispatch__(function, types, args, kwargs)


def is_free(function: Any) -> bool:
    """Views, memory that is not written yet, marks for a profiler and scalars of the host cost a device nothing."""
    name = schema_of(function).name
    if "empty" in name or name.startswith("profiler::") or function is item_operator:
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(function).returns)


def computed(world: World, function: Any, args: Any, result: Any) -> Computed:
    """The event of one local operation."""
    inputs = tensors_in(args)
    name, asked = _as_elsewhere(schema_of(function).name.removeprefix("aten::"), args)
    return Computed(
        next(world.events.numbers),
        world.number,
        world.events.clock(),
        name=name,
        place=here(),
        phase="backward" if in_backward() else "forward",
        shapes=tuple(tuple(tensor.shape) for tensor in inputs),
        dtype=inputs[0].dtype if inputs else None,
        flops=flops(function, args, result),
        bytes=size_of(inputs) + size_of(result),
        options=tuple(map(_frozen, asked)),
    )


def _as_elsewhere(name: str, args: Any) -> tuple[str, Any]:
    """A kernel that CPUs alone have as the call that stands in its place on other devices and on meta tensors."""
    if name == "batch_norm_update_stats":
        return "var_mean", (args[0], [dim for dim in range(args[0].ndim) if dim != 1])
    return name, args


def _frozen(argument: Any) -> object:
    """An argument as part of a key; None for tensors and for numbers that change from step to step."""
    if isinstance(argument, int):
        return argument
    if isinstance(argument, list | tuple) and all(isinstance(item, int) for item in argument):
        return tuple(argument)
    return None


def record(step: Callable[[], object], mesh: Mesh) -> Record:
    """Run ``step()`` and return the events of all that this rank did in it."""
    world, events = mesh.world, list[Event]()
    with world.events.listening(events.append), _OperationEvents(world):
        step()
    return Record(world.rank, world.size, tuple(events))


@contextmanager
def dry(rank: int, ranks: int) -> Iterator[None]:
    """Inside, this thread is rank ``rank`` of ``ranks`` and nothing moves: build mesh, model and inputs on "meta"."""
    with as_world(DryWorld(rank, ranks)):
        yield
