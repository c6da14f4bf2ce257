"""How values lie on both sides of every border between stages, found by a dry run of each stage on shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..geometry import Crossing, Partition
from ..layout import Layout, layout_of
from ..program import dry
from ..rules import shard
from ..tensor import Cut, ShardedTensor, Sharding, unwrap, wrap
from ..tensor.across import crossing_between, replicas
from ..world import AVERAGED, CrossingRoute, Label, Mesh
from .part import PartOfModel
from .replay import StageProgram
from .stages import Staged

Cuts = Mapping[int, str]


class Border(NamedTuple):
    """A value that one stage makes and a later one reads: how it lies on the ranks of each."""

    value: int
    source: int
    target: int
    old: Sharding
    new: Sharding
    crossing: Crossing
    dtype: torch.dtype
    needs_gradient: bool

    @property
    def scale(self) -> float:
        """The factor of the adjoint (law 3)."""
        return replicas(self.old) / replicas(self.new)

    def route(self, key: str, back: bool, device: torch.device) -> CrossingRoute:
        """What the crossings of a step need, whose turns are the micro-batches; with ``back``, those of gradients."""
        what = f"{'the gradient of ' if back else ''}value {self.value}, made in stage {self.source}"
        label = Label(f"pipeline, {what}", f"stage {self.source if back else self.target}")
        name = f"{key}/{self.value}/{self.target}/{'back' if back else 'on'}"
        return CrossingRoute(self.old.mesh.world.outermost, self.crossing, name, label, self.dtype, device)


def find_borders(
    staged: Staged,
    meshes: Sequence[Mesh],
    parts: Sequence[PartOfModel],
    inputs: Mapping[int, tuple[Tensor, Cuts]],
    layouts: Sequence[Layout],
    batch_statistics: str,
) -> list[Border]:
    """``meshes``, ``parts`` (on meta) and ``layouts`` are those of each stage; ``inputs`` have shape, dtype and cuts by
    value."""
    found: list[Border] = []
    arriving: dict[tuple[int, int], tuple[Sharding, torch.dtype]] = {}
    for stage, mesh, part in zip(staged.stages, meshes, parts, strict=True):
        keeps = (staged.record.loss,) if stage.number == staged.loss_stage else ()
        here = [(value, *arriving[value, stage.number]) for value, _ in stage.receives]
        with dry(mesh.size - 1, mesh.size), torch.device("meta"):
            made = _run_dry(
                staged, stage.number, mesh, part, here, inputs, layouts[stage.number], batch_statistics, keeps
            )
        for value, targets in stage.sends.items():
            cuts, dtype = made[value]
            shape, flows = staged.record.values[value].shape, staged.record.values[value].requires_grad
            old = Sharding(mesh, shape, cuts)
            for target in targets:
                new = Sharding(meshes[target], shape, [_cut_on(meshes[target], cut) for cut in cuts])
                found.append(Border(
                    value, stage.number, target, old, new, crossing_between(old, new), dtype,
                    flows and (dtype.is_floating_point or dtype.is_complex),
                ))  # fmt: skip
                arriving[value, target] = new, dtype
    return found


def _run_dry(
    staged: Staged, number: int, mesh: Mesh, part: PartOfModel, arriving: list[Any],
    inputs: Mapping[int, tuple[Tensor, Cuts]], layout: Layout, batch_statistics: str, keeps: tuple[int, ...],
) -> dict[int, tuple[tuple[Cut | None, ...], torch.dtype]]:  # fmt: skip
    """How the values lie that a stage keeps, on a dry mesh of the same axes."""
    stage, there = staged.stages[number], Mesh(mesh.choices, **mesh.sizes)
    there.world.counts_bytes = False  # type: ignore[attr-defined]  # of a dry world
    program = StageProgram(staged.record, stage, there, batch_statistics, keeps)
    shardings = layout_of(part, there, layout)
    tensors = {name: _on_dry(tensor, shardings.get(name)) for name, tensor in part.tensors().items()}
    values = {}
    for value, sharding, dtype in arriving:
        own = Sharding(there, sharding.shape, sharding.cuts)
        values[value] = torch.empty(own.tile_shape, dtype=dtype, device="meta"), own
    given = {n: shard_input(*inputs[n], there) for n in stage.inputs}
    _, kept = program.run(values, given, tensors, 0, 0)
    return {n: (_cuts_of(tensor), unwrap(tensor).dtype) for n, tensor in kept.items()}


def shard_input(tensor: Tensor, cuts: Cuts, mesh: Mesh) -> Tensor:
    """An input of a stage, which all of its ranks have whole, cut along those axes that the mesh has."""
    on_mesh = {dim: axis for dim, axis in cuts.items() if axis in mesh.sizes}
    return shard(tensor, mesh, on_mesh, check=False) if on_mesh else tensor


def _on_dry(tensor: Tensor, sharding: Sharding | None) -> Tensor:
    shape = tensor.shape if sharding is None else sharding.tile_shape
    tile = torch.empty(shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)
    setattr(tile, AVERAGED, True)  # nothing is averaged here
    return tile if sharding is None else wrap(tile, sharding)


def _cuts_of(tensor: Tensor) -> tuple[Cut | None, ...]:
    return tensor.sharding.cuts if isinstance(tensor, ShardedTensor) else (None,) * tensor.ndim


def _cut_on(mesh: Mesh, cut: Cut | None) -> Cut | None:
    """The same cut on another mesh, as far as it has the axis; at the same points where it has as many ranks."""
    if cut is None or mesh.sizes.get(cut.axis, 1) == 1:
        return None
    parts = mesh.sizes[cut.axis]
    return cut if cut.partition.parts == parts else Cut(cut.axis, Partition.even(cut.partition.size, parts))
