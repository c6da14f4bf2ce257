"""A layout chosen by cost: which parameters of a model are cut over the axes of a mesh that cut no input."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..arrangement import AXIS_OF_LETTER
from ..errors import MeshError
from ..layout import AUTO_LAYOUTS, Layout
from ..parts.record import meta_copy
from ..program import dry
from ..sizes import size_text
from ..tensor import ShardedTensor
from ..tree import map_tensors, tensors_in
from ..world import Label, Mesh
from ..world.agreement import agree
from ..world.text import broadcast_text
from .calls import Calls, record_calls
from .cost import Prices
from .layout_cost import Decision, LayoutCosts
from .layout_search import LEAST, LayoutSearch, PricedLayout
from .machine import Machine, load_machine

_log = logging.getLogger("halocline")
SHARE = 0.5  # of the parameters' bytes that are cut at least: an axis that cuts nothing else is there for that
HERE = "here.json"  # what `halocline calibrate` writes
USUAL = {"cpu": "cpu", "cuda": "dgx-a100"}  # by device: the machine that prices are those of where none is known
WORTHS = (0.0, 0.1, 1.0, 10.0, 1e6)  # times the price of a byte at which weights are worth a step
_LONGEST = 1 << 18  # bytes of a layout as text
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole word of a parameter's name


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, what it is predicted to cost, and what was compared with it."""

    layout: Layout
    chosen: PricedLayout | None = None
    others: tuple[PricedLayout, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        """For the log: the share of the parameters that is cut, the estimate, and the layout."""
        cuts = ", ".join(f"{name} {dict(dims)}" for name, dims in self.layout.items()) or "every parameter whole"
        if self.chosen is None:
            return f"layout: {self.note}: {cuts}"
        told = f"layout by cost: {said(self.chosen)}"
        whole = next((each for each in self.others if not each.share), None)
        beside = f"; all whole: {said(whole)}" if whole is not None else ""
        return f"{told}{beside}: {cuts}"


def said(priced: PricedLayout) -> str:
    """An estimate in words."""
    return (
        f"{priced.seconds * 1e3:.3g} ms per step ({priced.communication * 1e3:.3g} ms of it communication), "
        f"{size_text(priced.memory)} per rank, {priced.share:.0%} of the parameters cut"
    )


def model_axes(mesh: Mesh, inputs: Sequence[Tensor]) -> list[str]:
    """The axes that may cut weights: those along which no input is cut; without inputs, those of no dim of a sample."""
    used = {axis for tensor in inputs if isinstance(tensor, ShardedTensor) for axis in tensor.sharding.axes}
    used = used or set(AXIS_OF_LETTER.values())
    return [axis for axis in mesh.names if mesh.sizes[axis] > 1 and axis not in used and axis != AXIS_OF_LETTER["N"]]


def choose_for(
    model: nn.Module,
    mesh: Mesh,
    kind: str = "auto",
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> LayoutChoice:
    """The layout for a model on the mesh of this run, the same on every rank. By all ranks together.

    Rank 0 searches. Without arguments of a call, or where one cannot be recorded, rows of every weight are cut.
    """
    if kind not in AUTO_LAYOUTS:
        raise MeshError(f"layout {kind!r}: it is {' or '.join(AUTO_LAYOUTS)}, or a mapping of names of parameters")

    def decide() -> LayoutChoice | None:
        return _decided(model, mesh, kind, args, dict(kwargs or {})) if mesh.world.rank == 0 else None

    label = Label("automatic layout", "distribute")
    made = agree(mesh.world, decide, label, MeshError)
    if mesh.size == 1:
        assert made is not None
        return made
    text = "" if made is None else json.dumps(made.layout)
    told = json.loads(broadcast_text(mesh.world, 0, text, label, _LONGEST))
    if made is not None:
        _log.info("%s", made)
        return made
    return LayoutChoice({name: {int(dim): axis for dim, axis in dims.items()} for name, dims in told.items()})


def _decided(model: nn.Module, mesh: Mesh, kind: str, args: Sequence[Any], kwargs: dict[str, Any]) -> LayoutChoice:
    """What rank 0 chooses; the cheap layout by size where the model cannot be recorded or priced."""
    tensors = tensors_in((args, kwargs))
    axes = model_axes(mesh, tensors)
    if not axes:
        raise MeshError(
            f"layout={kind!r}: every axis of {mesh} cuts samples, and none is left to cut weights; give the mesh one "
            "more, such as hc.Mesh(data=2, model=2)"
        )
    if not tensors:
        return by_size(model, mesh, axes, "without inputs= nothing is known of its work; rows of every weight are cut")
    usual = USUAL.get(max(tensors, key=Tensor.numel).device.type, "dgx-a100")
    machine = load_machine(HERE if Path(HERE).is_file() else usual)
    cuts = [t.sharding.dims_by_axis() if isinstance(t, ShardedTensor) else {} for t in tensors]
    try:
        calls = _recorded(model, args, kwargs)
    except Exception as error:  # noqa: BLE001 - a network that needs values to run is cut all the same
        return by_size(model, mesh, axes, f"it does not run on shapes alone ({error}); rows of every weight are cut")
    sizes = {axis: mesh.sizes[axis] for axis in mesh.names}
    choice = best_layout(calls, sizes, cuts, axes, machine, Prices(machine.device), kind)
    return choice if choice is not None else by_size(model, mesh, axes, "no layout can be priced; rows are cut")


def _recorded(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Calls:
    """One forward of a copy without values: the model's own parameters and their hooks see none of it."""

    def on_meta(tensor: Tensor) -> Tensor:
        return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")

    given, named = map_tensors(on_meta, (tuple(args), kwargs))
    device = max(tensors_in((args, kwargs)), key=Tensor.numel).device
    return record_calls(meta_copy(model), given, keywords=named, device=device)


def best_layout(
    calls: Calls,
    sizes: Mapping[str, int],
    cuts: Sequence[Mapping[int, str]],
    axes: Sequence[str],
    machine: Machine,
    prices: Prices,
    kind: str = "auto",
    share: float = SHARE,
    memory: float | None = None,
) -> LayoutChoice | None:
    """The layout of least predicted time ("auto") or least memory ("auto-memory"), by name patterns.

    Of those that fit into ``memory`` bytes a rank and cut at least ``share`` of the parameters, if any do.
    """
    with dry(0, math.prod(sizes.values())):
        search = LayoutSearch(LayoutCosts(calls, Mesh(**sizes), machine, prices), cuts, axes)
        one = search.price_of_a_byte()
        found = search.layouts([one * worth for worth in WORTHS])
    if not found:
        return None
    room = machine.device.memory_gb.value * 1e9 if memory is None else memory
    fitting = [each for each in found if each.memory <= room] or [min(found, key=lambda each: each.memory)]
    most = max(each.share for each in fitting)
    sharing = [each for each in fitting if each.share >= min(share, most)]
    terms = ("memory", "seconds")
    best = min(sharing, key=attrgetter(*terms if kind == "auto-memory" else reversed(terms)))
    others = tuple(each for each in found if each is not best)
    return LayoutChoice(as_patterns(search.cuts(best.choice), search.parameters), best, others)


def by_size(model: nn.Module, mesh: Mesh, axes: Sequence[str], note: str) -> LayoutChoice:
    """Rows of every weight over the first axis, of those that have a row for each rank: little memory, any network."""
    axis = axes[0]
    cuts: dict[str, Decision] = {
        name: {0: axis}
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and parameter.numel() >= LEAST and parameter.shape[0] >= mesh.sizes[axis]
    }
    names = [name for name, _ in model.named_parameters()]
    return LayoutChoice(as_patterns(cuts, names), note=note)


def as_patterns(cuts: Mapping[str, Decision], names: Iterable[str]) -> dict[str, dict[int, str]]:
    """The same cuts with one pattern for names that differ in numbers alone, where it matches no other parameter."""
    pattern_of = {name: _NUMBER.sub("*", name) for name in names}
    by_pattern: dict[str, list[str]] = {}  # a pattern matches a name where it matches that name's own pattern
    for name, pattern in pattern_of.items():
        by_pattern.setdefault(pattern, []).append(name)
    serves: dict[str, bool] = {}
    for pattern in by_pattern:
        matches = re.compile(translate(pattern)).match
        decisions = [cuts.get(name) for own, alike in by_pattern.items() if matches(own) for name in alike]
        serves[pattern] = all(dims == decisions[0] for dims in decisions)
    found: dict[str, dict[int, str]] = {}
    for name, dims in cuts.items():
        pattern = pattern_of[name]
        key = pattern if serves[pattern] else name
        if key not in found:
            found[key] = dict(dims)
    return found
