"""The only place where names that torch does not promise are used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

#: Inside, torch functions do not come to ``__torch_function__``.
no_torch_function = torch._C.DisableTorchFunctionSubclass


def autograd_state(tensor: torch.Tensor) -> tuple[object, bool]:
    """A tensor's own grad_fn and requires_grad, past any subclass."""
    with no_torch_function():
        return tensor.grad_fn, tensor.requires_grad


#: The state of a running torch.jit.trace; None where there is none.
tracing = torch._C._get_tracing_state


def quick_apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` without asking first whether a functorch transform runs: none can reach plain tiles."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def default_store() -> Any:
    """The key-value store the ranks met at, if there is one."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None


def backward_number() -> int:
    """Which backward pass is running; -1 where none is."""
    return torch._C._current_graph_task_id()


def in_backward() -> bool:
    return backward_number() != -1


def caller_value(function: Any, name: str) -> Any:
    """A local of the torch function that is calling us, for the one argument that it forgets to hand on."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get(name)


_CALLS = (torch.nn.Module._call_impl.__code__, torch.nn.Module._wrapped_call_impl.__code__)


def running_modules() -> Iterator[torch.nn.Module]:
    """The modules whose forward is now running in this thread, from the innermost."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _CALLS:
            yield frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]


def after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward pass now running has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_captured(node: object) -> bool:
    """Inside a hook: is this leaf's gradient handed out by ``autograd.grad`` instead of being accumulated?"""
    try:
        torch._C._will_engine_execute_node(node)  # type: ignore[arg-type]
    except RuntimeError:
        return True
    return False


def cuda_kernel(code: str) -> Callable[..., torch.Tensor]:
    """An element-by-element function of CUDA tensors from its C++ text, compiled at first use."""
    return torch.cuda.jiterator._create_jit_fn(code)
