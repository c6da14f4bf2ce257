"""What may take over the sums of a backward pass that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..buckets.plan import Goal

if TYPE_CHECKING:
    from ..backward_pass import BackwardPass


class Overlap(Protocol):
    """Who takes over the sums of a backward that has ended, where they are not waited for at once."""

    goal: Goal

    def before(self, index: int) -> None:
        """A gradient is about to be added to a parameter's."""

    def take_over(self, ended: BackwardPass, came: set[int]) -> None:
        """Its sums have begun; the gradients are yet to be."""

    def take_means(self) -> None:
        """All gradients are means already: there was no plan to begin them by."""

    def look_back(self) -> None:
        """Let the engine see what earlier sums told, now that all ranks are at the same point."""

    def finish(self) -> None:
        """Wait for all that is under way."""
