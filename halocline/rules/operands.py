"""Brings operands to a call and results back: law 3's factors, movements, gathers and shuffles.

Gathers and shuffles are exact but cost memory and time. They are counted in ``mesh.world.traffic``, and reported once
for each place in the log of rank 0.
"""

from __future__ import annotations

import logging
from math import prod

import torch
from torch import Tensor

from ..sizes import size_text
from ..tensor import (
    Fetch,
    enter,
    from_preloaded_halo,
    here,
    recut,
)
from ..world import AVERAGED, Bundle, Label, MoveTogether, Route, scaled
from .plan import CallPlan

_log = logging.getLogger("halocline")
_WORTH_WARNING = 1 << 12  # bytes of a gathered operand
_WORTH_ADVICE = 1 << 20


def enter_whole(plan: CallPlan, tiles: list[Tensor]) -> None:
    """What stands for whole operands in cut work, in place of them. Raises unless their gradients are averaged."""
    for _, places in plan.factors:
        for place in places:
            tile = tiles[place]
            if not getattr(tile, AVERAGED, False) and tile.requires_grad:
                tiles[place] = _entered(plan, plan.fetches[place], tile, Label(plan.name, here()))  # type: ignore[arg-type]


def _entered(plan: CallPlan, fetch: Fetch, tile: Tensor, label: Label) -> Tensor:
    return enter(tile, plan.mesh, fetch.work_axes - fetch.axes, label, is_tile=bool(fetch.axes))


def with_factors(plan: CallPlan, tiles: list[Tensor]) -> None:
    """Law 3: whole operands of cut work, in place of themselves."""
    enter_whole(plan, tiles)
    for factor, places in plan.factors:
        entering = [place for place in places if tiles[place].requires_grad]
        if len(entering) == 1:
            tiles[entering[0]] = scaled((1.0, factor), tiles[entering[0]])
        elif entering:
            entered = scaled((1.0, factor), *[tiles[place] for place in entering])
            for place, tile in zip(entering, entered, strict=True):
                tiles[place] = tile


def preloaded(plan: CallPlan, tensors: list[Tensor], tiles: list[Tensor]) -> dict[int, Tensor]:
    """Operands that came with what the operation needs beside their tiles."""
    ready: dict[int, Tensor] = {}
    for place, tensor in enumerate(tensors):
        fetch = plan.fetches[place]
        if getattr(tensor, "_preloaded_halo", None) is not None and fetch is not None and fetch.communicates:
            brought = from_preloaded_halo(tensor, fetch, tiles[place])
            if brought is not None:
                ready[place] = brought
    return ready


def bring(plan: CallPlan, tiles: list[Tensor], label: Label, ready: dict[int, Tensor]) -> list[Tensor]:
    """Each operand's needed box, with law 3's factor on its gradient."""
    if plan.gathers:
        _count_gathers(plan, tiles, label)
    brought = list(tiles)
    if plan.factors and torch.is_grad_enabled():
        with_factors(plan, brought)
    for place in plan.touched:
        fetch = plan.fetches[place]
        if fetch.adjoint_scale != 1:  # type: ignore[union-attr]
            brought[place] = _entered(plan, fetch, tiles[place], label)  # type: ignore[arg-type]
    # Where something was preloaded, the other operands are fetched one by one.
    together = ready or (_together(plan, brought, label) if plan.joined else {})
    for place in plan.touched:
        if place not in together:
            brought[place] = plan.fetches[place](brought[place], label)  # type: ignore[misc]
    for place, moved in together.items():
        brought[place] = moved
    return brought


def _together(plan: CallPlan, tiles: list[Tensor], label: Label) -> dict[int, Tensor]:
    """Operands that move among the same ranks go in the same messages, where their dtypes allow."""
    places = [place for place in plan.joined if tiles[place].dtype == tiles[plan.joined[0]].dtype]
    if len(places) < 2:
        return {}
    fetches = [fetch for fetch in (plan.fetches[place] for place in places) if fetch is not None]
    bundle = Bundle(
        Route(plan.mesh.world, fetches[0].ranks, label),
        tuple(fetch.transfer for fetch in fetches),
        tuple((1.0, fetch.adjoint_scale) for fetch in fetches),
        tuple(fetch.fill for fetch in fetches),
    )
    return dict(zip(places, MoveTogether.apply(bundle, *(tiles[place] for place in places)), strict=True))


def _count_gathers(plan: CallPlan, tiles: list[Tensor], label: Label) -> None:
    """A gather is exact but costs memory: counted always, said once a place."""
    for fetch, tile in zip(plan.fetches, tiles, strict=True):
        if fetch is None or not fetch.gathers:
            continue
        size = fetch.transfer.received_elements * tile.element_size()
        # The count says how often this place has gathered: the log hears of the first time only.
        if plan.mesh.world.redistributed("gather", label, size) == 1 and plan.mesh.rank == 0:
            whole = prod(fetch.transfer.target_shape) * tile.element_size()
            if whole < _WORTH_WARNING or plan.recipe.gathers_by_design:
                continue
            _log.warning(
                "%s: every rank fetches the whole operand over %s, %s a call; the result is exact, but this operation "
                "saves no memory by being cut%s",
                label,
                ", ".join(sorted(fetch.axes - fetch.work_axes or fetch.axes)),
                size_text(whole),
                "" if whole < _WORTH_ADVICE else "; cut another dim if this costs too much",
            )


def put_back_results(plan: CallPlan, results: list[Tensor], label: Label) -> list[Tensor]:
    """The second half of a shuffle, counted, and said once a place, as a gather is; or a gathered result cut again."""
    moves = [None if old is new else recut(old, new) for old, new in zip(plan.shardings, plan.goals, strict=True)]
    exchanged = any(move is not None and move.communicates for move in moves)
    if exchanged and plan.mesh.world.redistributed("shuffle", label) == 1 and plan.mesh.rank == 0:
        _log.info("%s: the ranks exchange tiles so that another dim is cut meanwhile, and back", label)
    return [result if move is None else move(result, label) for result, move in zip(results, moves, strict=True)]
