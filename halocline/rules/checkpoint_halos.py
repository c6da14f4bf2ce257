"""Activation checkpointing that keeps what came from other ranks, so that the recomputation exchanges nothing.

:func:`keep_halos` is a context function for ``torch.utils.checkpoint``. During the first forward it copies what the
world delivers (halos, statistics of norms) in the order of arrival; the recomputation receives those copies in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from .._torch_private import count_in_checkpoint
from ..errors import Refused
from ..tensor import here
from ..world import Label, PendingExchange, Receive, Send, Tape, World, this_world

Kept = tuple[str, list[Tensor]]  # what it was for, and what came


def keep_halos() -> tuple[_Recording, _Replaying]:
    """``checkpoint(block, x, use_reentrant=False, context_fn=hc.keep_halos)``: no exchange in the recomputation.

    It costs the memory of what the ranks receive, which for halos and norms is little.
    """
    world, kept = this_world(), list[Kept | None]()
    return _Recording(world, kept), _Replaying(world, kept)


class _HaloTape:
    """A context that takes the place of the world's ``begin``, ``sum`` and ``maximum``. It may be nested."""

    def __init__(self, world: World, kept: list[Kept | None]) -> None:
        self.world, self.kept = world, kept
        self._outer: list[Tape | None] = []  # one for each time it is entered and not left

    def __enter__(self) -> None:
        self._outer.append(self.world.tape)
        self.world.tape = self  # type: ignore[assignment]  # subclasses have its methods

    def __exit__(self, *_: object) -> None:
        self.world.tape = self._outer.pop()


class _Recording(_HaloTape):
    """The tape of the first forward: passes each call on to the world and keeps a copy of what arrives."""

    def __enter__(self) -> None:
        super().__enter__()
        self.kept.clear()

    @contextmanager
    def _outside(self) -> Iterator[World]:
        """The world as it is without this tape; what a sum exchanges is then not recorded beside its result."""
        self.world.tape = self._outer[-1]
        try:
            yield self.world
        finally:
            self.world.tape = self

    def begin(
        self,
        sends: Sequence[Send],
        receives: Sequence[Receive],
        like: Tensor,
        ranks: tuple[int, ...],
        label: Label,
        path: int | None = None,
    ) -> PendingExchange:
        """Start the exchange in the world; its messages are kept by the first wait."""
        with self._outside() as world:
            exchange = world.begin(sends, receives, like, ranks, label, path)
        # Its place in the order is that of its beginning, not of its wait.
        self.kept.append(None)
        return _Recorded(exchange, self.kept, len(self.kept) - 1, label)

    def sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        """The world's sum, kept."""
        with self._outside() as world:
            return self._keep(world.sum(tensor, ranks, label), label)

    def maximum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        """The world's maximum, kept."""
        with self._outside() as world:
            return self._keep(world.maximum(tensor, ranks, label), label)

    def _keep(self, result: Tensor, label: Label) -> Tensor:
        self.kept.append((label.operation, [result.detach().clone()]))
        return result


class _Recorded(PendingExchange):
    """An exchange of which a copy is kept of what arrives."""

    def __init__(self, exchange: PendingExchange, tape: list[Kept | None], place: int, label: Label) -> None:
        self._exchange, self._tape, self._place, self._operation = exchange, tape, place, label.operation

    def wait(self) -> list[Tensor]:
        """The messages of the world's exchange; the first call keeps copies of them."""
        came = self._exchange.wait()
        # An exchange may be waited for twice; one copy is enough.
        if self._tape[self._place] is None:
            self._tape[self._place] = self._operation, [message.clone() for message in came]
        return came


class _Known(PendingExchange):
    """An exchange of the recomputation: its messages are there already."""

    def __init__(self, messages: list[Tensor]) -> None:
        self._messages, self._waited = messages, False

    def wait(self) -> list[Tensor]:
        """Copies of the messages of the first forward."""
        if not self._waited:
            self._waited = True
            count_in_checkpoint()  # as the exchange of the forward did
        return self._messages


class _Replaying(_HaloTape):
    """The tape of the recomputation: hands out what the first forward kept, in the same order, and sends nothing."""

    def __enter__(self) -> None:
        super().__enter__()
        self._next = 0

    def begin(
        self,
        sends: Sequence[Send],
        receives: Sequence[Receive],
        like: Tensor,
        ranks: tuple[int, ...],
        label: Label,
        path: int | None = None,
    ) -> PendingExchange:
        """The kept messages, as an exchange that is already complete."""
        return _Known(self._again([receive.elements for receive in receives], like, label))

    def sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        """The kept result of the sum."""
        result = self._again([tensor.numel()], tensor, label)[0].view(tensor.shape)
        count_in_checkpoint()
        return result

    def maximum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        """The kept result of the maximum."""
        return self.sum(tensor, ranks, label)

    def _again(self, sizes: list[int], like: Tensor, label: Label) -> list[Tensor]:
        """Copies of the next kept messages: callers may write into them, and another recomputation may need them."""
        event = self.kept[self._next] if self._next < len(self.kept) else None
        self._next += 1
        same = event is not None and event[0] == label.operation and [m.numel() for m in event[1]] == sizes
        if event is None or not same or any(m.dtype != like.dtype for m in event[1]):
            raise Refused(
                label.operation,
                here(),
                "the recomputation communicates otherwise than the forward whose halos were kept",
                "checkpoint a function that does the same twice, or leave out hc.keep_halos",
            )
        return [message.clone() for message in event[1]]
