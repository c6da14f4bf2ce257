"""What a task computes: so many iterations of a fixed piece of work, on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Kernel = Callable[[int], object]

DOUBLES = 2048  # of one iteration of the compute-bound kernel: they stay in the cache
SCRATCH, SAMPLES = 1 << 25, 512  # bytes that the memory-bound kernel goes round, and pieces they are copied in
MICROSECOND = 1e-6  # one iteration of the kernels that wait
#: What one iteration does, in the unit by which a rate is told.
WORK = {
    "empty": (0.0, "tasks"),
    "busy_wait": (MICROSECOND, "seconds"),
    "sleep": (MICROSECOND, "seconds"),
    "compute_bound": (2.0 * DOUBLES, "FLOP"),
    "load_imbalance": (2.0 * DOUBLES, "FLOP"),
    "memory_bound": (float(SCRATCH // SAMPLES), "bytes"),
}


def make_kernel(name: str) -> Kernel:
    """A function of the number of iterations."""
    others = {"empty": _empty, "busy_wait": _busy_wait, "sleep": _sleep, "memory_bound": _memory_bound}
    return others.get(name, _compute_bound)()


def _empty() -> Kernel:
    return lambda iterations: None


def _busy_wait() -> Kernel:
    """An iteration is a microsecond by the clock: a task takes the same time on every machine."""

    def wait(iterations: int) -> None:
        end = time.perf_counter() + iterations * MICROSECOND
        while time.perf_counter() < end:
            pass

    return wait


def _sleep() -> Kernel:
    """For emulated clusters, whose ranks are more than the cores. Sleeps that were too long shorten the next."""
    debt = 0.0

    def sleep(iterations: int) -> None:
        nonlocal debt
        debt += iterations * MICROSECOND
        began = time.perf_counter()
        if debt > 0:
            time.sleep(debt)
            debt -= time.perf_counter() - began

    return sleep


def _compute_bound() -> Kernel:
    """``a * a + b`` on numbers that stay as they are: iterates would grow beyond all bounds."""
    a, b, result = (torch.full((DOUBLES,), value, dtype=torch.float64) for value in (0.5, 0.25, 0.0))
    fused = torch.addcmul

    def compute(iterations: int) -> None:
        for _ in range(iterations):
            fused(b, a, a, out=result)

    return compute


def _memory_bound() -> Kernel:
    """Copy piece after piece of more memory than caches hold, going on where the last call stopped."""
    pieces = torch.ones(2, SAMPLES, SCRATCH // SAMPLES // 8, dtype=torch.float32)  # half read, half written
    place = 0

    def copy(iterations: int) -> None:
        nonlocal place
        for _ in range(iterations):
            pieces[1, place].copy_(pieces[0, place])
            place = (place + 1) % SAMPLES

    return copy
