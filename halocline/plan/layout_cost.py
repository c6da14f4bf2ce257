"""What a call costs under a layout: the executor's own planner says what moves, the machine how long that takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import HaloclineError
from ..geometry import plan_transfer
from ..rules.space_cut import SpaceCut, choose_cut
from ..tensor import Fetch, Sharding, recut
from ..world import Mesh
from ..world.sameness import LEAST
from .calls import Calls, RuleCall
from .collectives import exchange_seconds, sum_seconds
from .cost import Prices
from .machine import Machine

STATISTICS = 1 << 10  # bytes that a norm combines over ranks, about
BACKWARD = 2  # times its forward that the backward of an operation takes
ILLEGAL = math.inf


@dataclass(frozen=True)
class CallCost:
    """Of one call on the first rank, forward and backward: how its results lie, seconds, and bytes kept."""

    results: tuple[Sharding, ...]
    compute: float
    communication: float
    kept: int

    @property
    def seconds(self) -> float:
        """Of computing and communicating one after the other: nothing is taken to overlap."""
        return self.compute + self.communication


class LayoutCosts:
    """Costs of the calls of one network on one mesh, each found once for the cuts of its operands."""

    def __init__(self, calls: Calls, mesh: Mesh, machine: Machine, prices: Prices) -> None:
        self.calls, self.mesh, self.machine, self.prices = calls, mesh, machine, prices
        self._known: dict[object, CallCost] = {}
        self._origin = dict.fromkeys(mesh.names, 0)

    def whole(self, value: int) -> Sharding:
        """A value that every rank has whole."""
        shape = self.calls.values[value].shape
        return Sharding(self.mesh, shape, (None,) * len(shape))

    def __call__(self, call: RuleCall, shardings: Sequence[Sharding]) -> CallCost:
        """Of a call whose operands lie so."""
        key = (call.key, tuple(shardings))
        if key not in self._known:
            self._known[key] = self._cost(call, list(shardings))
        return self._known[key]

    def gradient_seconds(self, sharding: Sharding, itemsize: int) -> float:
        """Of averaging a parameter's gradient over the axes on which it is whole, at the rate of a large bucket."""
        ranks = self.mesh.ranks_along(self._whole_axes(sharding))
        size = math.prod(sharding.shape) // self.mesh.count(sharding.axes) * itemsize
        return size * self._rate[ranks] if len(ranks) > 1 else 0.0

    def step_seconds(self, size: int) -> float:
        """Of an optimizer's step on a tile of so many bytes: reads and writes of it, its gradient and its state."""
        device = self.machine.device
        return 8 * size / (device.memory_gb_per_s.value * 1e9 * device.memory_efficiency.value)

    @cached_property
    def _rate(self) -> dict[tuple[int, ...], float]:
        """Seconds a byte of a large bucket's sum, by its ranks: those along every subset of axes."""
        bucket = 1 << 24
        names = self.mesh.names
        sets = [[name for n, name in enumerate(names) if number >> n & 1] for number in range(1 << len(names))]
        groups = {self.mesh.ranks_along(axes) for axes in sets}
        return {ranks: sum_seconds(self.machine, bucket, ranks, self.prices.load) / bucket for ranks in groups}

    def _whole_axes(self, sharding: Sharding) -> list[str]:
        return [axis for axis in self.mesh.names if axis not in sharding.axes]

    def _cost(self, call: RuleCall, shardings: list[Sharding]) -> CallCost:
        """Price a call at these shardings of its operands, as the executor would run it; infinite where it is refused.

        Movement is counted twice where there is a backward, since every movement has an adjoint of the same size.
        """
        values = self.calls.values
        passes = 2 if any(values[n].needs_gradient for n in call.results) else 1
        results = tuple(self.whole(n) for n in call.results)
        if call.recipe is None or not any(sharding.axes for sharding in shardings):
            moved = sum(
                self._movement(recut(each, self.whole(n)), n)
                for n, each in zip(call.operands, shardings, strict=True)
                if each.axes
            )
            return self._made(call, results, frozenset(), passes * moved, passes)
        try:
            space = choose_cut(self.mesh, call.recipe, shardings, self.mesh.choices)
        except HaloclineError:
            return CallCost(results, ILLEGAL, ILLEGAL, 0)
        target = space.fetches[0] if call.recipe.inplace else None
        if target is not None and (not target.untouched or target.adjoint_scale != 1):
            return CallCost(results, ILLEGAL, ILLEGAL, 0)  # refused, as when it runs
        axes = frozenset(cut.axis for cut in space.cuts.values())
        moved = sum(
            self._movement(fetch, call.operands[index])
            for index, fetch in enumerate(space.fetches)
            if fetch is not None and fetch.communicates
        )
        moved += sum(
            self._movement(recut(a, b), n)
            for n, a, b in zip(call.results, space.results, space.goals, strict=True)
            if a is not b
        )
        seconds = passes * moved + self._sums(call, space, passes)
        return self._made(call, space.goals, axes, seconds + self._means(call, space, axes, shardings), passes)

    def _made(
        self, call: RuleCall, results: tuple[Sharding, ...], axes: frozenset[str], communication: float, passes: int
    ) -> CallCost:
        """The cost of a call whose work is divided over ``axes``, with the bytes that autograd keeps of its results."""
        share = 1 / self.mesh.count(axes)
        once = sum(
            self.prices.roofline(event._replace(flops=event.flops * share, bytes=int(event.bytes * share)))
            for event in call.work
        )
        values = self.calls.values
        kept = 0
        if passes == 2 and call.work:
            kept = sum(values[n].bytes // self.mesh.count(s.axes) for n, s in zip(call.results, results, strict=True))
        return CallCost(results, once * (1 + BACKWARD * (passes == 2)), communication, kept)

    def _movement(self, fetch: Fetch, value: int) -> float:
        """Seconds in which the first rank receives what it needs."""
        received = plan_transfer(fetch.dims, self._origin, self.mesh.rank_at).received_elements
        peers = [rank for rank in self.mesh.ranks_along(fetch.axes) if rank != self.mesh.rank]
        if not received or not peers:
            return 0.0
        size = received * self.calls.values[value].dtype.itemsize
        sends = [(peer, size // len(peers)) for peer in peers]
        return exchange_seconds(self.machine, self.mesh.rank, sends, self.prices.load)

    def _sums(self, call: RuleCall, space: SpaceCut, passes: int) -> float:
        """Of parts that make a result together, and of statistics in the middle of the work, in all passes.

        The gradient of a plain result is the same on all ranks in what is priced here, so that it does not travel.
        """
        recipe = call.recipe
        assert recipe is not None
        kept = {dim for output in recipe.outputs for dim in output.dims}
        axes = {cut.axis for dim, cut in space.cuts.items() if dim not in kept}
        size = sum(
            self.calls.values[n].bytes // self.mesh.count(result.axes)
            for n, result in zip(call.results, space.results, strict=True)
        )
        once = size >= LEAST and not any(goal.axes for goal in space.goals)
        seconds = sum_seconds(self.machine, size, self.mesh.ranks_along(axes), self.prices.load) if axes else 0.0
        seconds *= 1 if once else passes
        reduced = {cut.axis for dim, cut in space.cuts.items() if dim in (recipe.reduces or ())}
        if reduced:
            seconds += passes * sum_seconds(self.machine, STATISTICS, self.mesh.ranks_along(reduced), self.prices.load)
        return seconds

    def _means(self, call: RuleCall, space: SpaceCut, axes: frozenset[str], shardings: Sequence[Sharding]) -> float:
        """Of gradients of plain activations that enter cut work: their mean is taken as they arrive."""
        seconds = 0.0
        for index, sharding in enumerate(shardings):
            value, fetch = self.calls.values[call.operands[index]], space.fetches[index]
            plain = not sharding.axes and value.needs_gradient and value.parameter is None and value.input is None
            if plain and fetch is not None and axes:
                seconds += sum_seconds(self.machine, value.bytes, self.mesh.ranks_along(axes), self.prices.load)
        return seconds


Decision = Mapping[int, str]  # the mesh axis of each dim that is cut
