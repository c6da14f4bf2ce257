"""Tensors on GPUs, one GPU per rank, by NCCL: no copy in host memory, no tags (never run here on several GPUs)."""

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
    """A process group for each channel of a world, and for each set of ranks that sums on a channel."""

    def __init__(self, size: int, deadline: float) -> None:
        self._deadline, everyone = deadline, tuple(range(size))
        self._groups = {(channel, everyone): new_group(deadline, backend="nccl") for channel in CHANNELS}
        self._everyone = everyone

    def set_deadline(self, seconds: float) -> None:
        """Set the deadline of all groups, in seconds."""
        self._deadline = seconds
        for group in self._groups.values():
            set_group_timeout(group, timedelta(seconds=seconds))

    def post(self, sends: Sequence[Outgoing], receives: Sequence[Incoming], channel: str) -> list[dist.Work]:
        """Start the messages. Those of two ranks are matched by their order, which all ranks share."""
        group = self._groups[channel, self._everyone]
        operations = [dist.P2POp(dist.irecv, sendable(buffer), peer, group) for peer, buffer, _ in receives]
        operations += [
            dist.P2POp(dist.isend, sendable(message.contiguous()), peer, group) for peer, message, _ in sends
        ]
        return dist.batch_isend_irecv(operations) if operations else []

    def post_sum(self, tensor: Tensor, ranks: tuple[int, ...], channel: str) -> dist.Work:
        """Start an all-reduce in place. A group of these ranks is made when they first need it."""
        key = (channel, ranks)
        if key not in self._groups:  # made by its members alone, when first needed
            self._groups[key] = new_group(self._deadline, list(ranks), backend="nccl", use_local_synchronization=True)
        work = dist.all_reduce(tensor, group=self._groups[key], async_op=True)
        assert work is not None
        return work

    def release(self) -> None:
        """Keep the groups for the next world. torch gives groups of the same ranks the same name, and a new group of
        that name would read stale entries of the store."""
        _released.append(self)


_released: list[NcclGroups] = []


def nccl_groups(size: int, deadline: float) -> NcclGroups:
    """The groups of a closed world, or new ones. By all ranks together."""
    if not _released:
        return NcclGroups(size, deadline)
    groups = _released.pop()
    groups.set_deadline(deadline)
    return groups
