"""The interface of schedules in which sums go on after backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..buckets.plan import Goal

if TYPE_CHECKING:
    from ..backward_pass import BackwardPass


class Overlap(Protocol):
    """Takes over a backward pass that has ended while its sums are under way: :class:`NextForwardOverlap`, or
    :class:`Lag`. The engine calls all methods in the rank's own thread, or in autograd's."""

    goal: Goal

    def before(self, index: int) -> None:
        """A gradient is about to be added to a parameter's ``.grad``."""

    def take_over(self, ended: BackwardPass, came: set[int]) -> None:
        """All sums of a pass have begun; gradients of the parameters in ``came`` came on this rank."""

    def take_means(self) -> None:
        """A pass without a plan has ended: all gradients are means already."""

    def look_back(self) -> None:
        """Let the engine review its plan by what earlier sums told, now that all ranks are at the same point."""

    def finish(self) -> None:
        """Wait for all sums under way."""
