"""A world of some ranks of another one, on the same connections."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .base import Incoming, Outgoing, Receive, Send, World
from .events import Label
from .pending import PendingExchange, PendingSum


class SubWorld(World):
    """The ranks ``members`` of ``parent``, counted from 0; this rank is -1 if it is none of them.

    Messages and sums are the parent's, with its counts and tags: sub-worlds that overlap do not disturb each other.
    """

    def __init__(self, parent: World, members: tuple[int, ...], owns_parent: bool = False) -> None:
        rank = members.index(parent.rank) if parent.rank in members else -1
        self._owns_parent = owns_parent
        self.parent, self.members, self.capabilities = parent, members, parent.capabilities
        super().__init__(rank, len(members), parent.deadline)
        self.traffic, self.launcher_calls = parent.traffic, parent.launcher_calls
        self.share_events(parent.events)

    def begin(
        self,
        sends: Sequence[Send],
        receives: Sequence[Receive],
        like: Tensor,
        ranks: tuple[int, ...],
        label: Label,
        path: int | None = None,
    ) -> PendingExchange:
        """As the parent's, between members."""
        if self.tape is not None:
            return self.tape.begin(sends, receives, like, ranks, label, path)
        outgoing = [Send(self.members[peer], message) for peer, message in sends]
        incoming = [Receive(self.members[peer], elements) for peer, elements in receives]
        return self.parent.begin(outgoing, incoming, like, self._outside(ranks), label, path)

    def begin_tagged(self, outgoing: Sequence[Outgoing], incoming: Sequence[Incoming], label: Label) -> PendingExchange:
        sends = [(self.members[peer], message, tag) for peer, message, tag in outgoing]
        return self.parent.begin_tagged(sends, [(self.members[peer], b, tag) for peer, b, tag in incoming], label)

    def begin_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> PendingSum:
        return self.parent.begin_sum(tensor, self._outside(ranks), label)

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label) -> object:
        outgoing = [(self.members[peer], message, tag) for peer, message, tag in sends]
        return self.parent.post(outgoing, [(self.members[peer], b, tag) for peer, b, tag in receives], label)

    def complete(self, posted: object, label: Label) -> None:
        self.parent.complete(posted, label)

    def post_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> object:
        return self.parent.post_sum(tensor, self._outside(ranks), label)

    def complete_sum(self, posted: object, label: Label) -> None:
        self.parent.complete_sum(posted, label)

    def leave(self) -> None:
        self.parent.leave()

    def close(self) -> None:
        """A duplicate closes its connections; those of a sub-mesh are its parent's."""
        if self._owns_parent:
            self.parent.close()

    def set_deadline(self, seconds: float) -> None:
        """As the parent's."""
        self.deadline = seconds
        self.parent.set_deadline(seconds)

    def wait_any(self, under_way: Sequence[PendingExchange], end: float) -> int | None:
        return self.parent.wait_any(under_way, end)

    def wake(self) -> None:
        self.parent.wake()

    def connect(self, peers: Sequence[int]) -> None:
        self.parent.connect([self.members[peer] for peer in peers])

    def limit_unsent(self, size: int) -> None:
        self.parent.limit_unsent(size)

    def path(self, label: Label) -> int:
        return self.parent.path(label)

    def _outside(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The parent's numbers of these ranks; negative entries only tell groups apart, and stay."""
        return tuple(self.members[rank] if rank >= 0 else rank for rank in ranks)

    @property
    def outermost(self) -> World:
        return self.parent.outermost

    def numbers_outside(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return self.parent.numbers_outside(self._outside(ranks))

    def _duplicate(self, wide: bool) -> World:
        return self._duplicate_among(tuple(range(self.size)), wide)

    def _duplicate_among(self, members: tuple[int, ...], wide: bool) -> World:
        return SubWorld(self.parent.duplicate(wide, self._outside(members)), self.members, owns_parent=True)
