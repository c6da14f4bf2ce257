"""``Rings``: sums over all ranks by ways that fit the machine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ...errors import MeshError, Refused
from ...world import CommThread, Label, World
from ...world.tcp import cards
from ..buckets.cutting import LinkCost
from .algorithms import Algorithm, Round, Span, gather_rounds, scatter_rounds, split
from .chunk_scheduler import Chunk, ChunkScheduler
from .costs import FLAT, Costs, best_chunk, measured_links, timed, tried
from .levels import Levels, levels_of
from .sum_queue import Pending

CHUNK = 1 << 21  # bytes, where nothing was measured
DEPTH = 12  # chunks under way
#: Where urgent ones are to break in: what is under way already is ahead of them.
URGENT_CHUNK, URGENT_DEPTH = 1 << 21, 256
_AHEAD = 1e-3  # seconds by which what has left us may be ahead of something urgent
EXPRESS = 1 << 16  # bytes of a sum whose rounds cost more than its bytes
_WORTH_TWO_CARDS = 1 << 17  # bytes
_PIECE = 1 << 19  # bytes of a message of a reduce-scatter or an all-gather
Rounds = Callable[[int, tuple[int, ...], int, int, int], Sequence[Round]]
_LABEL = Label("a sum over ranks", "Rings", "gradients")
#: What was measured in a world, by how.
_known: weakref.WeakKeyDictionary[World, dict[str | tuple[int, ...], tuple[tuple[LinkCost, ...], Costs]]] = (
    weakref.WeakKeyDictionary()
)


class Rings:
    """Sums over all ranks of ``world``, by ``how``; made, used and closed by all ranks alike.

    ``flat`` is the world's own sum; ``levels`` goes over the levels of the machine, factors such as ``(2, 4)`` over
    those given; ``doubling`` exchanges all with one partner after the other; in ``leaders:2`` two ranks of a node each
    carry half to the other nodes; ``auto`` tries them and takes the fastest for each size. Tensors on GPUs go flat.
    Without ``measure`` ways and chunks follow from sizes alone, and ``auto`` is ``flat``.
    """

    def __init__(
        self, world: World, how: str | Sequence[int] = "auto", urgent: bool = False, measure: bool = True
    ) -> None:
        self.world, self.how = world, how if isinstance(how, str) else tuple(how)
        self._everyone = tuple(range(world.size))
        self.levels = levels_of(world)
        self.urgent = urgent = urgent and world.capabilities.priorities
        self._algorithms = algorithms_for(how, self.levels, world.rank)
        if urgent and how == "levels":
            self._algorithms |= algorithms_for("doubling", self.levels, world.rank)
        self._measures = measure and world.size > 1 and world.capabilities.measurable
        if how == "auto" and (not self._measures or torch.cuda.is_available()):
            self._algorithms = {FLAT: None}  # what cannot be timed, and what NCCL will do, goes the world's own way
        self._alone = world.size == 1 or not world.capabilities.moves_data
        self._own = world if self._alone else world.duplicate(wide=True)
        if not self._alone:
            # A scheduler that waits for a connection carries nothing, and ranks begin the urgent in different orders.
            self._own.connect(self._peers())
        self._scheduler = ChunkScheduler(self._own, URGENT_DEPTH if urgent else DEPTH)
        self.links: tuple[LinkCost, ...] = ()
        self.costs: Costs | None = None
        if self._measures and list(self._algorithms) != [FLAT] and not (urgent and how != "auto"):
            self.links, self.costs = self._known_or_measured()
        weakref.finalize(self, self._scheduler.thread.dismiss).atexit = False

    @property
    def thread(self) -> CommThread:
        """Drives the sums; an engine's :class:`SumQueue` gives it jobs, too."""
        return self._scheduler.thread

    def _peers(self) -> list[int]:
        """Of all ways."""
        rounds = [
            each for way in self._algorithms.values() if way is not None for each in way.rounds(64 * self.world.size)
        ]
        return sorted({peer for each in rounds for peer in (each.to, each.source) if peer is not None})

    def begin(self, tensor: Tensor, label: Label, done: Callable[[], None] | None = None) -> Pending:
        """Sum in place over all ranks, which begin their sums in one order; the same bits on every rank.

        16-bit floats travel as they are: each rank on the way adds in float32 and rounds for the next. ``done`` is
        called when it is done, from another thread, or here if that is the only way to know.
        """
        flat = _flat(tensor)
        size = flat.numel() * flat.element_size()
        name = FLAT if tensor.is_cuda or self.world.size == 1 else self.way(size)
        return _Returned(self._begin(name, flat, label, done), flat, tensor)

    def way(self, size: int) -> str:
        """The name of the way that a sum of so many bytes takes."""
        if self.urgent and size <= EXPRESS and "doubling" in self._algorithms:
            return "doubling"
        return self.costs.best(size) if self.costs is not None else next(iter(self._algorithms))

    def seconds(self, size: int) -> float:
        """That a sum of so many bytes is expected to take; where nothing was measured, a guess."""
        if self.costs is None:
            return LinkCost().seconds(size)
        return self.costs.seconds(self.costs.best(size), size)

    def _begin(self, name: str, flat: Tensor, label: Label, done: Callable[[], None] | None = None) -> Pending:
        way = self._algorithms.get(name)
        if way is None:
            # In the rings' own world: a thread begins it, in no order with what others sum in the first.
            pending = self._own.begin_sum(flat, self._everyone, label._replace(channel=_LABEL.channel))
            if done is not None:
                done()
            return pending
        chunks = [Chunk(piece, way.rounds(piece.numel())) for piece in self._pieces(flat, way)]
        # In a world of its own, which has one channel; and in one order, where none can go before another.
        label = label._replace(channel=_LABEL.channel, urgency=label.urgency if self.urgent else 0.0)
        return self._scheduler.begin(chunks, label, done)

    def _pieces(self, flat: Tensor, way: Algorithm) -> list[Tensor]:
        """Of one size, and an even number of them where there are several, for two network cards."""
        size = flat.numel() * flat.element_size()
        if way.kind == "doubling":
            return [flat]
        if self.urgent:
            return [flat[span.start : span.stop] for span in split(Span(0, flat.numel()), _count(size, URGENT_CHUNK))]
        chunk = best_chunk(way.factors, self.links, size) if len(self.links) == len(way.factors) else CHUNK
        if len(cards()) > 1 and size >= _WORTH_TWO_CARDS:
            chunk = min(chunk, -(-size // 2))
        return [flat[span.start : span.stop] for span in split(Span(0, flat.numel()), _count(size, chunk))]

    def expect(self, per_byte: float) -> None:
        """A sum takes so many seconds a byte: what is to wait for its turn must not lie in the kernel by then."""
        if self.urgent and not self._alone:
            self._own.limit_unsent(int(_AHEAD / per_byte))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """This rank's share of the sum: of the elements in a row, the part that bears its number. Each rank sends all
        shares but its own, once.
        """
        _flat(tensor)  # refuses what has no sum
        given = tensor.detach().resolve_conj().reshape(-1)
        own = split(Span(0, given.numel()), self.world.size)[self.world.rank]
        if self._alone or tensor.is_cuda:
            given = given.clone()
            self.world.begin_sum(_flat(given), self._everyone, _LABEL).wait()
            return given[own.start : own.stop].clone()
        share = torch.empty(own.size, dtype=given.dtype)
        self._carry(given, scatter_rounds, share)
        return share

    def all_gather(self, share: Tensor, elements: int) -> Tensor:
        """All ranks' shares in a row, which are those of a :meth:`reduce_scatter` of so many elements."""
        own = split(Span(0, elements), self.world.size)[self.world.rank]
        if share.numel() != own.size:
            raise MeshError(f"a share of {share.numel()} elements: this rank's of {elements} has {own.size}")
        gathered = torch.zeros(elements, dtype=share.dtype, device=share.device)
        gathered[own.start : own.stop] = share.detach().reshape(-1)
        if self._alone or share.is_cuda:
            self.world.begin_sum(_flat(gathered), self._everyone, _LABEL).wait()
        else:
            self._carry(gathered, gather_rounds)
        return gathered

    def _carry(self, elements: Tensor, rounds: Rounds, result: Tensor | None = None) -> None:
        """Round one ring of all ranks, neighbours of a node first; each message a piece of a share."""
        ranks, count = self.levels.ranks, elements.numel()
        place = ranks.index(self.world.rank)
        pieces = _count(count * elements.element_size(), _PIECE * len(ranks))
        parts = split(Span(0, 0 if result is None else result.numel()), pieces)
        results = [None if result is None else result[part.start : part.stop] for part in parts]
        chunks = [Chunk(elements, rounds(count, ranks, place, at, pieces), results[at]) for at in range(pieces)]
        self._scheduler.begin(chunks, _LABEL).wait()

    def close(self) -> None:
        """When all that was begun is done. By all ranks together."""
        self.thread.stop(self.world.deadline + 5)
        if not self._alone:
            self._own.close()

    def _known_or_measured(self) -> tuple[tuple[LinkCost, ...], Costs]:
        """Once in a world: all ranks make their rings in one order, and know or measure alike."""
        known = _known.setdefault(self.world, {})
        if self.how not in known:
            known[self.how] = self._measured()
        return known[self.how]

    def _measured(self) -> tuple[tuple[LinkCost, ...], Costs]:
        """By all ranks together, in one order."""
        way = self._algorithms.get("levels")
        levels = self.levels if way is None else Levels(way.ranks, way.factors)
        self.links = links = measured_links(self._scheduler, self.world, levels)

        def attempt(name: str, size: int) -> float:
            probe = torch.zeros(size // 4, device="cpu")
            return timed(lambda: self._begin(name, probe, _LABEL).wait())

        return links, Costs(tried(list(self._algorithms), attempt, self.world))


def rings_for(
    world: World,
    how: str | Sequence[int],
    tensors: Sequence[Tensor],
    goes_on: bool = False,
    urgent: bool = False,
    measure: bool = True,
) -> Rings | None:
    """For sums of such tensors; None where the world's own do. Made by all ranks together.

    ``goes_on``: after backward, where a thread looks after them. ``urgent``: each is needed at a time of its own, so
    that the most urgent are to go first, if the world can.
    """
    if how == "usual":
        on_cpus = all(tensor.device.type == "cpu" for tensor in tensors)
        how = "levels" if goes_on and on_cpus and world.capabilities.priorities else FLAT
    return Rings(world, how, urgent, measure) if how != FLAT and world.size > 1 and tensors else None


class _Returned:
    """A sum that was made in other memory, if the tensor's own does not lie in a row."""

    def __init__(self, pending: Pending, flat: Tensor, tensor: Tensor) -> None:
        self._pending, self._flat, self._tensor = pending, flat, tensor

    def wait(self) -> None:
        self._pending.wait()
        own = _real(self._tensor.detach())
        if own.data_ptr() != self._flat.data_ptr():
            own.copy_(self._flat.view(own.shape))


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        raise Refused("a sum over ranks", "Rings", "truth values have no sum", "give integers")
    return _real(tensor.detach().resolve_conj()).reshape(-1)


def _count(size: int, chunk: int) -> int:
    """Chunks, an even number where there are several."""
    count = max(1, -(-size // chunk))
    return count + (count % 2 if count > 1 else 0)


def algorithms_for(how: str | Sequence[int], levels: Levels, rank: int) -> dict[str, Algorithm | None]:
    """By name, those that are to be chosen from; None is the world's own sum."""
    make = partial(Algorithm, ranks=levels.ranks, place=levels.ranks.index(rank))
    if not isinstance(how, str):
        return {"levels": make("levels", factors=tuple(how))}
    kind, _, count = how.partition(":")
    if kind == "leaders" and count.isdigit():
        factors = levels.factors if len(levels.factors) == 2 else (len(levels.ranks), 1)
        return {how: make("leaders", factors=factors, leaders=int(count))}
    known = {FLAT: None, "levels": make("levels", factors=levels.factors), "doubling": make("doubling")}
    if how == "auto" and len(levels.factors) == 2:
        known["leaders:1"] = make("leaders", factors=levels.factors, leaders=1)
    if how == "auto":
        return known
    if how in known:
        return {how: known[how]}
    raise MeshError(f"how={how!r}: give auto, flat, levels, doubling, leaders:2 or factors such as (2, 4)")
