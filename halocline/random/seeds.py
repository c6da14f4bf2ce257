"""Are torch's generators alike where a model draws from them? Whole tensors must be drawn the same on every rank.

Random functions on cut tensors draw from the library's generator. Those on plain ones (dropout after a global pool, the
``torch.rand`` of a drop path) draw from torch's, which programs written for DDP seed by rank.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from .._torch_private import run_eagerly, transforming
from ..errors import Refused
from ..tensor import ShardedTensor, here
from ..tree import tensors_in
from ..world import Label, Mesh
from .state import DrawWatch, State, current

_FIRST, _EVERY = 64, 61  # forwards that are all looked at, and of those after


class WatchedDraws:
    """Hooks round a model's forward. By all ranks together where the model draws from torch's generator."""

    def __init__(self, mesh: Mesh, cut_axes: frozenset[str]) -> None:
        self._mesh: Mesh | None = mesh
        self._cut_axes = cut_axes  # of parameters: ranks along them work on one sample
        self._calls = 0
        self._began: tuple[frozenset[str], State, DrawWatch] | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before forward: start to watch torch's generators, where this forward has its turn."""
        state = current()
        self._calls += 1
        if self._mesh is None or (self._calls > _FIRST and self._calls % _EVERY) or transforming():
            return
        if state.watch is not None:  # that of a distributed model which this one is a part of
            return
        cut = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, ShardedTensor)]
        axes = self._cut_axes | (cut[0].sharding.axes if cut else frozenset())
        if axes and not state.threaded:  # threads share one generator
            state.watch = DrawWatch()
            self._began = axes, state, state.watch

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """After forward: where the model drew from torch's generator, compare its start
        over the ranks that share a sample.
        """
        began, self._began = self._began, None
        if began is None or self._mesh is None:
            return
        axes, state, watch = began
        state.watch = None
        if output is None or current() is not state or not watch.unexplained:  # None: forward has raised
            return
        words = hashlib.blake2b(repr(watch.start).encode(), digest_size=8).digest()
        mine, ranks = int.from_bytes(words) >> 1, self._mesh.ranks_along(axes)
        # The largest and, by its complement, the smallest in one reduction.
        both = torch.tensor([mine, ~mine], dtype=torch.int64, device="cpu")
        label = Label("comparing torch's generators", here())
        most, least = self._mesh.world.maximum(both, ranks, label).tolist()
        if most != ~least:
            raise Refused(
                "a random function on whole tensors",
                type(module).__name__,
                "it drew from torch's generator, which does not stand alike on the ranks that share a sample, so that "
                "each had other numbers for the same tensor",
                "seed torch alike on all ranks (torch.manual_seed(0), not seed + rank), or call the model under "
                "hc.random.reproducible(seed)",
            )

    def __deepcopy__(self, memo: object) -> WatchedDraws:
        return _belongs_nowhere()

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return _belongs_nowhere, ()


def _belongs_nowhere() -> WatchedDraws:
    """A copied model is on no mesh."""
    copy = WatchedDraws.__new__(WatchedDraws)
    copy._mesh, copy._cut_axes, copy._calls, copy._began = None, frozenset(), 0, None
    return copy


def watch_draws(model: nn.Module, mesh: Mesh, cut_axes: frozenset[str] = frozenset()) -> None:
    """Have a distributed model's forwards draw the same numbers on the ranks that share a sample.

    ``cut_axes`` are those that cut its parameters.
    """
    watched = WatchedDraws(mesh, cut_axes)
    model.register_forward_pre_hook(watched.before, with_kwargs=True)
    model.register_forward_hook(watched.after, always_call=True)


for _hook in (WatchedDraws.before, WatchedDraws.after):
    run_eagerly(_hook)
