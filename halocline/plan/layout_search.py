"""Which layout of the weights: dynamic programming over the calls of a forward, folded over blocks that repeat.

The state between two calls is how the values that are still to be read lie. Where a weight is first read, each way to
cut it is tried; of states that lie alike the cheapest goes on. Repeated blocks are searched once, and priced as often
as they stand there, so that the time does not grow with the depth of a network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from ..tensor import Sharding, make_sharding
from .calls import RuleCall
from .folding import runs_of
from .layout_cost import Decision, LayoutCosts

STATES = 96  # that go on after each call
FINALISTS = 6  # layouts that are priced with the second block of each run
LEAST = 64  # elements of a parameter that is worth a cut
STATE_OF_WEIGHTS = 4  # bytes held for each byte of a parameter: itself, its gradient, two moments of Adam


@dataclass(frozen=True)
class WeightGroup:
    """Parameters that are cut alike, for they stand at one place of repeated blocks; ``followers`` are their biases."""

    values: tuple[int, ...]
    followers: tuple[int, ...]
    options: tuple[Decision, ...]
    bytes_of_followers: int


@dataclass(frozen=True)
class PricedLayout:
    """A layout with its estimate: seconds of a step, and bytes of a rank (weights with gradients and optimizer)."""

    choice: tuple[int, ...]  # of each group of weights, which of its options
    seconds: float
    memory: int
    share: float  # of the bytes of all parameters: those that are cut
    compute: float = 0.0
    communication: float = 0.0


@dataclass
class _State:
    """A layout of the calls so far: how live values lie, which options were taken, and the weighted cost."""

    lies: dict[int, Sharding]
    chosen: dict[int, int] = field(default_factory=dict)  # group -> option
    score: float = 0.0


class LayoutSearch:
    """Layouts of one network's weights on one mesh."""

    def __init__(self, costs: LayoutCosts, inputs: Sequence[Mapping[int, str]], axes: Sequence[str]) -> None:
        """``inputs``: the mesh axis of each dim of each input that is cut; ``axes``: those that may cut weights."""
        self.costs, self.calls, self._axes = costs, costs.calls, tuple(axes)
        self.parameters = self.calls.parameters
        self._runs = runs_of(self.calls)
        self._alike: dict[int, int] = {}  # parameters at one place of repeated blocks: the first, and how many
        self.groups = self._grouped()
        self._group_of = {n: number for number, group in enumerate(self.groups) for n in group.values}
        self._leader_of = {n: group.values[0] for group in self.groups for n in group.followers}
        self._inputs = {
            n: make_sharding(costs.mesh, self.calls.values[n].shape, inputs[place] if place < len(inputs) else {})
            for n in self.calls.inputs
            if (place := self.calls.values[n].input) is not None
        }
        self._once = list(self._folded(1))
        self._twice = list(self._folded(2))

    def layouts(self, prices: Sequence[float]) -> list[PricedLayout]:
        """The best layouts where a held byte is worth so many seconds, and that without any cut, by their seconds."""
        found: dict[tuple[int, ...], PricedLayout] = {}
        for choice in [(0,) * len(self.groups), *(c for price in prices for c in self._best(price))]:
            if choice not in found:
                priced = self.priced(choice)
                if math.isfinite(priced.seconds):
                    found[choice] = priced
        return sorted(found.values(), key=lambda each: (each.seconds, each.memory))

    def priced(self, choice: Sequence[int]) -> PricedLayout:
        """A layout, with the option of each group."""
        state = _State(dict(self._inputs), dict(enumerate(choice)))
        compute = communication = 0.0
        kept = 0
        for call, times in self._twice:
            cost = self.costs(call, self._operands(state, call))
            compute += times * cost.compute
            communication += times * cost.communication
            kept += times * cost.kept
            state.lies.update(zip(call.results, cost.results, strict=True))
        weights = cut = total = 0
        gradients = steps = 0.0
        for n, times in self._alike.items():
            value, sharding = self.calls.values[n], self._lies(state, n)
            tile = value.bytes // self.costs.mesh.count(sharding.axes)
            weights, total = weights + times * tile, total + times * value.bytes
            cut += times * value.bytes if sharding.axes else 0
            gradients += times * self.costs.gradient_seconds(sharding, value.dtype.itemsize)
            steps += times * self.costs.step_seconds(tile)
        exposed = max(0.0, gradients - compute * 2 / 3)
        seconds = compute + communication + steps + exposed
        memory = STATE_OF_WEIGHTS * weights + kept
        share = cut / max(1, total)
        return PricedLayout(tuple(choice), seconds, memory, share, compute + steps, communication + exposed)

    def price_of_a_byte(self) -> float:
        """Seconds for a byte of a parameter, at which weights as a whole are worth a step."""
        whole = self.priced((0,) * len(self.groups))
        held = sum(times * self.calls.values[n].bytes for n, times in self._alike.items())
        return whole.seconds / max(1, STATE_OF_WEIGHTS * held)

    def cuts(self, choice: Sequence[int]) -> dict[str, Decision]:
        """The parameters that are cut, by name."""
        found: dict[str, Decision] = {}
        for group, option in zip(self.groups, choice, strict=True):
            dims = group.options[option]
            for n in group.values if dims else ():
                found[str(self.calls.values[n].parameter)] = dims
            for n in group.followers if 0 in dims else ():
                found[str(self.calls.values[n].parameter)] = {0: dims[0]}
        return found

    def _best(self, price: float) -> list[tuple[int, ...]]:
        """The cheapest choices where a held byte costs so many seconds."""
        states = [_State(dict(self._inputs))]
        last: dict[int, int] = {}
        for index, (call, _) in enumerate(self._once):
            last |= dict.fromkeys((*call.operands, *call.results), index)
        seen: set[int] = set()
        for index, (call, times) in enumerate(self._once):
            new = [g for g in dict.fromkeys(self._groups(call)) if g not in seen]
            seen |= set(new)
            grown = [
                grown
                for state in states
                for options in product(*(range(len(self.groups[g].options)) for g in new))
                if (grown := self._grown(state, call, times, dict(zip(new, options, strict=True)), price)) is not None
            ]
            states = self._kept(grown, index, last)
        whole = [0] * len(self.groups)
        return [tuple(state.chosen.get(g, whole[g]) for g in range(len(whole))) for state in states[:FINALISTS]]

    def _grown(
        self, state: _State, call: RuleCall, times: int, options: Mapping[int, int], price: float
    ) -> _State | None:
        """The state after one more call, with options for weights that it is the first to read; None if refused."""
        chosen = {**state.chosen, **options} if options else state.chosen
        after = _State(state.lies, chosen, state.score)
        cost = self.costs(call, self._operands(after, call))
        if not math.isfinite(cost.seconds):
            return None
        score = state.score + times * cost.seconds + price * times * cost.kept
        score += sum(self._held(g, option, price) for g, option in options.items())
        return _State({**state.lies, **dict(zip(call.results, cost.results, strict=True))}, chosen, score)

    def _held(self, group: int, option: int, price: float) -> float:
        """What the parameters of a group add: memory, their gradients' mean and their step."""
        members = self.groups[group].values
        value = self.calls.values[members[0]]
        sharding = self._sharding(members[0], self.groups[group].options[option])
        tile = value.bytes // self.costs.mesh.count(sharding.axes)
        one = price * STATE_OF_WEIGHTS * tile + self.costs.step_seconds(tile)
        one += self.costs.gradient_seconds(sharding, value.dtype.itemsize)
        dims, biases = self.groups[group].options[option], self.groups[group].bytes_of_followers
        beside = biases // self.costs.mesh.sizes[dims[0]] if 0 in dims else biases
        return len(members) * one + price * STATE_OF_WEIGHTS * beside

    def _kept(self, states: Sequence[_State], index: int, last: Mapping[int, int]) -> list[_State]:
        """The best state for each way in which values that are read later lie; at most ``STATES`` of them."""
        best: dict[object, _State] = {}
        for state in states:
            live = {n: lies for n, lies in state.lies.items() if last.get(n, -1) > index}
            # A weight that is read again must be cut as it was.
            again = tuple((g, o) for g, o in state.chosen.items() if last[self.groups[g].values[0]] > index)
            key = (tuple(sorted((n, id(lies)) for n, lies in live.items())), again)
            if key not in best or state.score < best[key].score:
                best[key] = _State(live, state.chosen, state.score)
        return sorted(best.values(), key=lambda state: state.score)[:STATES]

    def _groups(self, call: RuleCall) -> Iterator[int]:
        """The groups whose weights the call reads, directly or through a follower."""
        for n in call.operands:
            group = self._group_of.get(self._leader_of.get(n, n))
            if group is not None:
                yield group

    def _operands(self, state: _State, call: RuleCall) -> list[Sharding]:
        return [self._lies(state, n) for n in call.operands]

    def _lies(self, state: _State, value: int) -> Sharding:
        """How a value lies: as a call left it, as the options of its group say, or whole."""
        known = state.lies.get(value)
        if known is not None:
            return known
        leader = self._leader_of.get(value)
        group = self._group_of.get(value if leader is None else leader)
        if group is None:
            return self.costs.whole(value)
        dims = self.groups[group].options[state.chosen.get(group, 0)]
        if leader is not None:
            dims = {0: dims[0]} if 0 in dims else {}
        return self._sharding(value, dims)

    def _sharding(self, value: int, dims: Decision) -> Sharding:
        return make_sharding(self.costs.mesh, self.calls.values[value].shape, dims) if dims else self.costs.whole(value)

    def _folded(self, blocks: int) -> Iterator[tuple[RuleCall, int]]:
        """Calls with how often each counts: of each run the first ``blocks`` blocks, the last of them for all others.

        What is read of a run after it is read of the last of these blocks.
        """
        stands_for: dict[int, int] = {}
        calls, index = self.calls.calls, 0
        for run in [*self._runs, None]:
            for call in calls[index : run.start if run else len(calls)]:
                yield _renamed(call, stands_for), 1
            if run is None:
                return
            count = min(blocks, run.repeats)
            for block in range(count):
                times = run.repeats - count + 1 if block == count - 1 else 1
                for call in calls[run.start + block * run.period :][: run.period]:
                    yield _renamed(call, stands_for), times
            for offset in range(run.period):
                here = calls[run.start + (count - 1) * run.period + offset]
                there = calls[run.end - run.period + offset]
                stands_for |= dict(zip(there.results, here.results, strict=True))
            index = run.end

    def _grouped(self) -> list[WeightGroup]:
        """One group for each place of a weight; those at one place of repeated blocks are one."""
        values = self.calls.values
        leader = dict(self._leaders())
        members: dict[int, list[int]] = {}
        for n in self.parameters.values():
            members.setdefault(leader.get(n, n), []).append(n)
        self._alike = {n: len(alike) for n, alike in members.items()}
        weights = {str(values[n].parameter).rpartition(".")[0]: n for n in members if len(values[n].shape) > 1}
        groups = []
        for first, alike in members.items():
            if len(values[first].shape) > 1:
                path, name = str(values[first].parameter).rpartition(".")[::2]
                biases = [n for n in members if self._follows(n, first, weights.get(path) == first, path, name)]
                followers = [n for bias in biases for n in members[bias]]
                size = sum(values[n].bytes for n in followers)
                groups.append(WeightGroup(tuple(alike), tuple(followers), tuple(self._options(first)), size))
        return groups

    def _leaders(self) -> Iterator[tuple[int, int]]:
        """For parameters of repeated blocks that at the same place of the first."""
        values, calls, known = self.calls.values, self.calls.calls, dict[int, int]()
        for run in self._runs:
            places = [
                (offset, place, n)
                for offset in range(run.period)
                for place, n in enumerate(calls[run.start + offset].operands)
                if values[n].parameter is not None
            ]
            for start in range(run.start + run.period, run.end, run.period):
                for offset, place, first in places:
                    n = calls[start + offset].operands[place]
                    if n != first:
                        known[n] = known.get(first, first)
        return iter(known.items())

    def _follows(self, value: int, weight: int, only: bool, path: str, name: str) -> bool:
        """Is it the bias of a weight?"""
        shape = self.calls.values[value].shape
        own, called = str(self.calls.values[value].parameter).rpartition(".")[::2]
        if own != path or len(shape) != 1 or shape[0] != self.calls.values[weight].shape[0]:
            return False
        return only or called == name.replace("weight", "bias")

    def _options(self, value: int) -> Iterator[Decision]:
        """Whole first; then each dim over each axis, and dims over several axes."""
        shape, mesh = self.calls.values[value].shape, self.costs.mesh
        yield {}
        if math.prod(shape) < LEAST:
            return
        choices = [[None, *(dim for dim in (0, 1) if shape[dim] >= mesh.sizes[axis])] for axis in self._axes]
        for dims in product(*choices):
            used = [dim for dim in dims if dim is not None]
            if used and len(set(used)) == len(used):
                yield {dim: axis for dim, axis in zip(dims, self._axes, strict=True) if dim is not None}


def _renamed(call: RuleCall, stands_for: Mapping[int, int]) -> RuleCall:
    if not any(n in stands_for for n in call.operands):
        return call
    return replace(call, operands=tuple(stands_for.get(n, n) for n in call.operands))
