"""One rank of any number, alone: it moves nothing, and emits the events of what it would have moved.

Programs run in it on meta tensors, through the very code that moves between processes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import MeshError
from .base import Incoming, Outgoing, World
from .capabilities import Capabilities
from .events import Label


class DryWorld(World):
    """Rank ``rank`` of ``size``, without the others."""

    capabilities = Capabilities("dry", moves_data=False)

    def __init__(self, rank: int, size: int) -> None:
        if not 0 <= rank < size:
            raise MeshError(f"there is no rank {rank} among {size}; ranks count from 0")
        super().__init__(rank, size, deadline=0.0)

    def path(self, label: Label) -> int:
        """Nobody compares it."""
        return 0

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], label: Label) -> object:
        return None

    def complete(self, posted: object, label: Label) -> None:
        """Nothing comes: buffers are meta tensors, or stay unread."""

    def post_sum(self, tensor: Tensor, ranks: tuple[int, ...], label: Label) -> object:
        return None

    def complete_sum(self, posted: object, label: Label) -> None:
        """The tensor keeps what it holds."""

    def _duplicate(self, wide: bool) -> DryWorld:
        return type(self)(self.rank, self.size)

    def _swap(
        self,
        value: Tensor,
        ranks: tuple[int, ...],
        label: Label,
        send_to: int | None = None,
        receive_from: int | None = None,
        path: int | None = None,
    ) -> Tensor:
        """As if the partner held the same value: what little is not meta (shapes, flags) then stays meaningful."""
        super()._swap(value, ranks, label, send_to, receive_from, path)
        return value
