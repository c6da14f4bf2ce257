"""One rank of any number, alone: it moves nothing, and emits the events of what it would have moved.

Programs run in it on meta tensors, through the same code that communicates between processes. Planning, forecasts of
memory and tests of programs for thousands of ranks use it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import MeshError
from .base import Incoming, Outgoing, World
from .capabilities import Capabilities
from .events import Label


class DryWorld(World):
    """Rank ``rank`` of ``size``, without the others. Small sums and broadcasts return this rank's own value."""

    capabilities = Capabilities("dry", moves_data=False)
    counts_bytes = True  #: False: shapes alone are asked for, so that what travels may depend on values

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise MeshError(f"there is no rank {rank} among {size}; ranks count from 0")
        super().__init__(rank, size, deadline=0.0)

    def path(self, label: Label) -> int:
        """0: no other rank compares it."""
        return 0

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label) -> object:
        """Nothing is sent; ``begin_tagged`` has emitted the event."""
        return None

    def complete(self, posted: object, label: Label) -> None:
        """Nothing arrives: buffers are meta tensors, or are not read."""

    def post_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> object:
        """Nothing is summed; ``begin_sum`` has emitted the event."""
        return None

    def complete_sum(self, posted: object, label: Label) -> None:
        """The tensor keeps its values."""

    def _duplicate(self, wide: bool) -> DryWorld:
        return type(self)(self.rank, self.size)

    def _duplicate_among(self, members: tuple[int, ...], wide: bool) -> DryWorld:
        return type(self)(self.rank, self.size)
