"""Tags of messages: 63 bits that say which exchange a message belongs to.

From the highest bit: whether the tag is counted, a hash of the caller, a hash of the group of ranks, a hash of the
size, and the number of the exchange within the group.
"""

from __future__ import annotations

import hashlib
import zlib
from functools import lru_cache

import torch
from torch import Tensor

_TURN_BITS, _SIZE_BITS, _GROUP_BITS, _CALLER_BITS = 12, 10, 22, 18
_COUNTED = 1 << sum((_TURN_BITS, _SIZE_BITS, _GROUP_BITS, _CALLER_BITS))  # a tag that :meth:`World.begin` made
_DIGESTS = (1 << _GROUP_BITS + _CALLER_BITS) - 1
_STRIDE = 0x9E3779B97F  # odd: no two turns of a key have one digest
_EXCHANGE = (1 << _TURN_BITS) - 1 | ((1 << _GROUP_BITS) - 1) << (_TURN_BITS + _SIZE_BITS)


def counted_tag(turn: int, ranks: tuple[int, ...], operation: str, path: int) -> int:
    """A tag without its size: the number of the exchange in its group, the group, and the caller."""
    who = (_hash(operation) ^ path ^ path >> _CALLER_BITS ^ path >> 2 * _CALLER_BITS) & ((1 << _CALLER_BITS) - 1)
    group = _hash(ranks) & ((1 << _GROUP_BITS) - 1)
    turn &= (1 << _TURN_BITS) - 1
    return _COUNTED | (who << _GROUP_BITS | group) << (_TURN_BITS + _SIZE_BITS) | turn


@lru_cache(maxsize=4096)
def _hash(value: object) -> int:
    return zlib.crc32(repr(value).encode())


@lru_cache(maxsize=4096)
def size_bits(elements: int, dtype: torch.dtype) -> int:
    """The bits of a tag that depend on the message's size and dtype."""
    return (zlib.crc32(f"{elements} {dtype}".encode()) & ((1 << _SIZE_BITS) - 1)) << _TURN_BITS


def is_counted(tag: int) -> bool:
    """Was the tag made by :meth:`World.begin`, so that :func:`diverged` can compare it?"""
    return bool(tag & _COUNTED)


def diverged(awaited: int, came: int) -> bool:
    """Does the second tag prove that its sender is elsewhere in the program?

    In an exchange a rank sends at most one message to another, so two tags of the same group and number belong to the
    same exchange.
    """
    differing = awaited ^ came
    return bool(awaited & came & _COUNTED) and bool(differing) and not differing & _EXCHANGE


def called_elsewhere(awaited: int, theirs: int) -> bool:
    """The same for two tags that two ranks await from each other, whose sizes may differ."""
    size = ((1 << _SIZE_BITS) - 1) << _TURN_BITS
    return diverged(awaited | size, theirs | size)


def folded(tag: int, bits: int) -> int:
    """A tag in as few bits as a transport has; the higher bits are mixed into the lower ones."""
    while tag >> bits:
        tag = (tag & ((1 << bits) - 1)) ^ (tag >> bits)
    return tag


def sum_tag(turn: int, ranks: tuple[int, ...], operation: str, channel: str, tensor: Tensor) -> int:
    """The tag of a sum that goes as messages: different from all others, by channel and by the channel's own count."""
    tag = counted_tag(turn, (*ranks, -2), f"{operation} by {channel}", 0)
    return tag & ~_COUNTED | size_bits(tensor.numel(), tensor.dtype)


def crossing_tag(key: str, number: int, elements: int, dtype: torch.dtype, turn: int = 0) -> int:
    """The tag of a message between two sets of ranks, which count no exchanges together: by its crossing's key, and
    its turn among the crossings of that key."""
    digest = _digest(key) + turn * _STRIDE & _DIGESTS
    return digest << (_TURN_BITS + _SIZE_BITS) | number & ((1 << _TURN_BITS) - 1) | size_bits(elements, dtype)


@lru_cache(maxsize=4096)
def _digest(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=5).digest())


def divergence(rank: int, called: str, peer: int, theirs: str) -> str:
    """The error text for two ranks that have met at different places of the program."""
    return (
        f"rank {rank} is in {called}, while rank {peer} is in {theirs}: the ranks have taken different paths through "
        "the program. Have every rank call, from the same line, whatever communicates: reductions and other operations "
        "on cut tensors, the model, backward; print or log on one rank what all ranks have computed"
    )
