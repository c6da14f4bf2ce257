"""Lookups with ``sparse=True``: rows are fetched from, and their gradients sent to, the ranks that own them.

Bytes are those of the rows that a rank's indices name, each once, not those of the table. A whole table is everybody's.
How many rows go where depends on values, which plans must not, so this is no recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..errors import Refused
from ..geometry import Interval, Partition
from ..tensor import Cut, ShardedTensor, Sharding, enter, here, make_sharding, unwrap, wrap
from ..world import Label, Mesh, MovementFunction, Receive, Route, Send
from ..world.movement import recompute_first
from .families.whole_axis import embedding as dense_embedding
from .table import composite, run_rule

OPERATION = "rows of a table"


class RowRequest(NamedTuple):
    """Which rows go where, known to both sides. ``wanted`` are rows of this rank's own tile, by the rank that asks."""

    route: Route
    counts: tuple[int, ...]  #: rows that this rank gets from each rank, in the order of its unique indices
    wanted: tuple[Tensor, ...]
    scale: float  #: of gradients (law 3)
    skipped: int  #: row of the tile that gets no gradient; -1: none


class FetchRows(MovementFunction):
    """A tile's rows to the ranks that ask for them; the adjoint adds them up at their owner, as a sparse gradient."""

    @staticmethod
    def forward(ctx: Any, tile: Tensor, request: RowRequest):  # type: ignore[no-untyped-def]
        ctx.request, ctx.shape = request, tile.shape
        ctx.save_for_backward(torch.empty(0))
        parts = [tile.detach()[rows] for rows in request.wanted]
        return torch.cat(_swap(request.route, parts, request.counts, tile))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor):  # type: ignore[no-untyped-def]
        recompute_first(ctx)
        request: RowRequest = ctx.request
        parts = list(gradient.split(list(request.counts)))
        came = _swap(request.route, parts, [len(rows) for rows in request.wanted], gradient)
        rows, values = torch.cat(request.wanted), torch.cat(came)
        if request.skipped >= 0:
            kept = rows != request.skipped
            rows, values = rows[kept], values[kept]
        values = values * request.scale if request.scale != 1 else values
        return torch.sparse_coo_tensor(rows[None], values, ctx.shape, check_invariants=False).coalesce(), None


@composite(F.embedding, family="whole_axis")
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Rows of a table; ``sparse`` lookups touch, fetch and update those that they name."""
    if sparse and max_norm is None and not scale_grad_by_freq and whole_features(weight):
        return looked_up(input, weight, padding_idx)
    arguments = (input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return run_rule(F.embedding, dense_embedding, arguments, {})


def whole_features(weight: Tensor) -> bool:
    """Is it a table that is whole, or cut by rows alone?"""
    return not isinstance(weight, ShardedTensor) or set(weight.sharding.dims_by_axis()) == {0}


def looked_up(index: Tensor, table: Tensor, padding_idx: int | None) -> Tensor:
    """The table's rows at ``index``, which may be cut over any axes: also over the one that cuts the table."""
    mesh = (index if isinstance(index, ShardedTensor) else table).sharding.mesh  # type: ignore[attr-defined]
    sharding = table.sharding if isinstance(table, ShardedTensor) else make_sharding(mesh, table.shape, {})
    if sharding.mesh != mesh:
        raise Refused(OPERATION, here(), f"the table lies on {sharding.mesh}, its indices on {mesh}", "use one mesh")
    tokens, label = unwrap(index), Label(OPERATION, here())
    if not getattr(mesh.world, "counts_bytes", True):
        return _like(index, F.embedding(tokens, unwrap(table)), sharding)
    if not mesh.world.capabilities.moves_data or tokens.is_meta:
        raise Refused(
            OPERATION,
            here(),
            "a dry run has no values, and which rows travel depends on them",
            "plan or record with sparse=False, or run it",
        )
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= sharding.shape[0]):
        raise IndexError("index out of range in self")
    axes = index.sharding.axes if isinstance(index, ShardedTensor) else frozenset[str]()
    if not isinstance(table, ShardedTensor):
        table = enter(table, mesh, axes, label)
    cut = sharding.cuts[0]
    partition = cut.partition if cut else Partition((0, sharding.shape[0]))
    route = Route(mesh.world, mesh.ranks_along({cut.axis} if cut else ()), label)
    unique, places = torch.unique(tokens, return_inverse=True)
    scale = _scale(axes, cut, mesh)
    skipped = -1 if padding_idx is None else padding_idx % sharding.shape[0]
    request = _request(route, unique, partition, sharding.owned(0), scale, skipped)
    return _like(index, F.embedding(places, FetchRows.apply(unwrap(table), request)), sharding)


def _like(index: Tensor, found: Tensor, sharding: Sharding) -> Tensor:
    """What was looked up, cut as its indices are."""
    if not isinstance(index, ShardedTensor):
        return found
    shape = (*index.sharding.shape, sharding.shape[1])
    return wrap(found, Sharding(index.sharding.mesh, shape, (*index.sharding.cuts, None)))


def _scale(axes: frozenset[str], cut: Cut | None, mesh: Mesh) -> float:
    """Law 3, for lookups that are cut over ``axes``. Where all ranks of the table's axis hold the lookup, its gradient
    is their mean; where the table is whole on an axis, it enters work that is cut on it."""
    if cut is None:
        return float(mesh.count(axes))
    return mesh.count(axes - {cut.axis}) / (1 if cut.axis in axes else mesh.sizes[cut.axis])


def _request(
    route: Route, unique: Tensor, partition: Partition, own: Interval, scale: float, skipped: int
) -> RowRequest:
    """Ask the owners for rows. By all ranks of the route."""
    points = torch.tensor(partition.points, dtype=unique.dtype, device=unique.device)
    ends = torch.searchsorted(unique, points).tolist()
    counts = [high - low for low, high in pairwise(ends)]
    told = [torch.tensor([count], dtype=torch.int64) for count in counts]
    asked = [int(count) for count in _swap(route, told, [1] * len(counts), told[0])]
    parts = [part - piece.lo for part, piece in zip(unique.split(counts), partition.pieces(), strict=True)]
    wanted = _swap(route, parts, asked, unique)
    return RowRequest(
        route, tuple(counts), tuple(wanted), scale, skipped - own.lo if own.lo <= skipped < own.hi else -1
    )


def _swap(route: Route, parts: Sequence[Tensor], counts: Sequence[int], like: Tensor) -> list[Tensor]:
    """Part ``i`` goes to rank ``i`` of the route; ``counts[i]`` entries come from it. Empty messages are not sent."""
    me = route.ranks.index(route.world.rank)
    shape = parts[me].shape[1:]
    others = [number for number in range(len(route.ranks)) if number != me]
    sends = [Send(route.ranks[n], parts[n].reshape(-1)) for n in others if parts[n].numel()]
    receives = [Receive(route.ranks[n], counts[n] * shape.numel()) for n in others if counts[n] * shape.numel()]
    came = iter(route.world.begin(sends, receives, like, route.ranks, route.label).wait())
    found = [parts[me] if n == me else like.new_empty((0, *shape)) for n in range(len(route.ranks))]
    for number in others:
        if counts[number] * shape.numel():
            found[number] = next(came).view(counts[number], *shape)
    return found
