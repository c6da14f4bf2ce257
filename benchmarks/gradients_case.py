"""The figures of ``bench gradients``: a case, the bound that it is held against, and what all cases come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from halocline.reduction.buckets.cutting import done_by_need

from .gradients_ranks import AHEAD, OURS, DdpSetting, StepTimes

SMALL = 25.0  # megabytes; DDP puts models below in a bucket or two, and hides next to nothing
#: A step over the bound at most so much; over tuned DDP, and over DDP by default on small ResNets, at least.
TARGETS = {
    "step_over_bound": 1.05,
    "speedup_over_tuned_ddp": 0.98,
    "speedup_over_ddp_small_resnets": 1.4,
    "ahead_over_bound": 1.08,
    "ahead_speedup_over_tuned_ddp": 1.07,
    "ahead_speedup_over_tuned_ddp_resnets": 1.15,
    "bf16_over_ideal_resnets": 1.10,
    "bf16_over_ideal_others": 1.15,
    "lag_over_ideal": 1.12,
    "cpu_over_ddp": 1.1,
    "ahead_cpu_over_ddp": 1.1,
}

Round = Sequence[StepTimes]  # one step, by rank


@dataclass(frozen=True)
class GradientsCase:
    """One model on one cluster; medians over rounds of the slowest rank's seconds."""

    model: str
    nodes: int
    ranks_per_node: int
    megabytes: float
    tensors: int
    emulated: bool
    like_resnet: bool
    compute_s: float
    communication_s: float
    communication: str  # the fastest way of summing all bytes: one tensor, or pieces
    ddp_s: float
    ddp_tuned_s: float
    ddp_tuned: Mapping[str, Any]
    ours_s: float
    bound_s: float
    ahead_s: float  # overlap="next-forward"
    ahead_bound_s: float
    ahead_bf16_s: float
    bf16_communication_s: float
    lag_s: float
    spread: Mapping[str, tuple[float, float]]  # by way: the fastest and the slowest round
    tried: Mapping[str, float]  # settings of DDP, with the time of one step each
    rounds: int
    messages: int | None
    control_messages: int | None
    oversubscribed: bool
    others_share: float | None  # of the cores' time, taken by other programs
    #: By way: seconds of processors a step and rank, of all its threads; the median over rounds of the mean over ranks.
    cpu_s: Mapping[str, float] = field(default_factory=dict)

    def cpu_over_ddp(self, way: str) -> float | None:
        """Beside DDP as it comes; None where it was not measured."""
        ours, ddp = self.cpu_s.get(way), self.cpu_s.get(str(DdpSetting()))
        return ours / ddp if ours is not None and ddp else None

    @property
    def ideal_s(self) -> float:
        return max(self.compute_s, self.communication_s)

    @property
    def small_resnet(self) -> bool:
        return self.like_resnet and self.megabytes < SMALL

    def hidden(self, step: float) -> float:
        """Share of the communication that does not show in a step."""
        return (self.compute_s + self.communication_s - step) / self.communication_s

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "ideal_s": self.ideal_s,
            "ddp_hidden_share": self.hidden(self.ddp_s),
            "ddp_tuned_hidden_share": self.hidden(self.ddp_tuned_s),
            "ours_hidden_share": self.hidden(self.ours_s),
            "bound_hidden_share": self.hidden(self.bound_s),
            "ahead_over_bound": self.ahead_s / self.ahead_bound_s,
            "ahead_speedup_over_tuned_ddp": self.ddp_tuned_s / self.ahead_s,
            "bf16_over_ideal": self.ahead_bf16_s / max(self.compute_s, self.bf16_communication_s),
            "lag_over_ideal": self.lag_s / self.ideal_s,
            "step_over_bound": self.ours_s / self.bound_s,
            "step_over_ideal": self.ours_s / self.ideal_s,
            "ddp_step_over_ideal": self.ddp_s / self.ideal_s,
            "cpu_over_ddp": self.cpu_over_ddp(OURS),
            "ahead_cpu_over_ddp": self.cpu_over_ddp(AHEAD),
            "speedup_over_ddp": self.ddp_s / self.ours_s,
            "speedup_over_tuned_ddp": self.ddp_tuned_s / self.ours_s,
        }


def summary(cases: Sequence[GradientsCase]) -> dict[str, Any]:
    """The worst of the cases with emulated compute: those that compute share two cores, and say less of the network."""
    shown = [case.as_json() for case in cases]
    counted = [one for one in shown if one["emulated"]]
    worst = {key: max((one[key] for one in counted if one[key] is not None), default=None) for key in MOST}
    least = {key: min((one[key] for one in counted), default=None) for key in LEAST}
    small = [case.ddp_s / case.ours_s for case in cases if case.emulated and case.small_resnet]
    resnets = [one for one in counted if one["like_resnet"]]
    others = [one for one in counted if not one["like_resnet"]]
    return {
        **worst,
        **least,
        "speedup_over_ddp_small_resnets": min(small, default=None),
        "ahead_speedup_over_tuned_ddp_resnets": min((o["ahead_speedup_over_tuned_ddp"] for o in resnets), default=None),
        "bf16_over_ideal_resnets": max((one["bf16_over_ideal"] for one in resnets), default=None),
        "bf16_over_ideal_others": max((one["bf16_over_ideal"] for one in others), default=None),
        "targets": TARGETS,
        "cases": shown,
    }


MOST = (
    "step_over_bound",
    "step_over_ideal",
    "ddp_step_over_ideal",
    "ahead_over_bound",
    "lag_over_ideal",
    "cpu_over_ddp",
    "ahead_cpu_over_ddp",
)
LEAST = ("speedup_over_ddp", "speedup_over_tuned_ddp", "ahead_speedup_over_tuned_ddp")


# ---- rounds ----


def slowest(rounds: Sequence[Round]) -> list[float]:
    """By round: seconds of the rank that took longest."""
    return [max(step.seconds for step in steps) for steps in rounds]


def typical(rounds: Sequence[Round]) -> float:
    return median(slowest(rounds))


def typical_cpu(rounds: Sequence[Round]) -> float:
    return median(sum(step.cpu for step in steps) / len(steps) for steps in rounds)


def spread(seconds: Sequence[float]) -> tuple[float, float]:
    return min(seconds), max(seconds)


# ---- the bound ----


def bound(rounds: Sequence[Round], sizes: Sequence[int], bytes_per_second: float) -> float:
    """Seconds of the best step that any schedule could have which only overlaps with backward.

    From compute alone: when each gradient has come, counted from the start of the step (so that forward is in it), by
    rank the median of all rounds, and of these the latest rank's, for a sum waits for all. From communication alone:
    how many bytes a second are summed. A wire that is never idle while a gradient waits is done at the largest, over
    all gradients, of the moment at which one comes plus the time that it and all that come after it take; grouping
    costs nothing, and a message may hold any part of a tensor. The step is not over before backward is, and then the
    optimizer runs, which starts when all sums are there.
    """
    ready = [worst_rank([[step.ready[index] for step in steps] for steps in rounds]) for index in range(len(sizes))]
    backward = worst_rank([[step.forward + step.backward for step in steps] for steps in rounds])
    optimizer = worst_rank([[step.optimizer for step in steps] for steps in rounds])
    return max(earliest_finish(ready, sizes, bytes_per_second), backward) + optimizer


def bound_ahead(rounds: Sequence[Round], sizes: Sequence[int], bytes_per_second: float) -> float:
    """Seconds of the best step, of many in a row, that any schedule could have which is synchronous.

    A gradient may travel from when it comes until the next forward needs its parameter. What the wire does at any
    moment, of all that waits, is what is needed first, a part of a tensor if need be: no order does better. A step
    takes as long as its computing, or as much longer as the latest of them is late.
    """

    def typical_of(kind: str) -> list[float]:
        return [
            worst_rank([[getattr(s, kind)[index] for s in steps] for steps in rounds]) for index in range(len(sizes))
        ]

    compute = worst_rank([[step.seconds for step in steps] for steps in rounds])
    ready, needed = typical_of("ready"), typical_of("needed")
    done = done_by_need(ready, needed, [size / bytes_per_second for size in sizes])
    return max(compute, *(end - need for end, need in zip(done, needed, strict=True)))


def worst_rank(rounds: Sequence[Sequence[float]]) -> float:
    """By rank the median over rounds; the largest of them."""
    return max(median(figures) for figures in zip(*rounds, strict=True))


def earliest_finish(ready: Sequence[float], sizes: Sequence[int], bytes_per_second: float) -> float:
    """
    >>> earliest_finish([1.0, 4.0], [20, 10], bytes_per_second=10)  # the wire waits from 3 to 4
    5.0
    """
    finish, left = 0.0, 0
    for moment, size in sorted(zip(ready, sizes, strict=True), reverse=True):
        left += size
        finish = max(finish, moment + left / bytes_per_second)
    return finish
