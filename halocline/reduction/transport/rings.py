"""``Rings``: sums over all ranks by algorithms that fit the machine."""

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
#: The same where urgent sums interrupt others. The depth is large: the sockets, not the scheduler, pick what goes
#: first.
URGENT_CHUNK, URGENT_DEPTH = 1 << 21, 256
_AHEAD = 1e-3  # seconds of link time that bytes in the kernel may be ahead of an urgent chunk
EXPRESS = 1 << 16  # bytes of a sum whose latency costs more than its bytes
_WORTH_TWO_CARDS = 1 << 17  # bytes from which a sum is split over two network cards
_PIECE = 1 << 19  # bytes of a message of a reduce-scatter or an all-gather
Rounds = Callable[[int, tuple[int, ...], int, int, int], Sequence[Round]]
_LABEL = Label("a sum over ranks", "Rings", "gradients")
#: Measurements of a world, by ``how``: rings that are made later reuse them.
_known: weakref.WeakKeyDictionary[World, dict[str | tuple[int, ...], tuple[tuple[LinkCost, ...], Costs]]] = (
    weakref.WeakKeyDictionary()
)


class Rings:
    """Sums over all ranks of ``world``; made, used and closed by all ranks alike.

    ``how``: ``flat`` is the world's own sum; ``levels`` goes over the levels of the machine, factors such as ``(2, 4)``
    over those given; ``doubling`` exchanges everything with one partner after another; in ``leaders:2`` two ranks of a
    node each carry half to the other nodes; ``auto`` tries all and takes the fastest for each size. Tensors on GPUs go
    flat. ``urgent``: the sum whose label is most urgent goes first, if the world has priorities. Without ``measure``
    algorithms and chunks follow from sizes alone, and ``auto`` is ``flat``.
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
            self._algorithms = {FLAT: None}  # nothing can be timed, or NCCL will do the sums
        self._alone = world.size == 1 or not world.capabilities.moves_data
        self._own = world if self._alone else world.duplicate(wide=True)
        if not self._alone:
            # Connect now to every peer that any algorithm needs: a scheduler that waits for a connection moves nothing.
            algorithms = [each for each in self._algorithms.values() if each is not None]
            rounds = [each for algorithm in algorithms for each in algorithm.rounds(64 * world.size)]
            self._own.connect(sorted({peer for r in rounds for peer in (r.to, r.source) if peer is not None}))
        self._scheduler = ChunkScheduler(self._own, URGENT_DEPTH if urgent else DEPTH)
        self.links: tuple[LinkCost, ...] = ()
        self.costs: Costs | None = None
        if self._measures and list(self._algorithms) != [FLAT] and not (urgent and how != "auto"):
            self.links, self.costs = self._known_or_measured()
        weakref.finalize(self, self._scheduler.thread.dismiss).atexit = False

    @property
    def thread(self) -> CommThread:
        """The thread that drives the sums; an engine's :class:`SumQueue` gives it jobs, too."""
        return self._scheduler.thread

    def begin(self, tensor: Tensor, label: Label, done: Callable[[], None] | None = None) -> Pending:
        """Sum in place over all ranks, which begin their sums in the same order; the same bits on every rank.

        16-bit floats travel in 16 bits: each rank adds in float32 and rounds for the next. ``done`` is called from the
        thread when the sum is done, or here for a flat sum, whose end nothing reports.
        """
        flat = _flat(tensor)
        name = FLAT if tensor.is_cuda or self.world.size == 1 else self.way(flat.nbytes)
        return _Returned(self._begin(name, flat, label, done), flat, tensor)

    def way(self, size: int) -> str:
        """The name of the algorithm that a sum of so many bytes takes."""
        if self.urgent and size <= EXPRESS and "doubling" in self._algorithms:
            return "doubling"
        return self.costs.best(size) if self.costs is not None else next(iter(self._algorithms))

    def seconds(self, size: int) -> float:
        """Expected of a sum of so many bytes; where nothing was measured, a guess."""
        if self.costs is None:
            return LinkCost().seconds(size)
        return self.costs.seconds(self.costs.best(size), size)

    def _begin(self, name: str, flat: Tensor, label: Label, done: Callable[[], None] | None = None) -> Pending:
        algorithm = self._algorithms.get(name)
        if algorithm is None:
            # In the rings' own world, since a thread begins it, in no fixed order with sums in the first world.
            pending = self._own.begin_sum(flat, self._everyone, label._replace(channel=_LABEL.channel))
            if done is not None:
                done()
            return pending
        chunks = [Chunk(piece, algorithm.rounds(piece.numel())) for piece in self._pieces(flat, algorithm)]
        # The rings' own world has one channel. Without priorities all sums are equally urgent.
        label = label._replace(channel=_LABEL.channel, urgency=label.urgency if self.urgent else 0.0)
        return self._scheduler.begin(chunks, label, done)

    def _pieces(self, flat: Tensor, algorithm: Algorithm) -> list[Tensor]:
        """The chunks of a sum: of equal size, and an even number where there are several, for two network cards."""
        size, factors = flat.nbytes, algorithm.factors
        if algorithm.kind == "doubling":
            return [flat]
        if self.urgent:
            chunk = URGENT_CHUNK
        else:
            chunk = best_chunk(factors, self.links, size) if len(self.links) == len(factors) else CHUNK
            if len(cards()) > 1 and size >= _WORTH_TWO_CARDS:
                chunk = min(chunk, -(-size // 2))
        return [flat[span.start : span.stop] for span in split(Span(0, flat.numel()), _count(size, chunk))]

    def expect(self, per_byte: float) -> None:
        """A sum takes so many seconds a byte: limit the bytes in the kernel, which nothing urgent can overtake."""
        if self.urgent and not self._alone:
            self._own.limit_unsent(int(_AHEAD / per_byte))

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """This rank's share of the sum: of the flattened elements, the part with its number. By all ranks together.

        Each rank sends all shares but its own, once.
        """
        _flat(tensor)  # refuses what has no sum
        elements = tensor.detach().resolve_conj().reshape(-1)
        own = split(Span(0, elements.numel()), self.world.size)[self.world.rank]
        if self._alone or tensor.is_cuda:
            elements = elements.clone()
            self.world.begin_sum(_flat(elements), self._everyone, _LABEL).wait()
            return elements[own.start : own.stop].clone()
        share = torch.empty(own.size, dtype=elements.dtype)
        self._carry(elements, scatter_rounds, share)
        return share

    def all_gather(self, share: Tensor, elements: int) -> Tensor:
        """All ranks' shares of a :meth:`reduce_scatter` of so many elements, in one row. By all ranks together."""
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
        """Run ``rounds`` on one ring of all ranks, neighbours of a node first; each message is a piece of a share."""
        ranks, count = self.levels.ranks, elements.numel()
        place = ranks.index(self.world.rank)
        pieces = _count(elements.nbytes, _PIECE * len(ranks))
        parts = split(Span(0, 0 if result is None else result.numel()), pieces)
        results = [None if result is None else result[part.start : part.stop] for part in parts]
        chunks = [Chunk(elements, rounds(count, ranks, place, at, pieces), results[at]) for at in range(pieces)]
        self._scheduler.begin(chunks, _LABEL).wait()

    def close(self) -> None:
        """Wait until all sums are done, at most the world's deadline and 5 s, then close. By all ranks together."""
        self.thread.stop(self.world.deadline + 5)
        if not self._alone:
            self._own.close()

    def _known_or_measured(self) -> tuple[tuple[LinkCost, ...], Costs]:
        """Measure once in a world. All ranks make their rings in the same order, so all measure or none does."""
        known = _known.setdefault(self.world, {})
        if self.how not in known:
            algorithm = self._algorithms.get("levels")
            levels = self.levels if algorithm is None else Levels(algorithm.ranks, algorithm.factors)
            self.links = measured_links(self._scheduler, self.world, levels)  # ``_begin`` cuts chunks by them
            known[self.how] = self.links, Costs(tried(list(self._algorithms), self._try, self.world))
        return known[self.how]

    def _try(self, name: str, size: int) -> float:
        """Seconds of one sum of so many bytes."""
        probe = torch.zeros(size // 4, device="cpu")
        return timed(lambda: self._begin(name, probe, _LABEL).wait())


def rings_for(
    world: World,
    how: str | Sequence[int],
    tensors: Sequence[Tensor],
    goes_on: bool = False,
    urgent: bool = False,
    measure: bool = True,
) -> Rings | None:
    """Rings for sums of such tensors, or None where the world's own sums do. Made by all ranks together.

    ``goes_on``: sums go on after backward, driven by a thread. ``urgent``: each is needed at a time of its own, so the
    most urgent should go first. ``how="usual"`` decides by that: levels on CPUs where sums go on, else flat.
    """
    if how == "usual":
        on_cpus = all(tensor.device.type == "cpu" for tensor in tensors)
        how = "levels" if goes_on and on_cpus and world.capabilities.priorities else FLAT
    return Rings(world, how, urgent, measure) if how != FLAT and world.size > 1 and tensors else None


class _Returned:
    """A pending sum that copies its result back, if the tensor was not contiguous and a copy was summed."""

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
    """The elements in one row of real numbers: a view where the tensor is contiguous. Refuses booleans."""
    if tensor.dtype == torch.bool:
        raise Refused("a sum over ranks", "Rings", "truth values have no sum", "give integers")
    return _real(tensor.detach().resolve_conj()).reshape(-1)


def _count(size: int, chunk: int) -> int:
    """How many chunks of at most ``chunk`` bytes: an even number, or one."""
    count = max(1, -(-size // chunk))
    return count + (count % 2 if count > 1 else 0)


def algorithms_for(how: str | Sequence[int], levels: Levels, rank: int) -> dict[str, Algorithm | None]:
    """The algorithms to choose from, by name; None is the world's own sum."""
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
