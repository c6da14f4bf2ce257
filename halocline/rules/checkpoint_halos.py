"""Checkpointing that keeps what came from other ranks: the recomputation computes again, and exchanges nothing.

A context for torch's checkpoint. In the first forward whatever the world brings (halos, statistics of norms) is copied
in the order in which it comes; in the recomputation it is handed out again in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .._torch_private import count_in_checkpoint
from ..errors import Refused
from ..tensor import here
from ..world import Label, PendingExchange, Receive, Send, World, this_world

Event = tuple[str, list[Tensor]]  # what it was for, and what came


def keep_halos() -> tuple[_Recording, _Replaying]:
    """``checkpoint(block, x, use_reentrant=False, context_fn=hc.keep_halos)``: no exchange in the recomputation.

    It costs the memory of what the ranks receive, which for halos and norms is little.
    """
    world, tape = this_world(), list[Event | None]()
    return _Recording(world, tape), _Replaying(world, tape)


class _Standing:
    """Inside, this stands before the world's own ways to communicate."""

    def __init__(self, world: World, tape: list[Event | None]) -> None:
        self.world, self.tape = world, tape
        self._before: list[dict[str, Any]] = []  # one for each time it is entered and not left

    def __enter__(self) -> None:
        own: dict[str, Any] = self.world.__dict__
        self._before.append({name: own.get(name) for name in ("begin", "sum", "maximum")})
        inner = {name: getattr(self.world, name) for name in self._before[-1]}
        self.start(inner)
        for name in inner:
            own[name] = getattr(self, name)

    def __exit__(self, *_: object) -> None:
        for name, way in self._before.pop().items():
            if way is None:
                del self.world.__dict__[name]
            else:
                self.world.__dict__[name] = way

    def start(self, inner: dict[str, Any]) -> None:
        raise NotImplementedError


class _Recording(_Standing):
    def start(self, inner: dict[str, Any]) -> None:
        self.inner, self._inside = inner, False
        self.tape.clear()

    def begin(
        self,
        sends: Sequence[Send],
        receives: Sequence[Receive],
        like: Tensor,
        ranks: tuple[int, ...],
        label: Label,
        path: int | None = None,
    ) -> PendingExchange:
        exchange: PendingExchange = self.inner["begin"](sends, receives, like, ranks, label, path)
        if self._inside:  # part of a sum, of which the result is kept
            return exchange
        self.tape.append(None)
        return _Recorded(exchange, self.tape, len(self.tape) - 1, label)

    def sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        return self._kept("sum", tensor, ranks, label)

    def maximum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        return self._kept("maximum", tensor, ranks, label)

    def _kept(self, name: str, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        self._inside = True
        try:
            result: Tensor = self.inner[name](tensor, ranks, label)
        finally:
            self._inside = False
        self.tape.append((label.operation, [result.detach().clone()]))
        return result


class _Recorded(PendingExchange):
    """An exchange of which a copy is kept of what arrives."""

    def __init__(self, exchange: PendingExchange, tape: list[Event | None], place: int, label: Label) -> None:
        self._exchange, self._tape, self._place, self._operation = exchange, tape, place, label.operation

    def wait(self) -> list[Tensor]:
        came = self._exchange.wait()
        if self._tape[self._place] is None:
            self._tape[self._place] = self._operation, [message.clone() for message in came]
        return came


class _Known(PendingExchange):
    def __init__(self, messages: list[Tensor]) -> None:
        self._messages, self._waited = messages, False

    def wait(self) -> list[Tensor]:
        if not self._waited:
            self._waited = True
            count_in_checkpoint()  # as the exchange of the forward did
        return self._messages


class _Replaying(_Standing):
    def start(self, inner: dict[str, Any]) -> None:
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
        return _Known(self._again([receive.elements for receive in receives], like, label))

    def sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        result = self._again([tensor.numel()], tensor, label)[0].view(tensor.shape)
        count_in_checkpoint()
        return result

    def maximum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> Tensor:
        return self.sum(tensor, ranks, label)

    def _again(self, sizes: list[int], like: Tensor, label: Label) -> list[Tensor]:
        """The next of what came, copied: it may be asked for once more, and whoever gets it may write into it."""
        event = self.tape[self._next] if self._next < len(self.tape) else None
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
