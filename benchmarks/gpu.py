"""``bench gpu``: a training step on one GPU, plain PyTorch beside this library, each case in a process of its own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from halocline.errors import HaloclineError

from .gpu_case import PLAIN, WAYS, GpuCase, card, ceilings, measure
from .gpu_child import ChildOutcome, Children
from .gpu_count import LIMIT, StepCounts, count_all
from .gpu_networks import MONAI, SUBJECTS, chosen
from .gpu_profile import profile_step

DEADLINE = 120.0  # seconds of a case
OUT_OF_TIME = "not run: out of time"
NOT_INSTALLED = "not installed"
# What every child needs; the optimizers import torch._dynamo.
PRELOADED = ("benchmarks.gpu_profile", "torch._dynamo")
CEILINGS = ("bf16_tflops", "tf32_tflops", "copy_tb_s")

# To put slow cases last: what an H200 does, and how much slower plain torch is beyond the limit.
USUAL_FLOPS, SLOWER, SLOW = 2.5e14, 18, 10.0

Pair = tuple[str, int]  # subject and size
Works = Mapping[Pair, StepCounts | None]
Results = Mapping[str, Mapping[str, Any]]  # by way


class NoGpu(HaloclineError):
    """There is no CUDA GPU to measure."""


@dataclass(frozen=True)
class GpuPlan:
    """What to measure. ``device`` is "cuda", or "cpu" to try the machinery out."""

    pairs: tuple[Pair, ...]
    ways: tuple[str, ...]
    minutes: float = 8.0
    profile: bool = False
    device: str = "cuda"


def make_plan(subjects: Sequence[str], sizes: Sequence[int], ways: Sequence[str], **rest: Any) -> GpuPlan:
    """Of names and sizes as a user gives them; without sizes each subject has its own."""
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise HaloclineError(f"no way {unknown[0]!r}; there are {', '.join(WAYS)}")
    networks = chosen(list(subjects))
    for subject in networks:
        for size in sizes:
            subject.check_size(size)
    pairs = tuple((subject.name, size) for subject in networks for size in sizes or subject.sizes)
    return GpuPlan(pairs, tuple(way for way in WAYS if way in ways), **rest)


def ordered(plan: GpuPlan, works: Works) -> list[GpuCase]:
    """Plain and halocline before the other ways, slow cases after quick ones; else as asked for."""
    cases = [GpuCase(*pair, way) for pair in plan.pairs for way in plan.ways]
    return sorted(cases, key=lambda case: (case.way not in ("plain", "halocline"), is_slow(case, works)))


def is_slow(case: GpuCase, works: Works) -> bool:
    work = works.get((case.subject, case.size))
    if work is None:
        return False
    factor = SLOWER if case.way in PLAIN and work.largest >= LIMIT else 1
    return work.flops / USUAL_FLOPS * factor > SLOW


class GpuTimeLimit:
    """What is left of the command's time."""

    def __init__(self, minutes: float) -> None:
        self.began, self.limit = time.monotonic(), minutes * 60

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        return self.limit - self.elapsed


def measure_gpu(plan: GpuPlan, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Everything of the plan that its time allows for; the rest is listed as not run."""
    if plan.device == "cuda" and not torch.backends.cuda.is_built():
        raise NoGpu("no CUDA GPU: this PyTorch is built without CUDA; run it on a machine with a GPU")
    run = GpuMeasurement(plan, say)
    facts = run.look()
    limits = run.ceilings()
    works = run.count()
    profiled = run.profile() if plan.profile else None
    cases = [run.case(case) for case in ordered(plan, works)]
    return {
        "cases": [with_floor(case, works, limits.value) for case in cases],
        "subjects": [summary(pair, works[pair], by_way(cases, pair), limits.value) for pair in plan.pairs],
        "ceilings": {**(limits.value or dict.fromkeys(CEILINGS)), "error": limits.error},
        "profile": profiled and {**profiled, "floor": floor_of(works[plan.pairs[0]], limits.value)},
        "machine": facts,
        "seconds": run.clock.elapsed,
    }


class GpuMeasurement:
    """The plan being carried out. All that touches the device happens in children."""

    def __init__(self, plan: GpuPlan, say: Callable[[str], None]) -> None:
        self.plan, self._say, self.clock = plan, say, GpuTimeLimit(plan.minutes)
        # Should an import ask whether there is a GPU, let it ask in a way that leaves the server fit to be forked.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self.children = Children([*PRELOADED, *monai_modules(plan)])

    def say(self, text: str) -> None:
        self._say(f"[{self.clock.elapsed:.0f} s] {text}")

    def look(self) -> dict[str, Any]:
        """The machine and its card."""
        return {
            **(self._card() if self.plan.device == "cuda" else {}),
            "torch": torch.__version__,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": " ".join(sys.argv),
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        }

    def _card(self) -> dict[str, Any]:
        card_facts = self.children.call(card, deadline=DEADLINE)
        if "fork" in (card_facts.error or ""):  # something that the server imported has begun CUDA
            self.children.start_afresh()
            card_facts = self.children.call(card, deadline=DEADLINE)
        if card_facts.value is None:
            raise NoGpu(f"no CUDA GPU is found ({card_facts.error or 'torch.cuda.is_available() is False'})")
        return dict(card_facts.value)

    def ceilings(self) -> ChildOutcome:
        sizes = (256, 2**20) if self.plan.device == "cpu" else ()
        outcome = self.children.call(ceilings, self.plan.device, *sizes, deadline=DEADLINE)
        self.say(f"ceilings of the card: {outcome.error or 'measured'}")
        return outcome

    def count(self) -> dict[Pair, StepCounts | None]:
        pairs = [pair for pair in self.plan.pairs if SUBJECTS[pair[0]].installed]
        outcome = self.children.call(count_all, pairs, deadline=DEADLINE)
        self.say(f"work of {len(pairs)} steps: {outcome.error or 'counted'}")
        works = [StepCounts(**one) if one else None for one in outcome.value or []]
        return dict.fromkeys(self.plan.pairs) | dict(zip(pairs, works, strict=False))

    def profile(self) -> dict[str, Any]:
        case = GpuCase(*self.plan.pairs[0], "halocline")
        outcome = self.children.call(profile_step, case, self.plan.device, deadline=DEADLINE)
        self.say(f"profile of {case}: {outcome.error or 'taken'}")
        return {**asdict(case), **(outcome.value or {}), "error": outcome.error}

    def case(self, case: GpuCase) -> dict[str, Any]:
        if not SUBJECTS[case.subject].installed:
            return {**asdict(case), "error": NOT_INSTALLED}
        if self.clock.left <= 0:
            return {**asdict(case), "error": OUT_OF_TIME}
        self.say(f"{case} ...")
        outcome = self.children.call(measure, case, self.plan.device, deadline=min(DEADLINE, self.clock.left))
        late = outcome.error == "deadline" and self.clock.left <= 0
        error = OUT_OF_TIME if late else outcome.error
        self.say(f"{case}: {error or '{ms:.1f} ms'.format(**outcome.value)}")
        return {**asdict(case), **(outcome.value or {}), "error": error, "seconds": outcome.seconds}


def monai_modules(plan: GpuPlan) -> list[str]:
    wanted = any(SUBJECTS[name].package == MONAI and SUBJECTS[name].installed for name, _ in plan.pairs)
    return ["monai.networks.nets"] if wanted else []


def by_way(cases: Iterable[Mapping[str, Any]], pair: Pair) -> dict[str, Mapping[str, Any]]:
    """Those of a pair that ran."""
    return {case["way"]: case for case in cases if (case["subject"], case["size"]) == pair and not case["error"]}


def floor_of(
    work: StepCounts | None, limits: Mapping[str, float] | None, way: str = "plain"
) -> dict[str, float] | None:
    return work.floors(limits, WAYS[way].tf32) if work and limits else None


def with_floor(case: Mapping[str, Any], works: Works, limits: Mapping[str, float] | None) -> dict[str, Any]:
    floor = floor_of(works[case["subject"], case["size"]], limits, case["way"])
    ratio = case["ms"] / max(floor.values()) if floor and not case["error"] else None
    return {**case, "over_floor": ratio}


def summary(pair: Pair, work: StepCounts | None, ran: Results, limits: Mapping[str, float] | None) -> dict[str, Any]:
    """Of a subject at a size: the library beside the fastest plain way, and its memory and losses beside plain's."""
    best = min((way for way in PLAIN if way in ran), key=lambda way: ran[way]["ms"], default=None)
    plain, ours = ran.get("plain", {}), ran.get("halocline", {})
    return {
        "subject": pair[0],
        "size": pair[1],
        "work": asdict(work) if work else None,
        "floor": floor_of(work, limits),
        "best_plain": best,
        "best_plain_ms": ran[best]["ms"] if best else None,
        "halocline_ms": ours.get("ms"),
        "speedup": ran[best]["ms"] / ours["ms"] if best and ours else None,
        "memory_ratio": quotient(ours.get("peak_bytes"), plain.get("peak_bytes")),
        "loss_difference": difference(plain.get("losses", []), ours.get("losses", [])),
    }


def quotient(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None


def difference(plain: Sequence[float | None], ours: Sequence[float | None]) -> float | None:
    """The largest relative difference of losses of the same step; None where there are none, or they overflow."""
    pairs = list(zip(plain, ours, strict=False))
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    if not pairs or len(known) < len(pairs):
        return None
    return max(abs(a - b) / max(abs(a), 1e-30) for a, b in known)
