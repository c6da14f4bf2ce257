"""What ``halocline check`` is asked to do: which network, on which inputs, cut how. All that a rank must know."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..arrangement import axis_meant
from ..errors import HaloclineError, did_you_mean
from ..layout import AUTO_LAYOUTS
from ..workloads import WORKLOADS
from ..zoo import draw, entry_of, find_zoo, load, split

DTYPES = {"float64": torch.float64, "float32": torch.float32}
COMPLEX = {"float64": torch.complex128, "float32": torch.complex64}
#: Axes and the dims of the volume that they cut; spatial ones count from the end.
DIMS = {"data": 0, "depth": -3, "height": -2, "width": -1}
MODEL = "model"  # the axis that a workload's own layout cuts


class BadUsage(HaloclineError, ValueError):
    """A check that cannot be run as asked. The message says what is allowed."""


@dataclass(frozen=True)
class NetworkTask:
    """One check, the same on every rank: the network by name, its inputs by shape, and the cut.

    The first input is the volume.
    """

    target: str
    arguments: Mapping[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    cut: Mapping[str, int]
    dtype: str = "float64"
    steps: int = 0
    seed: int = 0
    layout: Mapping[str, Mapping[int, str]] | str = field(default_factory=dict)  # or "auto"

    @property
    def ranks(self) -> int:
        """Number of ranks that the cut takes."""
        return math.prod(self.cut.values())

    def dims(self, index: int) -> dict[int, str]:
        """{dim: axis} for one input: cut as the volume is if the spatial size is the same, else whole."""
        volume, shape = self.shapes[0], self.shapes[index]
        spatial = volume[2:]
        if index and not (spatial and shape[-len(spatial) :] == spatial):
            return {}
        same_batch = len(shape) > len(spatial) and shape[0] == volume[0]
        axes = [axis for axis in self.cut if axis in DIMS and (axis != "data" or same_batch)]
        return {DIMS[axis] % len(shape): axis for axis in axes}


def make_task(
    target: str,
    arguments: Mapping[str, Any] | None = None,
    shapes: Sequence[Sequence[int]] | None = None,
    ranks: int | None = None,
    cut: Mapping[str, int] | None = None,
    dtype: str = "float64",
    steps: int = 0,
    seed: int = 0,
    layout: Mapping[str, Mapping[int, str]] | str | None = None,
) -> NetworkTask:
    """Defaults filled in, and everything checked that can be checked without running."""
    if dtype not in DTYPES:
        raise BadUsage(f"no dtype {dtype!r} here{did_you_mean(dtype, DTYPES)}; it is {' or '.join(DTYPES)}")
    if steps < 0:
        raise BadUsage(f"{steps} steps: the number of optimizer steps is 0 or more")
    entry = entry_of(target)
    if entry is not None:
        if arguments or shapes:
            raise BadUsage(f"{target} has arguments and inputs of its own; leave out those given")
        dtype = entry.dtype if dtype == "float64" else dtype
        sizes, arguments = entry.shapes, {}
    else:
        sizes = _shapes(target, shapes)
        arguments = {**(WORKLOADS[target].fit(sizes) if target in WORKLOADS else {}), **(arguments or {})}
    named = _layout(target, cut or {}, layout)
    if isinstance(named, str):
        of_layout = set(cut or {}) - set(axes_of(sizes[0]))
    else:
        of_layout = {axis for dims in named.values() for axis in dims.values()}
    given = _cut(sizes[0], ranks, cut, of_layout)
    return NetworkTask(target, arguments, sizes, given, dtype, steps, seed, named)


def _layout(
    target: str, cut: Mapping[str, int], layout: Mapping[str, Mapping[int, str]] | str | None
) -> Mapping[str, Mapping[int, str]] | str:
    """The layout that was given, or a workload's own where the cut has an axis ``model``; tables lie with samples."""
    if isinstance(layout, str):
        if layout not in AUTO_LAYOUTS:
            raise BadUsage(f"no layout {layout!r}; it is {' or '.join(AUTO_LAYOUTS)}, or names of parameters as JSON")
        return layout
    tables = WORKLOADS[target].tables if target in WORKLOADS else ()
    if layout is None and MODEL not in cut and "data" in cut:
        return {name: {0: "data"} for name in tables}
    own = WORKLOADS[target].layout if target in WORKLOADS else None
    if layout is None and MODEL in cut and own is not None:
        return own(MODEL)
    if not layout and MODEL in cut:
        raise BadUsage(
            f"{target} has no layout of its own for {MODEL}={cut[MODEL]}; name its weights with --layout, or give "
            "--layout auto"
        )
    return layout or {}


def _shapes(target: str, shapes: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
    """The shapes of the inputs: those given, or those of the workload; raises for shapes that do not fit it."""
    known = WORKLOADS.get(target)
    if known is None and ":" not in target:
        known_names = ", ".join(WORKLOADS)
        hint = did_you_mean(target, WORKLOADS)
        words = f"no network {target!r}{hint}; it is {known_names}, or package.module:factory, or such as monai/UNet"
        raise BadUsage(words)
    if known is None and not shapes:
        raise BadUsage(f"what goes into {target}? Give a shape for each input, such as --shape 1,1,32,32,32")
    sizes = tuple(tuple(shape) for shape in shapes or known.shapes)  # type: ignore[union-attr]
    if not all(shape and min(shape) > 0 for shape in sizes):
        raise BadUsage(f"a shape is a row of sizes from 1, such as 1,1,32,32,32; got {_text(*sizes)}")
    if known and [len(shape) for shape in sizes] != [len(shape) for shape in known.shapes]:
        dims = len(known.shapes[0])
        raise BadUsage(f"{target} takes one input of {dims} dims such as {_text(*known.shapes)}; got {_text(*sizes)}")
    return sizes


def _text(*shapes: Sequence[int]) -> str:
    return " and ".join(",".join(map(str, shape)) for shape in shapes)


def _cut(
    volume: Sequence[int], ranks: int | None, cut: Mapping[str, int] | None, of_layout: Collection[str]
) -> dict[str, int]:
    """The cut as asked for, or the volume's first spatial dim over all ranks (two by default)."""
    allowed = axes_of(volume)
    plan = dict(cut) if cut else {allowed[min(1, len(allowed) - 1)]: 2 if ranks is None else ranks}
    unknown = [axis for axis in plan if axis not in allowed and axis not in of_layout]
    if unknown:
        axes, near = ", ".join(allowed), axis_meant(unknown[0], allowed)
        raise BadUsage(f"no axis {unknown[0]!r} to cut an input of {_text(volume)} with{near}; its axes are {axes}")
    shown = ",".join(f"{axis}={size}" for axis, size in plan.items())
    if min(plan.values()) < 1:
        raise BadUsage(f"the cut {shown}: each axis is cut over one rank or more")
    product = math.prod(plan.values())
    if ranks is not None and product != ranks:
        raise BadUsage(f"the cut {shown} makes {product} ranks, not {ranks}; leave out --ranks, or make the two equal")
    return plan


def axes_of(volume: Sequence[int]) -> list[str]:
    """Batch and channels come first, so a spatial axis needs a dim behind them."""
    return [axis for axis, dim in DIMS.items() if axis == "data" or len(volume) + dim >= 2]


def remarks(task: NetworkTask, cores: int) -> list[str]:
    """What makes a cut slow, or leaves ranks without work, in words."""
    found = []
    if task.ranks > cores:
        found.append(f"{task.ranks} ranks share {cores} core{'s' if cores > 1 else ''}: the check takes longer")
    for axis, parts in task.cut.items():
        size = task.shapes[0][DIMS[axis]] if axis in DIMS else parts
        if parts > size:
            found.append(f"{axis}={parts} cuts a dim of {size}: {parts - size} ranks of each row hold nothing")
    return found


def make_model(task: NetworkTask) -> nn.Module:
    """From the task's seed. Weights are drawn in torch's default dtype, so every dtype has the same ones."""
    factory = find_factory(task.target)
    torch.manual_seed(task.seed)
    try:
        model = factory(**task.arguments)
    except HaloclineError:
        raise
    except Exception as error:
        raise BadUsage(f"{task.target} cannot be built with {dict(task.arguments)}: {error}") from error
    if not isinstance(model, nn.Module):
        raise BadUsage(f"{task.target} gave a {type(model).__name__}; it must return a torch.nn.Module")
    return _cast_model(model, task)


def _cast_model(model: nn.Module, task: NetworkTask) -> nn.Module:
    """``model.to(dtype)``, but for complex weights: of those it would take the real part, and they stay complex."""
    complex_ones = {t: t.detach() for t in (*model.parameters(), *model.buffers()) if t.is_complex()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Casting complex values to real")
        model = model.to(DTYPES[task.dtype])
    for tensor, values in complex_ones.items():
        tensor.data = _cast(values, task)
    return model


def find_factory(target: str) -> Callable[..., Any]:
    """A workload's, that of a zoo's network, or ``package.module:factory`` (as seen from the current folder)."""
    if target in WORKLOADS:
        return WORKLOADS[target].factory
    if (parts := split(target)) is not None:
        return partial(find_zoo(parts[0]).build, parts[1])
    try:
        factory = load(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadUsage(
            f"cannot find {target}: {error}; it is package.module:factory, seen from {Path.cwd()}"
        ) from error
    if not callable(factory):
        raise BadUsage(f"{target} is a {type(factory).__name__}; it must be a function that returns a torch.nn.Module")
    return factory


def make_inputs(task: NetworkTask) -> list[Tensor]:
    """The same numbers for every dtype; whole numbers stay what they are."""
    generator = torch.Generator().manual_seed(task.seed + 1)
    entry = entry_of(task.target)
    tokens = WORKLOADS[task.target].tokens if task.target in WORKLOADS else None
    if tokens is not None:
        return [torch.randint(tokens, shape, generator=generator) for shape in task.shapes]
    return [_cast(tensor, task) for tensor in draw(entry.inputs if entry else task.shapes, generator)]


def make_keywords(task: NetworkTask) -> dict[str, Any]:
    """What a zoo's network is given besides its inputs, whole on every rank."""
    entry = entry_of(task.target)
    given = entry.keywords if entry is not None else {}
    return {name: _cast(value, task) if isinstance(value, Tensor) else value for name, value in given.items()}


def _cast(tensor: Tensor, task: NetworkTask) -> Tensor:
    if tensor.is_complex():
        return tensor.to(COMPLEX[task.dtype])
    return tensor.to(DTYPES[task.dtype]) if tensor.is_floating_point() else tensor
