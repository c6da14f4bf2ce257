"""Tensors on GPUs, one GPU a rank, by NCCL: no copy in host memory, no tags (exchanges have never been run here)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from .._torch_private import set_group_timeout
from .base import CHANNELS, Incoming, Outgoing
from .rendezvous import new_group
from .tensor_bytes import sendable


class NcclGroups:
    """A process group for each channel of a world, and for each set of ranks that sums on it."""

    def __init__(self, size: int, deadline: float) -> None:
        self._deadline, everyone = deadline, tuple(range(size))
        self._groups = {(channel, everyone): new_group(deadline, backend="nccl") for channel in CHANNELS}
        self._everyone = everyone

    def set_deadline(self, seconds: float) -> None:
        self._deadline = seconds
        for group in self._groups.values():
            set_group_timeout(group, timedelta(seconds=seconds))

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], channel: str) -> list[dist.Work]:
        """Messages of a pair match by order, which all ranks share."""
        group = self._groups[channel, self._everyone]
        operations = [dist.P2POp(dist.irecv, sendable(buffer), peer, group) for peer, buffer, _ in receives]
        operations += [
            dist.P2POp(dist.isend, sendable(message.contiguous()), peer, group) for peer, message, _ in sends
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def post_sum(self, tensor: Tensor, ranks: tuple[int, ...], channel: str) -> dist.Work:
        key = (channel, ranks)
        if key not in self._groups:  # made by its members alone, when first needed
            self._groups[key] = new_group(self._deadline, list(ranks), backend="nccl", use_local_synchronization=True)
        work = dist.all_reduce(tensor, group=self._groups[key], async_op=True)
        assert work is not None
        return work

    def release(self) -> None:
        """Leave them to the next world. torch names groups of the same ranks alike, and one whose name comes again
        would find in the store what the first has left there.
        """
        _released.append(self)


_released: list[NcclGroups] = []


def nccl_groups(size: int, deadline: float) -> NcclGroups:
    """Those of a closed world, or new ones. By all ranks together, as worlds are made and closed."""
    if not _released:
        return NcclGroups(size, deadline)
    groups = _released.pop()
    groups.set_deadline(deadline)
    return groups
