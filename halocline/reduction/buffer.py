"""A group: gradients that travel as one message, in one piece of memory of which they are views.

Behind the gradients stands, for each, whether this rank had one (so that all learn from the sum who had), and one
wish: that the groups be made anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from .._torch_private import sharers

_OURS = 3  # references to a view: the list's, the loop's, and the question's


class Group:
    """Some parameters of one real dtype and device. ``indices`` name them to the engine."""

    def __init__(self, indices: Sequence[int], parameters: Sequence[Tensor]) -> None:
        self.indices = list(indices)
        self.shapes = [parameter.shape for parameter in parameters]
        self._strides = [_dense_strides(parameter) for parameter in parameters]
        self._complex = [parameter.is_complex() for parameter in parameters]
        self._dtype, self._device = real_dtype(parameters[0]), parameters[0].device
        sizes = [2 * p.numel() if p.is_complex() else p.numel() for p in parameters]
        self._starts = [sum(sizes[:place]) for place in range(len(sizes) + 1)]
        self._place = {index: place for place, index in enumerate(self.indices)}
        self._memory: Tensor | None = None
        self.views: list[Tensor] = []
        self.missing: set[int] = set()
        self._came: set[int] = set()

    @property
    def elements(self) -> int:
        return self._starts[-1]

    @property
    def bytes(self) -> int:
        return self.elements * self._dtype.itemsize

    def begin(self) -> None:
        """A new step: nobody has come. Memory that somebody else still looks into is left to them."""
        self.missing, self._came = set(self.indices), set()
        if self._memory is None or self._looked_into(self._memory):
            self._allocate()
        else:
            self._memory[self.elements :].zero_()

    def _looked_into(self, memory: Tensor) -> bool:
        """Has somebody kept a gradient of the last step, or a view of one?"""
        return sharers(memory) > 1 + len(self.views) or any(sys.getrefcount(view) > _OURS for view in self.views)

    def _allocate(self) -> None:
        count = self.elements + len(self.indices) + 1
        self._memory = torch.zeros(count, dtype=self._dtype, device=self._device)
        self.views = [self._view(self._memory, place) for place in range(len(self.indices))]

    def _view(self, memory: Tensor, place: int) -> Tensor:
        """Laid out as the parameter is, which is what optimizers and accumulation want."""
        start, shape = self._starts[place], self.shapes[place]
        if self._complex[place]:
            flat = memory[start : start + 2 * prod(shape)].view(-1, 2)
            return torch.view_as_complex(flat).as_strided(shape, self._strides[place])
        return memory[start : start + prod(shape)].as_strided(shape, self._strides[place], start)

    def put(self, index: int, gradient: Tensor | None, share: float, came: bool = True) -> Tensor:
        """This rank's part of a parameter's mean; without a gradient, nothing. Returns where the mean will be."""
        view = self.views[self._place[index]]
        with torch.no_grad():
            if gradient is None:
                view.zero_()
            elif gradient is view:
                view.mul_(share)
            else:
                torch.mul(gradient.to_dense() if gradient.is_sparse else gradient, share, out=view)
        self.missing.discard(index)
        if came:
            self._came.add(index)
        return view

    def take_back(self, share: float) -> None:
        """What was put in as it was before, since it is not going to be summed."""
        for index, view in zip(self.indices, self.views, strict=True):
            if index not in self.missing:
                view.div_(share)

    def seal(self, anew: bool = False) -> Tensor:
        """What is to be summed, with all that is to be said."""
        said = [float(index in self._came) for index in self.indices] + [float(anew)]
        if all(said[:-1]) and not anew:  # most often; a fill is quicker than a copy from the host
            self.memory[self.elements : -1].fill_(1)
        else:
            self.memory[self.elements :].copy_(torch.tensor(said, dtype=self._dtype))
        return self.memory

    @property
    def memory(self) -> Tensor:
        assert self._memory is not None
        return self._memory

    def told(self) -> tuple[list[bool], bool]:
        """After the sum: of each parameter, whether any rank had a gradient; and whether any wants other groups."""
        if self.memory.is_meta:
            return [True] * len(self.indices), False
        *came, anew = (self.memory[self.elements :] > 0).tolist()
        return came, anew

    def counts(self) -> list[int]:
        """After the sum: how many ranks had each (no more than the dtype can count)."""
        if self.memory.is_meta:
            return []
        return [round(value) for value in self.memory[self.elements : -1].tolist()]

    def fits(self, parameters: Sequence[Tensor]) -> bool:
        """Are these parameters still what the group was made for?"""
        mine = (self._dtype, self._device)
        return all(
            parameters[index].shape == shape and (real_dtype(parameters[index]), parameters[index].device) == mine
            for index, shape in zip(self.indices, self.shapes, strict=True)
        )


def real_dtype(tensor: Tensor) -> torch.dtype:
    return tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype


def _dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own if it lies dense (channels last, say), else contiguous ones."""
    return torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()


def by_kind(indices: Sequence[int], parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Runs of one dtype and device each, in order of first appearance."""
    kinds: dict[object, list[int]] = {}
    for index in indices:
        kinds.setdefault((real_dtype(parameters[index]), parameters[index].device), []).append(index)
    yield from kinds.values()
