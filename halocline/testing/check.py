"""Does a network run cut, and is the answer that of one rank? The logic behind ``halocline check``.

One rank is the untouched module on plain tensors in this process. Cut is the same module, built from the same seed, on
real gloo processes. Both sides run the same few lines (``observe.py``). Each rank compares its tensors with those of
one rank and sends the errors, which this module turns into a verdict.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from sys import float_info
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import NoRule, Refused, first_line
from ..layout import cut_share
from ..rules.table import entries, name_of
from ..sizes import usable_cores
from ..world import Mesh, Traffic, init
from .compare import EXACT, relative_error
from .memory import count_every_thread
from .observe import CutSide, Observation, Tensors, named, observe, one_rank
from .pool import RankError, RankPool
from .task import BadUsage, NetworkTask, make_inputs, make_keywords, make_model, make_task, remarks

#: In float32 rounding sets one rank itself apart from the true answer, some tensors far. The cut run may be so many
#: times as far from one rank as that is from its own float64 answer, and need never be nearer than the second number.
SLACK, FLOOR_32 = 10.0, 1e-5
#: In float64, where the network itself computes in less, it may be as many times as far as one rank is from itself with
#: everything one unit in the last place off, and never further than this.
LOOSEST = 1e-5

PARTS = ("operation", "place", "why", "remedy")  # of a refusal
MARK = "_halocline_of_the_inputs"

Errors = dict[str, dict[str, float]]  # by kind and name, as Tensors

__all__ = ["BadUsage", "NetworkReport", "check_network"]


@dataclass
class NetworkReport:
    """The result of a check. Errors are relative; bytes and messages are the worst rank's in one forward and
    backward.

    ``verdict`` is exact, gathered (exact, but gathers use up the memory that the cut saves), wrong or refused.
    """

    target: str
    verdict: str
    output_error: float | None = None
    gradient_error: float | None = None
    worst_parameter: str | None = None
    refusals: list[dict[str, str]] = field(default_factory=list)
    activation_ratio: float | None = None
    moved_bytes: int | None = None
    gathered_bytes: int | None = None
    ranks: int = 1
    cut: dict[str, int] = field(default_factory=dict)
    why: str = ""  # of a verdict that is none of this check's own
    # What follows is more than the verdict needs.
    buffer_error: float | None = None
    loss_error: float | None = None
    tolerance: float | None = None  # for the gradient of the worst parameter
    noise: float | None = None  # of the network itself on one rank, where it was asked for
    gradient_zero: bool = False
    peak_bytes: int | None = None
    one_rank_peak_bytes: int | None = None
    messages: int | None = None
    gathers: dict[str, int] = field(default_factory=dict)  # operation and place: how often
    cut_share: float | None = None  # of the bytes of all parameters: those that the layout cuts
    layout: dict[str, dict[int, str]] = field(default_factory=dict)
    without_rule: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float64"
    steps: int = 0
    seed: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """JSON has no infinity: such an error becomes the largest float."""
        shown = asdict(self)
        return {k: min(v, float_info.max) if isinstance(v, float) else v for k, v in shown.items()}


def check_network(
    target: str,
    *,
    arguments: Mapping[str, Any] | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    ranks: int | None = None,
    cut: Mapping[str, int] | None = None,
    dtype: str = "float64",
    steps: int = 0,
    seed: int = 0,
    layout: Mapping[str, Mapping[int, str]] | str | None = None,
    deadline: float | None = None,
    pool: RankPool | None = None,
    say: Callable[[str], None] = lambda text: None,
    remark: Callable[[str], None] = lambda text: None,
) -> NetworkReport:
    """Run a network on one rank and cut over ``ranks``; compare outputs, gradients, buffers and loss curves.

    ``target`` is a workload's name, ``zoo/network`` or ``package.module:factory``, ``cut`` is such as {"depth": 2}.
    ``layout`` cuts parameters over further axes of ``cut``, as ``hc.distribute`` takes it, or is "auto". ``deadline``
    is in seconds and for the cut run; by default it is many times what one rank took. ``remark`` is told of a cut that
    will be slow, before ranks are started.
    """
    count_every_thread()  # first: tensors made before it are not counted when they are freed
    task = make_task(target, arguments, shapes, ranks, cut, dtype, steps, seed, layout)
    for text in remarks(task, usable_cores()):
        remark(text)
    try:
        return check_task(task, deadline, pool, say)
    except RankError as error:
        if error.outcomes[error.rank].kind != "hung":
            raise
        words = first_line(error).removesuffix(", at")  # the stack follows
        less = " or fewer ranks (--cut)" if task.ranks > 2 else ""
        raise BadUsage(f"{words}; give more time, such as --deadline 600,{less}".rstrip(",")) from error


def check_task(
    task: NetworkTask, deadline: float | None, pool: RankPool | None, say: Callable[[str], None]
) -> NetworkReport:
    """The same for a task that is made already; starts ranks of its own where no ``pool`` is given."""
    started = time.monotonic()
    count_every_thread()
    make_model(task)  # what cannot be built should fail before ranks are started
    with nullcontext(pool) if pool else RankPool(task.ranks) as ready:
        say("one rank: the untouched network")
        try:
            true = one_rank(task)
        except Refused as refusal:  # of what `reproducible` cannot draw alike on one rank and on many
            return _refused(task, [refusal])
        limit = deadline or 120 + 60 * (time.monotonic() - started)
        say(f"{task.ranks} ranks: {', '.join(f'{axis}={size}' for axis, size in task.cut.items())}")
        report = _cut_run(task, true, ready, limit)
    return replace(report, seconds=time.monotonic() - started)


def _cut_run(task: NetworkTask, true: Observation, pool: RankPool, deadline: float) -> NetworkReport:
    """Run the task on the pool and judge it. The tensors of one rank go to the ranks in a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "one-rank.pt"
        torch.save(true.tensors, path)
        try:
            # The library's own deadline is the shorter one, for its error names rank, operation and module.
            results = pool.run(on_rank, task, str(path), deadline / 2, deadline=deadline)
        except RankError as error:
            refusals = [one.error for one in error.outcomes if isinstance(one.error, Refused)]
            if not refusals:  # a refusal is an answer; whatever else ends a rank is an error
                raise
            return _refused(task, refusals)
    return _judged(task, true, results)


# ---- on the ranks ----


@dataclass
class RankResult:
    """What one rank reports: its errors against one rank, the peak of its memory, its traffic in one step, and the
    share of parameters that is cut by which layout."""

    errors: Errors
    peak: int
    traffic: Traffic
    cut_share: float
    layout: Mapping[str, Mapping[int, str]]


def on_rank(task: NetworkTask, path: str, deadline: float) -> RankResult:
    """In a rank process: run the network cut, and compare with the tensors saved at ``path``."""
    count_every_thread()  # first: tensors made before it are not counted when they are freed
    init(deadline)
    with _quiet():
        side = CutSide(task, Mesh(**task.cut))
        answer = observe(side, task.steps)
    errors = _errors(answer.tensors, torch.load(path, mmap=True))
    return RankResult(errors, answer.peak, answer.traffic, cut_share(side.model), side.layout)


@contextmanager
def _quiet() -> Iterator[None]:
    """The report says what was gathered; the log need not. Warnings of the network come from one rank already."""
    log = logging.getLogger("halocline")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def _errors(values: Tensors, true: Tensors) -> Errors:
    """The relative error of each tensor, by kind and name."""
    scale = _largest(true["gradients"])
    return {
        kind: {
            name: _error(values[kind].get(name), true[kind].get(name), scale if kind == "gradients" else 0.0)
            for name in {**true[kind], **values[kind]}
        }
        for kind in true
    }


def _error(value: Tensor | None, true: Tensor | None, scale: float) -> float:
    """No gradient and one of zeros mean the same."""
    if value is None or true is None:
        present = value if true is None else true
        return 0.0 if present is None or not present.any() else inf
    error = relative_error(value, true, scale)
    return error if error == error else inf  # NaN would get lost among maxima


def _largest(tensors: Mapping[str, Tensor]) -> float:
    """The largest entry of any gradient, to which small gradients are compared."""
    return max((t.abs().max().item() for t in tensors.values() if t.numel()), default=0.0)


# ---- the verdict ----


def _report(task: NetworkTask, verdict: str, **figures: Any) -> NetworkReport:
    """A report with what was asked for filled in."""
    cut, shapes, arguments = dict(task.cut), [list(shape) for shape in task.shapes], dict(task.arguments)
    asked = {"cut": cut, "shapes": shapes, "arguments": arguments, "dtype": task.dtype, "steps": task.steps}
    return NetworkReport(task.target, verdict, ranks=task.ranks, seed=task.seed, **asked, **figures)  # type: ignore[arg-type]


def _judged(task: NetworkTask, true: Observation, results: list[RankResult]) -> NetworkReport:
    """The report of a run that came to an end: worst errors, memory and traffic over all ranks."""
    errors = {kind: _maximum([one.errors[kind] for one in results]) for kind in results[0].errors}
    allowed, noise = _allowed(task, true.tensors, errors)
    worst = {kind: _worst(errors[kind], allowed[kind]) for kind in errors}
    right = all(one.error <= one.allowed for one in worst.values())
    peak, gathered = max(one.peak for one in results), max(one.traffic.gathered_bytes for one in results)
    ratio = peak / true.peak if true.peak else None
    return _report(
        task,
        _verdict(right, gathered, ratio, task.ranks),
        output_error=worst["outputs"].error,
        gradient_error=worst["gradients"].error,
        worst_parameter=worst["gradients"].name,
        activation_ratio=ratio,
        moved_bytes=max(one.traffic.moved_bytes for one in results),
        gathered_bytes=gathered,
        buffer_error=worst["buffers"].error,
        loss_error=worst["losses"].error if task.steps else None,
        tolerance=worst["gradients"].allowed,
        noise=noise,
        gradient_zero=not _largest(true.tensors["gradients"]),
        peak_bytes=peak,
        one_rank_peak_bytes=true.peak,
        messages=max(one.traffic.messages for one in results),
        gathers=dict(results[0].traffic.gathers),
        cut_share=results[0].cut_share if task.layout else None,
        layout={name: dict(dims) for name, dims in results[0].layout.items()},
    )


def _verdict(right: bool, gathered: int, ratio: float | None, ranks: int) -> str:
    """Exact, wrong, or gathered: right, but with little memory saved because of gathers."""
    if not right:
        return "wrong"
    return "gathered" if gathered and (ratio or 0.0) > (0.75 if ranks < 4 else 0.5) else "exact"


class Worst(NamedTuple):
    """The tensor that is furthest from what is allowed."""

    name: str | None
    error: float
    allowed: float


def _worst(errors: Mapping[str, float], allowed: Mapping[str, float]) -> Worst:
    # Whole numbers that differ between float32 and float64 are infinitely far apart, and are then not compared.
    name = max(errors, key=lambda one: 0.0 if allowed[one] == inf else errors[one] / allowed[one], default=None)
    return Worst(name, errors[name], allowed[name]) if name is not None else Worst(None, 0.0, 0.0)


def _maximum(errors: list[dict[str, float]]) -> dict[str, float]:
    names = {name for one in errors for name in one}
    return {name: max(one.get(name, 0.0) for one in errors) for name in sorted(names)}


def _allowed(
    task: NetworkTask, tensors: Tensors, errors: Errors
) -> tuple[dict[str, Mapping[str, float]], float | None]:
    """What each tensor may be off by, and the network's own noise where that decides.

    float64: one bound, unless the network itself is less exact (:mod:`.noise`), which is looked at only if the bound is
    not kept. float32: in proportion to how far one rank in float32 is from one rank in float64.
    """
    if task.dtype == "float64":
        if all(error <= EXACT for named in errors.values() for error in named.values()):
            return {kind: _bound(EXACT) for kind in tensors}, None
        noise = _noise(task, tensors)
        bounds = {kind: min(LOOSEST, max(EXACT, SLACK * one)) for kind, one in noise.items()}
        return {kind: _bound(bound) for kind, bound in bounds.items()}, max(noise.values())
    return {
        kind: _bound(FLOOR_32, {name: max(FLOOR_32, SLACK * error) for name, error in errors.items()})
        for kind, errors in _rounding(task, tensors).items()
    }, None


def _noise(task: NetworkTask, tensors: Tensors) -> dict[str, float]:
    """How far one rank is from itself with all numbers off by one unit in the last place, by kind.

    Infinite where whole numbers change (a class, a position): then it says nothing about the others.
    """
    errors = _errors(one_rank(task, nudged=True).tensors, tensors)
    return {kind: max((e for e in named.values() if e != inf), default=0.0) for kind, named in errors.items()}


def _rounding(task: NetworkTask, tensors: Tensors) -> Errors:
    """How far one rank is from float64; a network that fails in float64, from itself with weights and inputs nudged."""
    try:
        exact = one_rank(replace(task, dtype="float64")).tensors
    except BadUsage:
        return _errors(tensors, one_rank(task, nudged=True).tensors)
    wider = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    return _errors(
        {
            kind: {name: tensor.to(wider.get(tensor.dtype, tensor.dtype)) for name, tensor in named.items()}
            for kind, named in tensors.items()
        },
        exact,
    )


def _bound(value: float, known: Mapping[str, float] | None = None) -> Mapping[str, float]:
    """A bound for every name: the one that is known, or else ``value``."""
    return defaultdict(lambda: value, known or {})


def _refused(task: NetworkTask, refusals: Sequence[Refused]) -> NetworkReport:
    """The report of a refusal; where a rule is missing, with all functions that lack one."""
    told = {str(one): {part: getattr(one, part) for part in PARTS} for one in refusals}
    without = functions_without_rule(task) if any(isinstance(one, NoRule) for one in refusals) else []
    return _report(task, "refused", refusals=list(told.values()), without_rule=without)


def functions_without_rule(task: NetworkTask) -> list[str]:
    """Every function that the network calls on something made of its inputs and that no rule covers.

    A run ends at the first of them; this finds the others, by watching the untouched network.
    """
    inputs, missing = make_inputs(task), _MissingRules()
    for tensor in inputs:
        setattr(tensor, MARK, True)
    with missing, torch.no_grad():
        make_model(task)(*inputs, **make_keywords(task))
    return list(missing.names)


class _MissingRules(TorchFunctionMode):
    """Collects the names of functions without a rule, following the tensors that are made of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.known, self.names = entries(), dict[str, None]()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(hasattr(tensor, MARK) for _, tensor in named((args, kwargs or {}))):
            if function not in self.known:
                self.names[name_of(function)] = None
            for _, tensor in named(result):
                setattr(tensor, MARK, True)
        return result
