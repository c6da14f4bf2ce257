"""Where a step's time on the GPU goes: kernels by family."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from .gpu_case import GpuCase, GpuStep, synchronize

COSTLIEST = 25
WARM_UPS = 2
OTHER = "other"

# The first that matches counts. Kernels of cuBLAS, CUTLASS and cuDNN name their whole template, copies included, and
# those that torch.compile writes name the operations before and after them, so the order matters.
PATTERNS = (
    ("pools", r"pool"),
    ("optimizer", r"multi_tensor|fused_?sgd"),
    ("copies and casts", r"nchwtonhwc|nhwctonchw|converttensor"),
    ("convolutions", r"xmma|gemm|cutlass|nvjet|wgrad|dgrad|fprop|winograd|vol2col|col2vol|triton_tem"),
    ("convolutions", r"^(?!.*triton_(poi|red|per)).*conv(?!ert)"),
    ("norms", r"norm(?!al)|bn_(fw|bw)|moments|welford"),
    ("activations and other pointwise", r"triton_(poi|red|per)"),
    ("copies and casts", r"memcpy|memset|copy|catarray|fill|transpose"),
    ("activations and other pointwise", r"elementwise|relu|elu_|threshold|sigmoid|pointwise"),
)
FAMILIES = [*dict.fromkeys(family for family, _ in PATTERNS), OTHER]


def family_of(kernel: str) -> str:
    """By its name; matrix products count as convolutions, which cuDNN turns into them."""
    name = kernel.lower()
    return next((family for family, pattern in PATTERNS if re.search(pattern, name)), OTHER)


def profile_step(case: GpuCase, device: str) -> dict[str, Any]:
    """One step after warm-up. Time is the kernels' own; what runs side by side is counted twice."""
    step = GpuStep(case, device)
    for _ in range(WARM_UPS):
        step()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        synchronize(device)
    return {"subject": case.subject, "size": case.size, "way": case.way, **shares(kernels(profiler.events() or []))}


def kernels(events: Iterable[Any]) -> list[tuple[str, float]]:
    """Name and milliseconds of everything that ran on the GPU. Spans that a program marks are not kernels."""
    return [
        (event.name, event.time_range.elapsed_us() / 1e3)
        for event in events
        if event.device_type.name == "CUDA" and not marked(event)
    ]


def marked(event: Any) -> bool:
    return getattr(event, "is_user_annotation", False) or event.name.startswith(("Optimizer.", "ProfilerStep"))


def shares(ran: list[tuple[str, float]]) -> dict[str, Any]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, ms in ran:
        by_name[name].append(ms)
    total = sum(ms for _, ms in ran)
    of_family = {family: sum(ms for name, ms in ran if family_of(name) == family) for family in FAMILIES}
    costliest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:COSTLIEST]
    return {
        "gpu_ms": total,
        "families": {name: {"ms": ms, "share": ms / total if total else 0.0} for name, ms in of_family.items()},
        "kernels": [{"name": name, "ms": sum(all_ms), "calls": len(all_ms)} for name, all_ms in costliest],
    }
