"""A bucket: gradients that travel as one message, in one piece of memory of which they are views.

Behind the gradients stands, for each, whether this rank had one (so that all learn from the sum who had), and one
wish: that the buckets be made anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..._torch_private import sharers

_COUNTABLE = {torch.bfloat16: 256, torch.half: 2048}  # up to which ones can be added one by one


class BucketCounts(NamedTuple):
    """What all ranks learn from a sum: how many had each gradient, and whether any wants other buckets."""

    counts: list[int]
    replan: bool


class Bucket:
    """Some parameters of one real dtype and device. ``indices`` name them to the engine."""

    def __init__(self, indices: Sequence[int], parameters: Sequence[Tensor]) -> None:
        self.indices = list(indices)
        self.shapes = [parameter.shape for parameter in parameters]
        self._strides = [_dense_strides(parameter) for parameter in parameters]
        self._complex = [parameter.is_complex() for parameter in parameters]
        self.dtype, self.device = real_dtype(parameters[0]), parameters[0].device
        self.counted_in = self.dtype  # what the last sum travelled as
        self.largest: float | None = None  # of the last mean, kept by compression
        self.scale = 1.0  # of the message under way
        self._starts = _starts(parameters)
        self._place = {index: place for place, index in enumerate(self.indices)}
        self._memory: Tensor | None = None
        self.views: list[Tensor] = []
        self.missing: set[int] = set()
        self._came: set[int] = set()
        self._unfilled: list[tuple[int, Tensor | None, bool]] = []  # places, what is to stand there, does it already

    @property
    def elements(self) -> int:
        return self._starts[-1]

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Start a new step, without gradients. New memory replaces memory that other tensors still share."""
        self.missing, self._came, self._unfilled = set(self.indices), set(), []
        if self._memory is None or self._looked_into(self._memory, parameters):
            self._allocate()

    def _looked_into(self, memory: Tensor, parameters: Sequence[Tensor]) -> bool:
        """Does a tensor beyond the parameters' own gradients share the memory, such as a gradient kept by the user?"""
        theirs = sum(self._inside(parameters[index].grad) for index in self.indices)
        return sharers(memory) > 1 + len(self.views) + theirs

    def _inside(self, gradient: Tensor | None) -> bool:
        if gradient is None or gradient.layout is not torch.strided:
            return False
        return gradient.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr()

    def holds(self, index: int, gradient: Tensor | None) -> bool:
        """Is this gradient the very place in the bucket's memory that is its own?"""
        view = self.views[self._place[index]]
        if gradient is None or gradient.layout is not torch.strided or gradient.data_ptr() != view.data_ptr():
            return False  # as nearly always: backward has made a new one
        return self._inside(gradient) and (gradient.shape, gradient.stride()) == (view.shape, view.stride())

    def gradient(self, index: int) -> Tensor:
        """For a parameter's ``.grad``: a tensor of its own. Re-pointing it (``Module.to`` does) leaves ours alone."""
        return self.views[self._place[index]].detach()

    def _allocate(self) -> None:
        count = self.elements + len(self.indices) + 1
        self._memory = torch.zeros(count, dtype=self.dtype, device=self.device)
        self.views = [self._view(self._memory, place) for place in range(len(self.indices))]

    def _view(self, memory: Tensor, place: int) -> Tensor:
        """Laid out as the parameter is, which is what optimizers and accumulation want."""
        start, shape = self._starts[place], self.shapes[place]
        if self._complex[place]:
            flat = memory[start : start + 2 * prod(shape)].view(-1, 2)
            return torch.view_as_complex(flat).as_strided(shape, self._strides[place])
        return memory[start : start + prod(shape)].as_strided(shape, self._strides[place], start)

    def put(self, index: int, gradient: Tensor | None, share: float | None = None, came: bool = True) -> bool:
        """Take in this rank's gradient of a parameter, or nothing. Did it lie in its place already?

        With ``share`` it is written now, as that part of the mean, where autograd does not record; else by
        :meth:`fill`.
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
        """Write what was put in, as a share of the mean."""
        if self._unfilled:
            with torch.no_grad():
                for place, gradient, in_place in self._unfilled:
                    _write(self.views[place], gradient, in_place, share)
            self._unfilled = []

    def take_back(self, share: float, parameters: Sequence[Tensor]) -> None:
        """What was put in as it was before, since it is not going to be summed."""
        self.fill(share)
        for index, view in zip(self.indices, self.views, strict=True):
            if index not in self.missing and self.holds(index, parameters[index].grad):
                view.div_(share)

    def seal(self, replan: bool = False) -> Tensor:
        """What is to be summed, with all that is to be said."""
        said = [float(index in self._came) for index in self.indices] + [float(replan)]
        self.memory[self.elements :].copy_(torch.tensor(said, dtype=self.dtype))
        return self.memory

    @property
    def values(self) -> Tensor:
        """The gradients alone."""
        return self.memory[: self.elements]

    @property
    def memory(self) -> Tensor:
        assert self._memory is not None
        return self._memory

    def told(self, ranks: int) -> BucketCounts:
        """After the sum. Narrow dtypes cannot count far: up to there a count is right, beyond it stands for all."""
        if self.memory.is_meta:
            return BucketCounts([ranks] * len(self.indices), False)
        *came, replan = self.memory[self.elements :].tolist()
        most = min(ranks, _COUNTABLE.get(self.counted_in, ranks))
        return BucketCounts([ranks if count >= most else round(count) for count in came], replan > 0)

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Are these parameters still what the bucket was made for?"""
        mine = (self.dtype, self.device)
        return all(
            parameters[index].shape == shape
            and parameters[index].is_complex() == pair
            and (real_dtype(parameters[index]), parameters[index].device) == mine
            for index, shape, pair in zip(self.indices, self.shapes, self._complex, strict=True)
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


def _own_references() -> int:
    """As ``is_shared`` counts them where its caller alone has a parameter's gradient."""
    leaf = torch.zeros(1, requires_grad=True)
    leaf.grad = torch.zeros(1)
    counted: list[int] = []

    def count(gradient: Tensor | None) -> None:
        counted.append(sys.getrefcount(gradient))

    gradient = leaf.grad
    count(gradient)
    return counted[0]


_OWN_REFERENCES = _own_references()


def real_dtype(tensor: Tensor) -> torch.dtype:
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def _starts(parameters: Sequence[Tensor]) -> list[int]:
    """Where each begins, in real numbers; complex ones in even places, as torch wants it. The last is the end."""
    starts, end = [], 0
    for parameter in parameters:
        if parameter.is_complex():
            end += end % 2
        starts.append(end)
        end += parameter.numel() * (2 if parameter.is_complex() else 1)
    return [*starts, end]


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own if it lies dense (channels last, say), else contiguous ones."""
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()


def by_kind(indices: Sequence[int], parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Runs of one dtype and device each, in order of first appearance."""
    kinds: dict[object, list[int]] = {}
    for index in indices:
        kinds.setdefault((real_dtype(parameters[index]), parameters[index].device), []).append(index)
    yield from kinds.values()
