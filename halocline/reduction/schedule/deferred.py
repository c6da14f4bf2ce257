"""Tensors whose values are still under way: reading the values waits for them.

A **pending gradient** is a parameter's ``.grad`` while the ranks sum it. A **deferred parameter** is one whose
optimizer step was requested and is not made yet, since its gradient is pending. Both are what they seem: reading shapes
and dtypes goes straight through, and the first torch function that needs values brings them about. So whatever reads a
parameter or a gradient in Python (a layer, a moving average of weights, ``state_dict``, clipping, a print) reads the
right thing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import currentframe
from types import CodeType
from typing import Any

from torch import Tensor, nn

from ..._torch_private import TENSOR_MODULE, no_torch_function, own_parameters, run_eagerly

_DUE = "_halocline_due"
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


def _about() -> Iterator[Any]:
    """Functions that tell of a tensor, and nothing of its values."""
    for name in _PROPERTIES.split():
        descriptor = getattr(Tensor, name, None)
        for way in ("__get__", "__set__", "__delete__"):
            if hasattr(descriptor, way):
                yield getattr(descriptor, way)
    for name in _METHODS.split():
        yield getattr(Tensor, name)


ABOUT = frozenset(_about())
_MAKING = nn.Parameter.__new__.__code__


def _caller() -> CodeType | None:
    """The code that called the torch function whose ``__torch_function__`` asks."""
    frame = currentframe()
    for _ in range(2):
        frame = frame.f_back if frame is not None else None
    return frame.f_code if frame is not None else None


class DeferredParameter(nn.Parameter):
    """What a parameter is while its step is still to be made. It is the same object before, meanwhile and after."""

    __module__ = TENSOR_MODULE

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in ABOUT:
            with no_torch_function():
                return function(*args, **kwargs)
        settle((args, kwargs))
        found = function(*args, **kwargs)
        if function is Tensor.detach and _caller() is _MAKING:  # nn.Parameter(this): of its own class
            return found.as_subclass(nn.Parameter)
        return found

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
    return type(parameter) in (nn.Parameter, DeferredParameter)


def defer(parameter: Tensor, update: Callable[[], None]) -> None:
    """``update()`` is called when a torch function reads its values, or never, if :func:`undefer` is called before."""
    setattr(parameter, _DUE, update)
    parameter.__class__ = DeferredParameter


def undefer(parameter: Tensor) -> Callable[[], None] | None:
    """What was to be called."""
    if type(parameter) is not DeferredParameter:
        return None
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    update: Callable[[], None] = parameter.__dict__.pop(_DUE)
    return update


def settle(value: Any) -> None:
    """Make the steps of all deferred parameters in it."""
    if type(value) is DeferredParameter:
        update = undefer(value)
        if update is None:  # another thread was first
            return
        try:
            update()
        except BaseException:  # it is not yet what it should be, and nobody may take it for that
            defer(value, update)
            raise
    elif isinstance(value, (tuple, list)):
        for item in value:
            settle(item)
    elif isinstance(value, dict):
        for item in value.values():
            settle(item)


def settle_own(module: nn.Module, _: Any) -> None:
    """A hook before forward, for layers that hand their parameters to code outside Python."""
    for parameter in own_parameters(module):
        if type(parameter) is DeferredParameter:
            settle(parameter)


for _function in (settle, settle_own, DeferredParameter.__torch_function__.__func__):  # type: ignore[attr-defined]
    run_eagerly(_function)  # torch.compile would take a class that changes for one that does not


class PendingGradient(Tensor):
    """A gradient that is still being summed, in the memory where its mean will stand."""

    __module__ = TENSOR_MODULE

    _arrive: Callable[[], None]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*_arrived(args, function in ABOUT), **_arrived(kwargs or {}, function in ABOUT))

    def as_subclass(self, cls: Any) -> Any:
        return _arrived(self, False).as_subclass(cls)


def pending(gradient: Tensor, arrive: Callable[[], None]) -> PendingGradient:
    """The same object; ``arrive()`` is called when a torch function reads its values."""
    gradient.__class__ = PendingGradient
    assert isinstance(gradient, PendingGradient)
    gradient._arrive = arrive
    return gradient


def resolved(gradient: Tensor) -> Tensor:
    """It has arrived: the same object, a gradient like any other."""
    gradient.__class__ = Tensor
    gradient.__dict__.pop("_arrive", None)
    return gradient


def _arrived(value: Any, only_about: bool) -> Any:
    if type(value) is PendingGradient:
        if not only_about:
            value._arrive()
        if type(value) is not PendingGradient:
            return value
        with no_torch_function():
            return Tensor.as_subclass(value, Tensor)
    if isinstance(value, (tuple, list)):
        return (list if isinstance(value, list) else tuple)(_arrived(item, only_about) for item in value)
    if type(value) is dict:
        return {name: _arrived(item, only_about) for name, item in value.items()}
    return value


def is_pending(gradient: Tensor | None) -> bool:
    return type(gradient) is PendingGradient
