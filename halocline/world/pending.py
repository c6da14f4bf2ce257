"""Exchanges and sums under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._torch_private import count_in_checkpoint
from .events import Label

if TYPE_CHECKING:
    from .base import World

DONE: Any = object()  # what a transport posted, once it has been waited for


class PendingExchange:
    """An exchange under way. Holds its buffers, and the messages through what the transport posted."""

    def __init__(self, world: World, posted: Any, buffers: list[Tensor], label: Label, number: int) -> None:
        self._world, self.posted, self._buffers, self.label, self._number = world, posted, buffers, label, number

    def wait(self) -> list[Tensor]:
        """The received messages, in the order in which they were asked for. RankFailure at the deadline."""
        if self.posted is not DONE:
            began = self._world.events.clock()
            self._world.complete(self.posted, self.label)
            self._world.waited(self.label, self._number, began)
            self.posted = DONE
            if self.label.channel == "moves":  # exchanges of a sum are counted once, by the sum
                count_in_checkpoint()
        return self._buffers


class PendingSum:
    """A sum under way."""

    def __init__(self, world: World, posted: object, label: Label, number: int) -> None:
        self._world, self._posted, self._label, self._number = world, posted, label, number

    def wait(self) -> None:
        """Block until the tensor holds the sum. RankFailure at the deadline."""
        posted, self._posted = self._posted, DONE
        if posted is not DONE:
            began = self._world.events.clock()
            self._world.complete_sum(posted, self._label)
            self._world.waited(self._label, self._number, began)
