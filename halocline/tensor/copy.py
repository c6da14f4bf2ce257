"""Results that torch returns as views, but that are copies here because their data had to move between ranks.

A write to such a copy is written back to its base, if an index made the copy, and refused otherwise. After a write to
the base the copy is out of date, and using it is refused.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from .._torch_private import TENSOR_MODULE, autograd_state, function_of, no_torch_function, storage_key, weak_memory
from ..errors import Refused
from .place import here
from .undrawn import Undrawn

_live: WeakSet[CopyOf] = WeakSet()
_live_lock = threading.RLock()


class Family:
    """The sharded tensors on one tile's memory, held weakly."""

    def __init__(self, first: Tensor) -> None:
        self._members = [weakref.ref(first)]

    def add(self, tensor: Tensor) -> None:
        """Remember one more tensor on the same memory."""
        self._members = [member for member in self._members if member() is not None]
        self._members.append(weakref.ref(tensor))

    def __iter__(self) -> Iterator[Tensor]:
        return (tensor for member in self._members if (tensor := member()) is not None)


def family_of(tensor: Any) -> Family:
    """The family of a sharded tensor, made when first asked for."""
    if tensor._family is None:
        tensor._family = Family(tensor)
    family: Family = tensor._family
    return family


class CopyOf:
    """The mark of such a copy. It holds the base weakly, and counts the writes to the base's tile.

    A copy that an index took (``index``) is written back to its base after a write, and so behaves as torch's view
    does.
    """

    #: The copy as a tensor without a mark; set by the executor when it hands the copy out.
    values: Callable[[], Tensor] | None = None

    def __init__(
        self,
        base: Tensor,
        tile: Tensor,
        index: tuple[Any, ...] | None = None,
        parent: CopyOf | None = None,
        unsure: bool = False,
    ) -> None:
        #: May torch's result be a copy as well? Then it is written to, and its base is not used any more.
        self.unsure = unsure
        self._family = family_of(base) if unsure or hasattr(base, "_family") else None
        self._counter: Tensor | None = None
        self._memory = weak_memory(tile)
        self._base, self._index, self._parent, self._stale = weakref.ref(base), index, parent, False
        if not tile.is_inference():  # those have no version to share
            self._counter = tile.detach()
            # Shares the tile's version counter, but none of its memory.
            self._counter.data = tile.new_empty(0)
            self._version = self._counter._version
        with _live_lock:
            _live.add(self)

    def check(self) -> None:
        """Raise if the base was written to since."""
        if self._parent is not None:
            self._parent.check()
        if self._outdated():
            raise Refused(
                "a view",
                here(),
                "its base was changed in place after its data had been moved, so that it no longer shows it",
                "take the view after the change, or call .clone() on it before",
            )

    def written(self) -> None:
        """After a write to a copy whose base may or may not show it: nothing on the base's memory is used again."""
        # Tensors that share memory with the base may or may not show the write.
        for tensor in self._family or ():
            tensor._copy_of = Uncertain()  # type: ignore[attr-defined]
        if self._parent is not None:
            self._parent.written()

    def _alone(self) -> bool:
        """Is the base's memory freed, so that nothing else shows a write?"""
        return self._memory.expired() and (self._parent is None or self._parent._alone())

    def can_write_back(self) -> bool:
        """Is there a base to write to, or no tensor left that could show the difference?"""
        if self._alone():
            return True
        above = self._parent is None or self._parent.can_write_back()
        return above and self._index is not None and self._base() is not None and self.values is not None

    def write_back(self) -> None:
        """After a write to the copy: the base takes it in, at the place it came from."""
        if self._alone():
            _outdate(self._memory.cdata, self)
            return
        base = self._base()
        if base is None or self._index is None or self.values is None:
            raise AssertionError("a copy is written back only where can_write_back says so")
        # Other copies of the base stay valid, if this write does not reach their part.
        untouched = [mark for mark in _copies_of(self._memory.cdata) if mark._is_beside(self, base)]
        base[self._index] = self.values()
        for mark in (self, *untouched):
            mark._stale = False
            if mark._counter is not None:
                mark._version = mark._counter._version

    def _outdated(self) -> bool:
        return self._stale or (self._counter is not None and self._counter._version != self._version)

    def _is_beside(self, other: CopyOf, base: Tensor) -> bool:
        """Is it up to date, and of a part of the same base that a write to ``other`` does not reach?"""
        if self._outdated() or self._base() is not base or self._index is None or other._index is None:
            return False
        return _disjoint(self._index, other._index, tuple(base.shape))


class WithoutBase(CopyOf):
    """A mark that has no base to write back to: subclasses say what it stands for."""

    unsure = False

    def _alone(self) -> bool:
        return False

    def can_write_back(self) -> bool:
        """Never."""
        return False


class Uncertain(WithoutBase):
    """The mark of a tensor that may or may not show a write to something made of it."""

    def __init__(self) -> None:
        pass

    def check(self) -> None:
        """Always raises: the tensor may not be used any more."""
        raise Refused(
            "a tensor",
            here(),
            "what .contiguous() or a reshape made of it was changed in place, and whether that shows in it depends on "
            "the memory formats torch chooses",
            "call .clone() before the change, or leave the tensor alone after it",
        )


def note_write(tile: Tensor) -> None:
    """A write to ``tile`` that its version may not show (``x.data``): copies of its memory are out of date."""
    if _live:
        _outdate(storage_key(tile))


def _outdate(memory: int, but: CopyOf | None = None) -> None:
    for mark in _copies_of(memory):
        if mark is not but:
            mark._stale = True


def _copies_of(memory: int) -> list[CopyOf]:
    with _live_lock:
        return [mark for mark in _live if mark._memory.cdata == memory]


def _disjoint(one: tuple[Any, ...], other: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    """Do two indices, of one integer or slice for each dim and new dims, share no element? Steps count as filled.

    >>> _disjoint((0, slice(None)), (slice(1, None), slice(None)), (4, 3))
    True
    """
    sides = [[item for item in index if item is not None] for index in (one, other)]
    return any(_apart(a, b, size) for a, b, size in zip(*sides, shape, strict=True))


def _apart(one: int | slice, other: int | slice, size: int) -> bool:
    (first, end), (other_first, other_end) = _span(one, size), _span(other, size)
    return end <= other_first or other_end <= first


def _span(item: int | slice, size: int) -> tuple[int, int]:
    """The first index that an item takes, and the one after the last."""
    steps = range(size)[item]
    if isinstance(steps, int):
        return steps, steps + 1
    return (steps[0], steps[-1] + 1) if steps else (0, 0)


class Loose(WithoutBase):
    """The mark of a shell that torch made behind its function protocol, and that may have got a node since."""

    def __init__(self, mark: CopyOf | None) -> None:
        self.mark = mark

    def check(self) -> None:
        """As the mark of the shell it was made of."""
        if self.mark is not None:
            self.mark.check()


def refuse_write(operation: str) -> Refused:
    """The error of a write that its base would not show; the caller raises it."""
    return Refused(
        operation,
        here(),
        "in place, it would change a copy: torch's result is a view of its base, and here its data had to move",
        "call .clone() on it first, or write it out of place",
    )


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Of empty tensors it holds always. Those of a dry run have no address: they share memory by sharing a storage."""
    if one.is_meta and other.is_meta:
        return storage_key(one) == storage_key(other)
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class WholeCopy(Tensor):
    """Such a copy that every rank has whole: a plain tensor in all but this, that a write to it is noticed.

    What is computed from it is plain; what shares its memory is marked alike.
    """

    __module__ = TENSOR_MODULE
    _plain: Tensor
    _copy_of: CopyOf

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copies: list[WholeCopy] = []
        plain_args, plain_kwargs = _stripped(args, copies), _stripped(kwargs or {}, copies)
        # A function that writes in place raises the version of the memory it writes to.
        versions = [_version(copy) for copy in copies]
        result = function(*plain_args, **plain_kwargs)
        for copy, version in zip(copies, versions, strict=True):
            if _version(copy) != version:
                if not copy._copy_of.can_write_back():
                    raise refuse_write(getattr(function, "__name__", str(function)))
                copy._copy_of.write_back()
        return _marked_like(copies, result)


def counting_writes(tensor: Tensor) -> Tensor:
    """A tensor of inference mode has no version: the same values with one."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def whole_copy(tensor: Tensor, mark: CopyOf) -> WholeCopy:
    """A plain result with the mark of a copy."""
    shell = tensor.as_subclass(WholeCopy)
    shell._plain, shell._copy_of = tensor, mark
    return shell


def plain(tensor: Tensor) -> Tensor:
    """The tensor that torch computes with, past the library's own classes; outdated copies are refused."""
    if not isinstance(tensor, WholeCopy):
        return tensor._plain if isinstance(tensor, Undrawn) else tensor
    tensor._copy_of.check()
    if function_of(autograd_state(tensor)[0]) is not None:
        # An autograd Function (a reentrant checkpoint, say) gave it out: its node is the shell's alone.
        with no_torch_function(), torch.enable_grad():
            tensor._plain = tensor.as_subclass(Tensor)
    return tensor._plain


def _version(copy: WholeCopy) -> int:
    """How often the copy's memory was written to; tensors of inference mode do not count."""
    return 0 if copy._plain.is_inference() else copy._plain._version


def _stripped(value: Any, copies: list[WholeCopy]) -> Any:
    """The same arguments with plain tensors in place of marked copies, which are collected in ``copies``."""
    if isinstance(value, WholeCopy):
        copies.append(value)
        return plain(value)
    if type(value) in (tuple, list):
        return type(value)(_stripped(item, copies) for item in value)
    if type(value) is dict:
        return {name: _stripped(item, copies) for name, item in value.items()}
    return value


def _marked_like(copies: list[WholeCopy], result: Any) -> Any:
    """The same result, in which tensors on a copy's memory bear the copy's mark."""
    if type(result) in (tuple, list):
        return type(result)(_marked_like(copies, item) for item in result)
    if type(result) is Tensor:
        for copy in copies:
            if result.numel() and same_memory(copy._plain, result):
                return whole_copy(result, copy._copy_of)
    return result
