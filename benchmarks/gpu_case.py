"""What ``bench gpu`` runs in a child: one case, the ceilings of the card, what card it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

import halocline as hc

from .gpu_networks import SUBJECTS

ENOUGH = 3.0  # seconds of timed steps; a first step as long is warm-up enough
MOST_STEPS = 10
LOSSES = 4  # of the first steps, to hold the ways to each other
RATE, MOMENTUM = 1e-3, 0.9
PRODUCT = 8192  # side of the matrices
COPIED = 2**32  # bytes


@dataclass(frozen=True)
class StepMode:
    """How a step is run."""

    halocline: bool = False
    channels_last: bool = True
    compiled: bool = False
    tf32: bool = False  # instead of autocast to bf16


WAYS = {
    "plain": StepMode(),
    "halocline": StepMode(halocline=True),
    "contiguous": StepMode(channels_last=False),
    "compiled": StepMode(compiled=True),
    "tf32": StepMode(tf32=True),
    "halocline-contiguous": StepMode(halocline=True, channels_last=False),
    "halocline-compiled": StepMode(halocline=True, compiled=True),
}
PLAIN = [name for name, way in WAYS.items() if not way.halocline]


@dataclass(frozen=True)
class GpuCase:
    subject: str
    size: int
    way: str

    def __str__(self) -> str:
        return f"{self.subject} {self.size}, {self.way}"


class GpuStep:
    """A training step that can be called again and again."""

    def __init__(self, case: GpuCase, device: str) -> None:
        self.subject, self.way, self.device = SUBJECTS[case.subject], WAYS[case.way], device
        torch.backends.cuda.matmul.allow_tf32 = self.way.tf32  # convolutions may use it anyway, by torch's default
        layout = torch.channels_last_3d if self.way.channels_last else torch.contiguous_format
        self.model = self.subject.model(case.size).to(device=device, memory_format=layout)  # type: ignore[call-overload]
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM)
        self.data = self.subject.data(case.size, device, layout)
        self.forward = self._prepared()

    def _prepared(self) -> Callable[[Tensor], Any]:
        model = hc.distribute(self.model) if self.way.halocline else self.model
        return torch.compile(model) if self.way.compiled else model

    def __call__(self) -> Tensor:
        """The loss; where there is none, a number that tells the gradients."""
        self.optimizer.zero_grad(set_to_none=True)
        self.data.volume.grad = None
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=not self.way.tf32):
            loss = self.subject.loss(self.forward(self.data.volume), self.data)
        loss.backward(None if loss.dim() == 0 else loss.detach())
        if self.subject.trains:
            self.optimizer.step()
        return loss.detach() if loss.dim() == 0 else self._gradient_norm()

    def _gradient_norm(self) -> Tensor:
        norms = [p.grad.float().norm() for p in self.model.parameters() if p.grad is not None]
        return torch.stack(norms).norm()


class Timed:
    """Calls a step, keeps how long it took and what it returned."""

    def __init__(self, step: Callable[[], Tensor], device: str) -> None:
        self.step, self.device = step, device
        self.losses: list[Tensor] = []

    def seconds(self) -> float:
        synchronize(self.device)
        began = time.perf_counter()
        loss = self.step()
        synchronize(self.device)
        self.losses.append(loss)
        return time.perf_counter() - began


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def measure(case: GpuCase, device: str) -> dict[str, Any]:
    """Milliseconds a step (median), the peak of memory meanwhile, and the losses of the first steps."""
    timed = Timed(GpuStep(case, device), device)
    first = timed.seconds()
    if first <= ENOUGH or WAYS[case.way].compiled:  # the first call of a compiled model compiles
        timed.seconds()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    while len(seconds) < MOST_STEPS and sum(seconds) < ENOUGH:
        seconds.append(timed.seconds())
    return {
        "ms": median(seconds) * 1e3,
        "steps": len(seconds),
        "first_ms": first * 1e3,
        "peak_bytes": torch.cuda.max_memory_allocated() if device != "cpu" else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if device != "cpu" else None,
        "losses": [finite(float(loss)) for loss in timed.losses[:LOSSES]],
    }


def finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None


def ceilings(device: str, side: int = PRODUCT, copied: int = COPIED) -> dict[str, float]:
    """What the card gives: TFLOP/s of a matrix product in bf16 and in TF32, TB/s of a copy (read and written)."""
    torch.backends.cuda.matmul.allow_tf32 = True
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = fastest(lambda: target.copy_(source), device)
    return {
        "bf16_tflops": 2 * side**3 / product_seconds(side, torch.bfloat16, device) / 1e12,
        "tf32_tflops": 2 * side**3 / product_seconds(side, torch.float32, device) / 1e12,
        "copy_tb_s": 2 * copied / copy / 1e12,
    }


def product_seconds(side: int, dtype: torch.dtype, device: str) -> float:
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return fastest(lambda: left @ right, device)


def fastest(call: Callable[[], Tensor], device: str, calls: int = 10, rounds: int = 3) -> float:
    """Seconds of a call, of several in a row; the best of some rounds, the first being warm-up."""
    seconds = []
    for _ in range(rounds + 1):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        seconds.append((time.perf_counter() - began) / calls)
    return min(seconds[1:])


def card() -> dict[str, Any] | None:
    """What the GPU is; None where there is none."""
    if not torch.cuda.is_available():
        return None
    facts = torch.cuda.get_device_properties(0)
    return {
        "card": facts.name,
        "memory_bytes": facts.total_memory,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
