"""Does a network run cut, and is the answer that of one rank? The logic behind ``halocline check``.

One rank is the untouched module on plain tensors in this process. Cut is the same module, from the same seed, on real
gloo processes. Both sides run the same few lines below; each rank holds its answer against the one-rank answer.
"""

from __future__ import annotations

import importlib
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import HaloclineError, NoRule, Refused
from ..rules.table import entries, name_of
from ..workloads import WORKLOADS
from .compare import EXACT, relative_error
from .memory import peak_bytes
from .pool import RankError, RankPool

#: In float32 rounding alone sets one rank apart from the true answer, for some tensors far. The cut run may be this
#: many times as far from one rank as one rank is from its own float64 answer, and is never asked to be nearer than ...
SLACK_32, FLOOR_32 = 10.0, 1e-5
DTYPES = {"float64": torch.float64, "float32": torch.float32}
#: Axes that cut a dim of the volume; spatial ones count from the end.
DIMS = {"data": 0, "depth": -3, "height": -2, "width": -1}
RATE, MOMENTUM = 0.01, 0.9  # of the optimizer that --steps trains with


class BadUsage(HaloclineError, ValueError):
    """A check that cannot be run as asked. The message says what is allowed."""


@dataclass(frozen=True)
class Task:
    """All that a rank must know."""

    target: str
    arguments: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    cut: Mapping[str, int]
    dtype: str
    steps: int
    seed: int

    @property
    def ranks(self) -> int:
        return math.prod(self.cut.values())


@dataclass
class Report:
    """What was found. Errors are relative, bytes and messages those of the worst rank in one forward and backward."""

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
    # The rest is more than the verdict needs.
    buffer_error: float | None = None
    loss_error: float | None = None
    tolerance: float | None = None  # of the worst parameter
    gradient_zero: bool = False
    peak_bytes: int | None = None
    one_rank_peak_bytes: int | None = None
    messages: int | None = None
    gathers: dict[str, int] = field(default_factory=dict)
    without_rule: list[str] = field(default_factory=list)
    dtype: str = "float64"
    steps: int = 0
    seed: int = 0
    shapes: list[list[int]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Only what JSON has: an infinite error becomes the largest float."""
        return {name: _finite(value) for name, value in asdict(self).items()}


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
    deadline: float | None = None,
    pool: RankPool | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Run a network on one rank and cut over ``ranks``, and compare outputs, gradients, buffers and loss curves.

    ``target`` names a workload, or a function as ``package.module:factory``. ``cut`` is such as {"depth": 2}.
    ``deadline``: seconds for the cut run; by default many times what one rank took.
    """
    started = time.monotonic()
    task = make_task(target, arguments, shapes, ranks, cut, dtype, steps, seed)
    build(task)  # or a bad factory would be found only after the ranks have started
    with pool_of(task.ranks, pool) as ranks_pool:
        say("one rank: the untouched network")
        true = one_rank(task)
        limit = deadline or 120 + 60 * (time.monotonic() - started)
        say(f"{task.ranks} ranks: {', '.join(f'{axis}={size}' for axis, size in task.cut.items())}")
        report = _cut_run(task, true, ranks_pool, limit)
    return replace(report, seconds=time.monotonic() - started)


def _cut_run(task: Task, true: Truth, pool: RankPool, deadline: float) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "one-rank.pt")
        torch.save(asdict(true), path)
        try:
            found = pool.run(on_rank, task, path, deadline / 2, deadline=deadline)
        except RankError as error:
            return refused(task, error)
    return judge(task, true, found)


# ---- what was asked for ----


def make_task(
    target: str,
    arguments: Mapping[str, Any] | None,
    shapes: Sequence[Sequence[int]] | None,
    ranks: int | None,
    cut: Mapping[str, int] | None,
    dtype: str,
    steps: int,
    seed: int,
) -> Task:
    """Defaults filled in, everything checked that can be checked without running."""
    known = WORKLOADS.get(target)
    if not known and ":" not in target:
        raise BadUsage(f"no network {target!r}; it is {', '.join(WORKLOADS)}, or package.module:factory")
    if not shapes and not known:
        raise BadUsage(f"what goes into {target}? Give --shape, such as --shape 1,1,32,32,32, once for each input")
    sizes = tuple(tuple(shape) for shape in shapes or (known.shapes if known else ()))
    if any(len(shape) < 1 or min(shape) < 1 for shape in sizes):
        raise BadUsage(f"a shape is a row of sizes from 1, such as 1,1,32,32,32; got {_list(sizes)}")
    if known and len(sizes[0]) != len(known.shapes[0]):
        want = len(known.shapes[0])
        raise BadUsage(f"{target} takes {want} dims (batch, channels, depth, height, width); got {_list(sizes[0])}")
    if dtype not in DTYPES:
        raise BadUsage(f"no dtype {dtype!r} here; it is {' or '.join(DTYPES)}")
    if steps < 0:
        raise BadUsage(f"--steps {steps}: it is a number of optimizer steps, from 0")
    fitted = known.fit(sizes) if known else {}
    plan = checked_cut(sizes[0], ranks, cut)
    return Task(target, {**fitted, **(arguments or {})}, sizes, plan, dtype, steps, seed)


def checked_cut(volume: Sequence[int], ranks: int | None, cut: Mapping[str, int] | None) -> dict[str, int]:
    """The cut as asked for, or the volume's first spatial dim cut over all ranks."""
    allowed = axes_of(volume)
    plan = dict(cut) if cut else {next(axis for axis in (*allowed[1:], "data")): 2 if ranks is None else ranks}
    for axis, size in plan.items():
        if axis not in allowed:
            raise BadUsage(
                f"no axis {axis!r} to cut an input of {len(volume)} dims {_list(volume)}; its axes are {', '.join(allowed)}"
            )
        if size < 1:
            raise BadUsage(f"{axis}={size}: a cut is a number of ranks, from 1")
    product = math.prod(plan.values())
    if ranks is not None and product != ranks:
        shown = ",".join(f"{axis}={size}" for axis, size in plan.items())
        raise BadUsage(f"the cut {shown} makes {product} ranks, not {ranks}; leave out --ranks or make them equal")
    return plan


def axes_of(volume: Sequence[int]) -> list[str]:
    """Batch and channels come first, so a spatial axis needs a dim behind them."""
    return [axis for axis, dim in DIMS.items() if axis == "data" or len(volume) + dim >= 2]


def input_cut(task: Task, index: int) -> dict[int, str]:
    """{dim: axis} of one input: as the volume is cut if the spatial size is the same, else whole."""
    volume, shape = task.shapes[0], task.shapes[index]
    spatial = volume[2:]
    if index and (len(shape) < len(spatial) + 1 or shape[len(shape) - len(spatial) :] != spatial or not spatial):
        return {}
    same_batch = shape[0] == volume[0]
    return {DIMS[axis] % len(shape): axis for axis in task.cut if axis != "data" or same_batch}


def build(task: Task) -> nn.Module:
    """The network, from the task's seed. Weights are drawn in float32, so both dtypes have the same ones."""
    factory = find_factory(task.target)
    torch.manual_seed(task.seed)
    try:
        model = factory(**task.arguments)
    except TypeError as error:
        raise BadUsage(f"{task.target} does not take {dict(task.arguments)}: {error}") from error
    if not isinstance(model, nn.Module):
        raise BadUsage(f"{task.target} gave a {type(model).__name__}; it must return a torch.nn.Module")
    return model.to(DTYPES[task.dtype])


def find_factory(target: str) -> Callable[..., Any]:
    if target in WORKLOADS:
        return WORKLOADS[target].factory
    name, _, attribute = target.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadUsage(f"cannot find {target!r} ({error}); it is looked for from the current folder") from error
    if not callable(found):
        raise BadUsage(f"{target} is a {type(found).__name__}; it must be a function that returns a torch.nn.Module")
    return found


def make_inputs(task: Task) -> list[Tensor]:
    generator = torch.Generator().manual_seed(task.seed + 1)
    return [torch.randn(shape, generator=generator).to(DTYPES[task.dtype]) for shape in task.shapes]


# ---- what both sides do ----


class Side(Protocol):
    """One rank, or one of many: how inputs get into the network and results out of it."""

    model: nn.Module
    leaves: list[Tensor]

    def place(self, index: int, leaf: Tensor) -> Tensor: ...
    def paused(self) -> AbstractContextManager[None]: ...
    def whole(self, output: Tensor) -> Tensor: ...
    def whole_gradient(self, index: int, gradient: Tensor) -> Tensor: ...


@dataclass
class Answer:
    """What a network gave, in whole tensors by name."""

    outputs: dict[str, Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: list[float]
