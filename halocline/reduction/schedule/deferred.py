"""Tensors whose values are still under way: reading the values waits for them.

A **pending gradient** is a parameter's ``.grad`` while the ranks sum it. A **deferred parameter** is one whose
optimizer step was requested and is not made yet, since its gradient is pending. Reading shapes and dtypes goes straight
through; the first torch function that needs values waits for them. So any Python code that reads a parameter or a
gradient (a layer, a moving average of weights, ``state_dict``, clipping, a print) reads the right values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import currentframe
from typing import Any

from torch import Tensor, nn

from ..._torch_private import TENSOR_MODULE, no_torch_function, own_parameters, run_eagerly
from ...tree import map_tensors, tensors_in

_DUE = "_halocline_due"  # the attribute of a deferred parameter that holds its update
_PROPERTIES = """
    _backward_hooks _grad _post_accumulate_grad_hooks _version device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta
    is_mkldnn is_mps is_quantized is_sparse is_sparse_csr is_xpu itemsize layout names nbytes ndim output_nr
    requires_grad retains_grad shape
"""
_METHODS = """
    __hash__ __len__ dim element_size get_device is_complex is_contiguous is_floating_point is_inference is_shared
    is_signed ndimension nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ size stride
    storage_offset
"""


_ACCESSORS = [
    getattr(getattr(Tensor, name), accessor)
    for name in _PROPERTIES.split()
    for accessor in ("__get__", "__set__", "__delete__")
    if hasattr(getattr(Tensor, name, None), accessor)
]
#: Torch functions that read or change a tensor's metadata, and never its values.
ABOUT = frozenset([*_ACCESSORS, *(getattr(Tensor, name) for name in _METHODS.split())])
_MAKING = nn.Parameter.__new__.__code__


class DeferredParameter(nn.Parameter):
    """The class of a parameter whose optimizer step is still to be made. Only ``__class__`` changes: it is the same
    object before, meanwhile and after."""

    __module__ = TENSOR_MODULE

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in ABOUT:
            with no_torch_function():
                return function(*args, **kwargs)
        settle((args, kwargs))
        result = function(*args, **kwargs)
        if function is Tensor.detach:
            frame = currentframe()
            caller = frame.f_back if frame is not None else None
            if caller is not None and caller.f_code is _MAKING:  # nn.Parameter(this) detaches, and wants its own class
                return result.as_subclass(nn.Parameter)
        return result

    def as_subclass(self, cls: Any) -> Any:
        settle(self)
        return Tensor.as_subclass(self, cls)

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        settle(self)
        copied: nn.Parameter = nn.Parameter.__deepcopy__(self, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        settle(self)
        return nn.Parameter.__reduce_ex__(self, protocol)


def can_be_deferred(parameter: Tensor) -> bool:
    """Only plain parameters: another subclass would lose its own behaviour."""
    return type(parameter) in (nn.Parameter, DeferredParameter)


def defer(parameter: Tensor, update: Callable[[], None]) -> None:
    """Call ``update()`` when a torch function first reads the parameter's values, unless :func:`undefer` comes
    before."""
    setattr(parameter, _DUE, update)
    parameter.__class__ = DeferredParameter


def undefer(parameter: Tensor) -> Callable[[], None] | None:
    """Make it a plain parameter again; returns the update that was to be called."""
    if type(parameter) is not DeferredParameter:
        return None
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    update: Callable[[], None] = parameter.__dict__.pop(_DUE)
    return update


def settle(value: Any) -> None:
    """Make the steps of all deferred parameters in a structure of arguments. Waits for their sums."""
    for tensor in tensors_in(value):
        update = undefer(tensor)
        if update is None:  # a plain tensor, or another thread was first
            continue
        try:
            update()
        except BaseException:  # the step is not made: later readers must not take the old values for new ones
            defer(tensor, update)
            raise


def settle_own(module: nn.Module, _: Any) -> None:
    """A forward pre-hook that settles a module's own parameters, for layers that pass them to code outside Python."""
    for parameter in own_parameters(module):
        if type(parameter) is DeferredParameter:
            settle(parameter)


for _function in (settle, settle_own, DeferredParameter.__torch_function__.__func__):  # type: ignore[attr-defined]
    run_eagerly(_function)  # torch.compile would assume that an object's class never changes


class PendingGradient(Tensor):
    """The class of a gradient that is still being summed, in the memory where its mean will stand."""

    __module__ = TENSOR_MODULE

    _arrive: Callable[[], None]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = partial(_arrived, only_about=function in ABOUT)
        return function(*map_tensors(plain, args), **map_tensors(plain, kwargs or {}))

    def as_subclass(self, cls: Any) -> Any:
        return _arrived(self, only_about=False).as_subclass(cls)


def pending(gradient: Tensor, arrive: Callable[[], None]) -> PendingGradient:
    """Make a gradient pending, in place: ``arrive()`` is called when a torch function reads its values."""
    gradient.__class__ = PendingGradient
    assert isinstance(gradient, PendingGradient)
    gradient._arrive = arrive
    return gradient


def resolved(gradient: Tensor) -> Tensor:
    """The mean has arrived: make the same object a plain tensor again."""
    gradient.__class__ = Tensor
    gradient.__dict__.pop("_arrive", None)
    return gradient


def _arrived(tensor: Tensor, only_about: bool) -> Tensor:
    """A pending gradient as a plain tensor, after its mean has arrived unless ``only_about``; others as they are."""
    if isinstance(tensor, PendingGradient) and not only_about:
        tensor._arrive()  # makes it a plain tensor
    if type(tensor) is not PendingGradient:
        return tensor
    with no_torch_function():
        return Tensor.as_subclass(tensor, Tensor)


def is_pending(gradient: Tensor | None) -> bool:
    """Are its values still being summed?"""
    return type(gradient) is PendingGradient
