"""Memory that batches are read into. It is reused as soon as nothing refers to it any more.

A batch that is handed out holds a *lease*: its memory is not overwritten while any tensor on it lives, be it the batch
itself, what autograd saved of it, or a list that the user keeps. A user who keeps more batches than there are buffers
gets more buffers.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

import numpy as np
import torch

from ..stores.store import Array

_log = logging.getLogger("halocline.data")
_numbers = count()
ALIGNED = 64
_BLOCK = 1 << 26  # bytes; pages that are not written to take no memory
_PATIENCE = 1.0  # seconds that a buffer may take to come back before another one is made

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


class Memory:
    """A run of bytes: pinned where batches go to a GPU, shared where reader processes write into it."""

    def __init__(self, size: int, *, shared: bool = False, pinned: bool = False) -> None:
        size = max(size, 1)
        self.number = next(_numbers)  # descriptors are used again, these are not
        self.descriptor: int | None = None
        if shared:
            self.descriptor = os.memfd_create("halocline-batch")
            os.ftruncate(self.descriptor, size)
            self.bytes: Array = np.frombuffer(mmap.mmap(self.descriptor, size), np.uint8)
            # The mapping stays valid without the descriptor; readers open it by its path before that.
            weakref.finalize(self, os.close, self.descriptor)
        elif pinned:
            self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        else:
            self.bytes = np.empty(size, np.uint8)

    @property
    def address(self) -> int:
        """Where the bytes begin, in this process."""
        return int(self.bytes.ctypes.data)


@dataclass(frozen=True)
class Target:
    """An array on a shared memory, described by numbers so that another process can find it."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: Array, memory: Memory) -> Target:
        """Describe an array that lies on ``memory``."""
        return cls(array.ctypes.data - memory.address, array.shape, array.strides, array.dtype.str)

    def on(self, memory: Array) -> Array:
        """The array again, in a process that has mapped the memory."""
        return np.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)


class Buffer:
    """Room for the largest batch: an array a field, cut to what the batch at hand needs."""

    def __init__(self, shapes: Shapes, **kind: bool) -> None:
        self._starts, at = dict[str, int](), 0
        for name, (shape, dtype) in shapes.items():
            self._starts[name] = at
            at += -(-prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        self.memory = Memory(at, **kind)

    def array(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """The field's array, cut to ``shape``."""
        start, size = self._starts[name], prod(shape) * dtype.itemsize
        return self.memory.bytes[start : start + size].view(dtype).reshape(shape)


class Arena:
    """Memory that grows in blocks and is freed as a whole."""

    def __init__(self, **kind: bool) -> None:
        self._kind, self._blocks, self._used = kind, list[Memory](), 0

    def take(self, shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[Memory, Array]:
        """A new array; its memory stays taken as long as the arena lives."""
        size = prod(shape) * dtype.itemsize
        if not self._blocks or self._used + size > self._blocks[-1].bytes.nbytes:
            self._blocks.append(Memory(max(size, _BLOCK), **self._kind))
            self._used = 0
        block, start = self._blocks[-1], self._used
        self._used += -(-size // ALIGNED) * ALIGNED
        return block, block.bytes[start : start + size].view(dtype).reshape(shape)


class Pool:
    """A fixed number of buffers, and more only where batches are kept."""

    def __init__(self, limit: int, shapes: Shapes, **kind: bool) -> None:
        self._shapes, self._kind, self._limit = shapes, kind, limit
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self.made = 0
        self._said = False
        # The kernel allocates pages at the first touch, slower than a disk's cache reads: not in the first steps.
        self._maker = threading.Thread(target=self._prepare, name="halocline-buffers", daemon=True)
        self._maker.start()

    def _prepare(self) -> None:
        """Make all buffers and touch their pages, in a thread beside the first steps."""
        for _ in range(self._limit):
            buffer = self._make()
            buffer.memory.bytes[:: mmap.PAGESIZE] = 0
            self._free.put(buffer)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, those in use included."""
        return self.made * sum(prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values())

    def take(self) -> Buffer:
        """A free buffer: waits for one where all that may be made are in use."""
        # Short waits: the maker may end without a buffer for us.
        while self._maker.is_alive():
            with suppress(queue.Empty):
                return self._free.get(timeout=0.05)
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return self._make() if self.made < self._limit else self._wait()

    def _wait(self) -> Buffer:
        """Wait a moment for a buffer to come back; then make one more, and say once in the log why."""
        try:
            return self._free.get(timeout=0.0 if self._said else _PATIENCE)
        except queue.Empty:
            if not self._said:
                _log.warning(
                    "batches are kept after their step, and each takes memory of its own; keep numbers or copies"
                )
            self._said = True
            return self._make()

    def _make(self) -> Buffer:
        self.made += 1
        return Buffer(self._shapes, **self._kind)

    def give_back(self, buffer: Buffer) -> None:
        """Safe in finalizers: this queue may be put to wherever its user happens to be."""
        self._free.put(buffer)


class BufferLease:
    """One use of a buffer. It returns to the pool when the last array on it is freed."""

    def __init__(self, pool: Pool) -> None:
        self._pool, self.buffer = pool, pool.take()
        self.arrays: dict[str, Array] = {}
        self._counted = _Counted(pool, self.buffer)

    def array(self, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """An array in the buffer, to be filled by readers."""
        self.arrays[name] = self.buffer.array(name, shape, dtype)
        return self.arrays[name]

    def tensor(self, name: str) -> torch.Tensor:
        """What was filled, as a tensor that keeps the buffer from being used again."""
        array = self.arrays[name].view()
        tensor = torch.from_numpy(array)  # it holds on to this very array
        weakref.finalize(array, self._counted.release, self._counted.hold())
        return tensor

    def close(self) -> None:
        """No further arrays will be made on it."""
        self._counted.release(0)

    def lose(self) -> None:
        """Never reuse the buffer: a reader that hangs may still write into it."""
        self._pool.made -= 1


class _Counted:
    """Holders of a buffer: those who fill it, and each tensor."""

    def __init__(self, pool: Pool, buffer: Buffer) -> None:
        self._pool, self._once = pool, [buffer]
        self._holders, self._next = {0}, 1

    def hold(self) -> int:
        """A new holder; the buffer goes back to the pool when all have released it."""
        holder, self._next = self._next, self._next + 1
        self._holders.add(holder)
        return holder

    def release(self, holder: int) -> None:
        """Called by finalizers of any thread, at any moment: it takes no lock, and ``pop`` lets one through."""
        self._holders.discard(holder)
        if not self._holders:
            with suppress(IndexError):
                self._pool.give_back(self._once.pop())
