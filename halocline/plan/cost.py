"""What a local operation costs on a device, in seconds.

A measured time of the same operation, dtype and local shapes counts first. Otherwise the roofline does: arithmetic at
an efficiency that grows with the work, or memory traffic, whichever is slower, and never less than a launch. A time at
one shape is never scaled to another by the ratio of sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import HaloclineError
from ..world.events import Computed
from .machine import Device

Key = tuple[str, str, tuple[tuple[int, ...], ...], float, int]  # operation, dtype, operands, FLOPs, bytes

_INTEGERS = ("int", "uint", "bool")


def key_of(event: Computed) -> Key:
    return event.name, str(event.dtype).removeprefix("torch."), event.shapes, event.flops, event.bytes


@dataclass(frozen=True)
class Prices:
    """Times of operations on one device: measured ones, and the roofline for the rest."""

    device: Device
    measured: dict[Key, float] = field(default_factory=dict)

    def seconds(self, event: Computed) -> float:
        known = self.measured.get(key_of(event))
        return known if known is not None else self.roofline(event)

    def roofline(self, event: Computed) -> float:
        device = self.device
        moved = event.bytes / (device.memory_gb_per_s.value * 1e9 * device.memory_efficiency.value)
        work = event.flops / 1e9
        share = device.efficiency.value * work / (work + device.half_work_gflop.value)
        arithmetic = work / (self._peak(event) * 1e3 * share) if work else 0.0
        return max(moved, arithmetic if self._multiplies(event) else 0.0, device.launch_us.value * 1e-6)

    def _multiplies(self, event: Computed) -> bool:
        """Only convolutions and products are bound by arithmetic; all else by memory."""
        return event.flops > 4 * sum(_count(shape) for shape in event.shapes)

    def _peak(self, event: Computed) -> float:
        name = str(event.dtype).removeprefix("torch.")
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


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
