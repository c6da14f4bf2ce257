"""A bucket: gradients that travel as one message, in one piece of memory of which they are views.

Behind the gradients the message carries one number per gradient (1 where this rank had it) and one number that asks
for new buckets. So every rank learns from the sum itself who had which gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..._torch_private import sharers, storage_key

_COUNTABLE = {torch.bfloat16: 256, torch.half: 2048}  # largest count that sums of ones reach exactly in these dtypes


class SumReport(NamedTuple):
    """What all ranks learn from a bucket's sum, beside the means."""

    had: set[int]  #: parameters of which at least one rank had a gradient
    uneven: bool  #: some rank lacked a gradient that another rank had
    replan: bool  #: some rank asks for new buckets


class _Slot(NamedTuple):
    """Where one gradient lies in the bucket's memory, counted in real numbers, and how it is laid out."""

    start: int
    shape: torch.Size
    strides: tuple[int, ...]
    is_complex: bool

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape) * (2 if self.is_complex else 1)

    def view(self, memory: Tensor) -> Tensor:
        """The gradient as a view, laid out as its parameter: optimizers and accumulation expect that."""
        if self.is_complex:
            pairs = memory[self.start : self.stop].view(-1, 2)
            return torch.view_as_complex(pairs).as_strided(self.shape, self.strides)
        return memory[self.start : self.stop].as_strided(self.shape, self.strides, self.start)


class Bucket:
    """Gradients of parameters of one real dtype and device; ``indices`` are their places in ``parameters``.

    Owns the memory that is summed. A step is: :meth:`begin`, :meth:`put` for each gradient, :meth:`fill`, the sum of
    :meth:`seal`'s tensor over ranks, then :meth:`report` and :meth:`gradient`.
    """

    def __init__(self, indices: Sequence[int], parameters: Sequence[Tensor]) -> None:
        self.indices = list(indices)
        first = parameters[self.indices[0]]
        self.dtype, self.device = real_dtype(first), first.device
        self.counted_in = self.dtype  # dtype in which the last message travelled
        self.largest: float | None = None  # largest element of the last mean, which compression scales by
        self.scale = 1.0  # of the message under way
        self._slots: list[_Slot] = []
        end = 0
        for parameter in (parameters[index] for index in self.indices):
            end += end % 2 if parameter.is_complex() else 0  # torch views pairs as complex at even offsets only
            # Dense parameters keep their own strides (channels last, for instance); others become contiguous.
            strides = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()
            self._slots.append(_Slot(end, parameter.shape, strides, parameter.is_complex()))
            end = self._slots[-1].stop
        self._place = {index: place for place, index in enumerate(self.indices)}
        self._memory: Tensor | None = None
        self.views: list[Tensor] = []
        self.missing: set[int] = set()  # parameters whose gradient was not put in yet
        self._came: set[int] = set()
        self._unfilled: list[tuple[int, Tensor | None, bool]] = []  # place, gradient, whether it lies there already

    @property
    def elements(self) -> int:
        """Real numbers in all gradients, padding included."""
        return self._slots[-1].stop

    @property
    def bytes(self) -> int:
        """Size of the gradients, without the numbers behind them."""
        return self.elements * self.dtype.itemsize

    @property
    def memory(self) -> Tensor:
        """Gradients, then the numbers behind them; there from the first :meth:`begin` on."""
        assert self._memory is not None
        return self._memory

    @property
    def values(self) -> Tensor:
        """The part of the memory that holds gradients."""
        return self.memory[: self.elements]

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Start a new step, without gradients. New memory replaces memory that other tensors still share."""
        self.missing, self._came, self._unfilled = set(self.indices), set(), []
        if self._memory is not None:
            # Beyond our views and the parameters' own gradients, a sharer is a gradient that the user keeps.
            theirs = sum(self._inside(parameters[index].grad) for index in self.indices)
            if sharers(self._memory) <= 1 + len(self.views) + theirs:
                return
        self._allocate()

    def let_go(self) -> None:
        """Give its memory back, between steps and without gradients in it; the next step has new memory."""
        self._memory, self.views = None, []

    def _allocate(self) -> None:
        self._memory = torch.zeros(self.elements + len(self.indices) + 1, dtype=self.dtype, device=self.device)
        self.views = [slot.view(self._memory) for slot in self._slots]

    def _inside(self, gradient: Tensor | None) -> bool:
        """Does this gradient lie anywhere in the bucket's memory?"""
        if gradient is None or gradient.layout is not torch.strided:
            return False
        return storage_key(gradient) == storage_key(self.memory)  # meta tensors all have the address 0

    def holds(self, index: int, gradient: Tensor | None) -> bool:
        """Is this gradient exactly the parameter's place in the bucket's memory?"""
        view = self.views[self._place[index]]
        if gradient is None or gradient.layout is not torch.strided or gradient.data_ptr() != view.data_ptr():
            return False  # the usual case: backward has made a new tensor
        return self._inside(gradient) and (gradient.shape, gradient.stride()) == (view.shape, view.stride())

    def gradient(self, index: int) -> Tensor:
        """A new tensor on the parameter's place, for its ``.grad``. Re-pointing it, as ``Module.to`` does, leaves the
        bucket's own view alone."""
        return self.views[self._place[index]].detach()

    def put(self, index: int, gradient: Tensor | None, share: float | None = None, came: bool = True) -> bool:
        """Take this rank's gradient of a parameter; None stands for zeros. Returns whether it lay in place already.

        With ``share`` it is scaled and written now, which needs autograd to be off; without, :meth:`fill` does it.
        ``came=False`` tells the other ranks that this rank had no gradient in this step.
        """
        in_place = self.holds(index, gradient)
        if share is None:
            self._unfilled.append((self._place[index], gradient, in_place))
        else:
            _write(self.views[self._place[index]], gradient, in_place, share)
        self.missing.discard(index)
        if came:
            self._came.add(index)
        return in_place

    def fill(self, share: float) -> None:
        """Write the gradients that :meth:`put` only noted, times ``share``."""
        if self._unfilled:
            with torch.no_grad():
                for place, gradient, in_place in self._unfilled:
                    _write(self.views[place], gradient, in_place, share)
            self._unfilled = []

    def take_back(self, share: float, parameters: Sequence[Tensor]) -> None:
        """Undo the scaling of gradients that lie in the bucket, since they are not going to be summed."""
        self.fill(share)
        for index, view in zip(self.indices, self.views, strict=True):
            if index not in self.missing and self.holds(index, parameters[index].grad):
                view.div_(share)

    def seal(self, replan: bool = False) -> Tensor:
        """Write the numbers behind the gradients, and return the tensor to sum over ranks in place."""
        numbers = [float(index in self._came) for index in self.indices] + [float(replan)]
        self.memory[self.elements :].copy_(torch.tensor(numbers, dtype=self.dtype))
        return self.memory

    def report(self, ranks: int) -> SumReport:
        """Read the numbers behind the gradients, after a sum over so many ranks.

        Narrow dtypes count exactly up to a limit only: a count at the limit stands for all ranks.
        """
        if self.memory.is_meta:
            return SumReport(set(self.indices), uneven=False, replan=False)
        *counts, replan = self.memory[self.elements :].tolist()
        most = min(ranks, _COUNTABLE.get(self.counted_in, ranks))
        had = {index for index, count in zip(self.indices, counts, strict=True) if round(count)}
        return SumReport(had, any(round(count) > 0 and count < most for count in counts), replan > 0)

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Do the parameters still have the shapes, dtype and device that the bucket was made for?"""
        return all(
            parameters[index].shape == slot.shape
            and parameters[index].is_complex() == slot.is_complex
            and (real_dtype(parameters[index]), parameters[index].device) == (self.dtype, self.device)
            for index, slot in zip(self.indices, self._slots, strict=True)
        )


def _write(view: Tensor, gradient: Tensor | None, in_place: bool, share: float) -> None:
    if gradient is None:
        view.zero_()
    elif in_place:
        view.mul_(share)
    else:
        torch.mul(gradient.to_dense() if gradient.is_sparse else gradient, share, out=view)


def is_shared(gradient: Tensor | None) -> bool:
    """Does anything but the parameter refer to this gradient or share its memory?"""
    return gradient is not None and (
        sys.getrefcount(gradient) > _OWN_REFERENCES or gradient.is_sparse or sharers(gradient) > 1
    )


def _references(gradient: Tensor) -> int:
    """As many as ``is_shared`` counts for the same argument: both are one call below the caller."""
    return sys.getrefcount(gradient)


def _own_references() -> int:
    """References to a gradient that only its parameter and the caller's local variable hold."""
    leaf = torch.zeros(1, requires_grad=True)
    leaf.grad = torch.zeros(1)
    gradient = leaf.grad
    return _references(gradient)


_OWN_REFERENCES = _own_references()


def real_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a gradient lies in a bucket: complex numbers as pairs of real ones."""
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def by_kind(indices: Sequence[int], parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Group parameters by real dtype and device, in order of first appearance."""
    kinds: dict[object, list[int]] = {}
    for index in indices:
        kinds.setdefault((real_dtype(parameters[index]), parameters[index].device), []).append(index)
    yield from kinds.values()
