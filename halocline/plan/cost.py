"""What a local operation costs on a device, in seconds.

A measured time of the same operation, dtype and local shapes counts first, then what measured operations of its kind
say (:mod:`halocline.plan.curves`), then the roofline: arithmetic at an efficiency that grows with the work, or memory
traffic, whichever is slower, and never less than a launch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from .._torch_private import schema_of
from ..errors import HaloclineError
from ..program.work import FORMULAS
from ..world.events import Computed
from .curves import Curves, placed, unfolds
from .machine import Device, Machine, MeasuredOperation, NodeLoad

#: Operation, dtype, shapes of the operands, other arguments, FLOPs, bytes.
Key = tuple[str, str, tuple[tuple[int, ...], ...], tuple[object, ...], float, int]

#: Operations that are bound by arithmetic: those whose work has a formula of its own.
MULTIPLY = frozenset(schema_of(function).name.removeprefix("aten::") for function in FORMULAS)
_INTEGERS = ("int", "uint", "bool")

#: What operations are bound by: the factors of :class:`NodeLoad`.
BOUNDS = ("arithmetic", "unfolding", "memory")


def key_of(event: Computed) -> Key:
    """Operations with the same key take the same time."""
    return event.name, dtype_name(event), event.shapes, event.options, event.flops, event.bytes


def dtype_name(event: Computed) -> str:
    """Such as "float32"; "None" where the operation has no operands."""
    return str(event.dtype).removeprefix("torch.")


def bound_of(event: Computed) -> str:
    """One of ``BOUNDS``. Convolutions that torch unfolds first move far more memory than their operands."""
    if event.name not in MULTIPLY:
        return "memory"
    return "unfolding" if unfolds(placed(event).kind) else "arithmetic"


def event_of(measured: MeasuredOperation) -> Computed:
    """A measured operation, as a record would hold it."""
    dtype = None if measured.dtype == "None" else getattr(torch, measured.dtype)
    facts = measured.shapes, dtype, measured.flops, measured.bytes, measured.options
    return Computed(0, 0, 0.0, measured.name, "", "", *facts)


@dataclass(frozen=True)
class Prices:
    """Times of operations on one device.

    ``speed`` is that of this device over the machine's; ``load`` says how many ranks of the node compute at once.
    """

    device: Device
    measured: dict[Key, float] = field(default_factory=dict)
    speed: float = 1.0
    load: NodeLoad | None = None
    curves: Curves | None = None
    _alone: dict[Key, float] = field(default_factory=dict)  # seconds without other ranks on the node

    def __post_init__(self) -> None:
        if self.curves is None and self.device.operations:
            rows = ((event_of(each), each.us * 1e-6, each.workspace_bytes) for each in self.device.operations)
            fresh = self.device.fresh_gb_per_s
            object.__setattr__(self, "curves", Curves(rows, fresh.value * 1e9 if fresh is not None else None))

    def on(self, machine: Machine, ranks: int, speed: float = 1.0) -> Prices:
        """The same for a run of ``ranks`` ranks on a machine, on a device of that relative speed."""
        return replace(self, load=machine.load(ranks), speed=speed)

    def seconds(self, event: Computed) -> float:
        """Of one operation."""
        key = key_of(event)
        alone = self.measured.get(key) or self._alone.get(key)
        if alone is None:
            measured = self.curves.seconds(event) if self.curves is not None else None
            alone = self._alone[key] = self.roofline(event) if measured is None else measured
        if self.load is not None:
            alone = alone * getattr(self.load, bound_of(event)).value + self.load.host_us.value * 1e-6
        return alone / self.speed

    def by_bound(self, events: Iterable[Computed]) -> dict[str, float]:
        """Seconds of these operations by what bounds them, without the program's own time."""
        host = self.load.host_us.value * 1e-6 if self.load is not None else 0.0
        totals = dict.fromkeys(BOUNDS, 0.0)
        for event in events:
            totals[bound_of(event)] += self.seconds(event) - host / self.speed
        return totals

    def workspace(self, event: Computed) -> int:
        """Bytes that the operation takes while it runs, beside its operands and results."""
        return self.curves.workspace(event) if self.curves is not None else 0

    def roofline(self, event: Computed) -> float:
        """Of an operation of which nothing is known but its work and its bytes."""
        device = self.device
        moved = event.bytes / (device.memory_gb_per_s.value * 1e9 * device.memory_efficiency.value)
        work = event.flops / 1e9
        share = device.efficiency.value * work / (work + device.half_work_gflop.value)
        arithmetic = work / (self._peak(event) * 1e3 * share) if work and event.name in MULTIPLY else 0.0
        return max(moved, arithmetic, device.launch_us.value * 1e-6)

    def _peak(self, event: Computed) -> float:
        """TFLOP/s at the event's dtype; integers and complex numbers count as float32."""
        name = dtype_name(event)
        if name.startswith(_INTEGERS) or name in ("None", "complex64", "complex128"):
            name = "float32"
        peak = self.device.peak_tflops.get(name)  # type: ignore[call-overload]
        if peak is None:
            known = ", ".join(self.device.peak_tflops)
            raise HaloclineError(
                f"{event.name} in {event.place}: {self.device.name} has no peak for {name} in its machine file, which "
                f"knows {known}; add device.peak_tflops.{name}, or plan for one of these dtypes"
            )
        return float(peak.value)
