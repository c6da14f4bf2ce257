"""The only place where names that torch does not promise are used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._python_dispatch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # for others to import from here

#: Inside, torch functions do not come to ``__torch_function__``.
no_torch_function = torch._C.DisableTorchFunctionSubclass


#: Do torch functions come to ``__torch_function__`` of subclasses now?
torch_function_enabled = torch._C._is_torch_function_enabled


#: Nor to any mode that somebody has set.
no_torch_functions = torch._C.DisableTorchFunction


#: Inside, no dispatch mode that somebody has set sees what torch is asked.
disable_dispatch_modes = torch.utils._python_dispatch._disable_current_modes


#: The operator behind ``Tensor.item()`` and behind a branch on a tensor.
item_operator = torch.ops.aten._local_scalar_dense.default

BatchNormBase = torch.nn.modules.batchnorm._BatchNorm  # of batch norms of every kind


def convolution_backend(shapes: Sequence[Sequence[int]], dtype: torch.dtype, options: Sequence[Any]) -> str:
    """Which kernels torch takes on a CPU for a convolution of these volume and weight, such as "Mkldnn" or "Slow3d".

    ``options`` are stride, padding, dilation, transposed, output padding and groups. Memory is asked for, not touched.
    """
    select = getattr(torch._C, "_select_conv_backend", None)
    if select is None:
        return "unknown"
    volume, weight = (torch.empty(tuple(shape), dtype=dtype, device="cpu") for shape in shapes)
    return str(select(volume, weight, None, *(list(o) if isinstance(o, tuple) else o for o in options))).split(".")[-1]


def schema_of(operator: Any) -> Any:
    """The schema of an ATen operator: its name, and which results alias which arguments."""
    return operator._schema


def storage_key(memory: torch.Tensor | torch.UntypedStorage) -> int:
    """A number that two tensors have in common while they share memory. It may return once that memory is freed."""
    return (memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory)._cdata


#: The ``__module__`` of the library's tensor classes. opt_einsum and its like take the first part of this name for the
#: library whose functions they are to call, and know nothing of subclasses.
TENSOR_MODULE = "torch"


#: ``reshape`` whose result is no view to autograd: for what nobody else sees.
unsafe_view = torch.ops.aten._unsafe_view

#: What pads and packs sequences in ``torch.nn.utils.rnn``.
pack_padded, pad_packed = torch._pack_padded_sequence, torch._pad_packed_sequence

#: What nn.TransformerEncoder packs padded sequences with; None where torch has it no more.
nested_tensor_from_mask = getattr(torch, "_nested_tensor_from_mask_left_aligned", None)


def autograd_state(tensor: torch.Tensor) -> tuple[object, bool]:
    """A tensor's own grad_fn and requires_grad, past any subclass."""
    with no_torch_function():
        return tensor.grad_fn, tensor.requires_grad


def function_of(node: object) -> type[torch.autograd.Function] | None:
    """The autograd Function in Python whose node this is; None for torch's own nodes."""
    return getattr(type(node), "_forward_cls", None)


_IDENTITIES = (
    ("torch.nn.modules._functions", "BackwardHookFunction"),
    ("torch.nn.parallel.distributed", "_DDPSink"),
    ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "RegisterPostBackwardFunction"),
    ("torch_harmonics.utils", "_EnsureContiguous"),
)


def identity_functions() -> tuple[type, ...]:
    """Autograd Functions that hand on what they get, as far as their modules are loaded."""
    homes = ((sys.modules.get(module), name) for module, name in _IDENTITIES)
    return tuple(getattr(home, name) for home, name in homes if hasattr(home, name))


def take_place(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let ``tensor`` be what ``other`` is to torch, its graph included; what Python knows of the two stays."""
    with no_torch_function():
        torch._C._swap_tensor_impl(tensor, other)


#: The state of a running torch.jit.trace; None where there is none.
tracing = torch._C._get_tracing_state


#: Does a transform of torch.func (vmap, grad, jvp) run now?
transforming = torch._C._are_functorch_transforms_active


#: Does torch leave autograd out now? So it does in a branch of ``torch.cond`` that runs uncompiled.
without_autograd = partial(torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.AutogradFunctionality)


def quick_apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply`` without asking first whether a transform of torch.func runs: those are refused at the door."""
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def count_in_checkpoint() -> None:
    """Inside a checkpoint, count as a tensor saved for backward; elsewhere do nothing.

    A checkpoint ends its recomputation at the last tensor that the forward saved, and what a rank saves depends on
    its tile. A movement that counts is part of every rank's recomputation.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is not None:
        with no_torch_function():
            hooks[0](torch.empty(0))


def default_store() -> Any:
    """The key-value store the ranks met at, if there is one."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None


def collectives_begun() -> int | None:
    """How many collectives the default process group has begun; None where there is no group or it does not count."""
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    try:
        return None if group is None else int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend without numbers
        return None


def foreach_functions() -> dict[str, Any]:
    """torch's functions of lists of tensors, by the name of what they do to each."""
    prefix = "_foreach_"
    return {name.removeprefix(prefix): getattr(torch, name) for name in dir(torch) if name.startswith(prefix)}


def unscale_function() -> Any:
    """What ``torch.amp.GradScaler`` calls: it divides gradients by the scale, and notes what is not finite."""
    return torch._amp_foreach_non_finite_check_and_unscale_


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


def hooked_the_old_way() -> bool:
    """Is a module putting hooks of the old kind (``register_backward_hook``) on the node that is being asked for?"""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("halocline."):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != "torch.nn.modules.module":
        return False
    return bool(frame.f_locals.get("non_full_backward_hooks"))


def module_hooks(module: torch.nn.Module) -> Iterator[int]:
    """The numbers of the hooks that run with a module's forward, and with its backward."""
    yield from module._forward_pre_hooks
    yield from module._forward_hooks
    yield from module._backward_pre_hooks
    yield from module._backward_hooks


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


def run_eagerly(function: Any) -> None:
    """Have torch.compile leave ``function``, and all that it calls, to Python. Costs nothing where nobody compiles."""
    function._torchdynamo_disable = True  # do not trace into it
    function._torchdynamo_disable_msg = "functions of cut tensors run by rules"
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))  # nor compile it by itself


def cuda_kernel(code: str) -> Callable[..., torch.Tensor]:
    """An element-by-element function of CUDA tensors from its C++ text, compiled at first use."""
    return torch.cuda.jiterator._create_jit_fn(code)


def sharers(tensor: torch.Tensor) -> int:
    """How many tensors there are on this memory, in Python or in torch."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # one is this very look


def weak_memory(tensor: torch.Tensor) -> StorageWeakRef:
    """A weak reference to a tensor's memory. While it lives, no other memory has the same ``cdata``."""
    return StorageWeakRef(tensor.untyped_storage())


def passes_inside_each_other() -> int:
    """How many backward passes have been started by what now runs in this thread."""
    frame, found = sys._getframe(1), 0
    while frame is not None:
        found += frame.f_code is torch.autograd.graph._engine_run_backward.__code__
        frame = frame.f_back  # type: ignore[assignment]
    return found


def constant_in_graphs(function: Any) -> Any:
    """As ``torch.compiler.assume_constant_result``, which for setting this mark loads the compiler: a second."""
    function._dynamo_marked_constant = True
    return function


def profile_every_thread() -> Any:
    """Settings of torch's profiler; without them it does not see the threads that read data ahead."""
    try:
        from torch._C._profiler import _ExperimentalConfig
    except ImportError:
        return None
    return _ExperimentalConfig(profile_all_threads=True)


def step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Has anybody asked to be called before or after its steps?"""
    everywhere = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides its module of this name
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or everywhere._global_optimizer_pre_hooks
        or everywhere._global_optimizer_post_hooks
    )


def own_parameters(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The parameters of this module alone, without the bookkeeping of ``parameters(recurse=False)``."""
    return (parameter for parameter in module._parameters.values() if parameter is not None)


def all_parameters(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """As ``parameters()``, in any order and several times if shared; a tenth of its time, for checks in every step."""
    seen, modules = {id(module)}, [module]
    for each in modules:
        for parameter in each._parameters.values():
            if parameter is not None:
                yield parameter
        for child in each._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)


#: What ``Module.to`` asks before it changes a parameter's data.
may_set_data = torch._has_compatible_shallow_copy_type


def initializer(module: torch.nn.Module) -> Callable[[], None] | None:
    """The method that fills a module's own tensors; that of torch's MultiheadAttention has a private name."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def post_accumulate_hooks(leaf: torch.Tensor) -> Any:
    """Its hooks after accumulation, by the number of their handle; None where there are none."""
    return leaf._post_accumulate_grad_hooks


def set_post_accumulate_hooks(leaf: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Have torch call these, and put in what is registered from now on."""
    leaf._post_accumulate_grad_hooks = hooks


def gradient_hooks(leaf: torch.Tensor) -> Any:
    """Its hooks on gradients, by the number of their handle; None where there are none."""
    return leaf._backward_hooks


def set_gradient_hooks(leaf: torch.Tensor, hooks: dict[int, Any]) -> None:
    """Have torch call these, and put in what is registered from now on."""
    leaf._backward_hooks = hooks


def set_group_timeout(group: dist.ProcessGroup | dist.ProcessGroupGloo, wait: timedelta) -> None:
    """Also of what it does in threads of its own."""
    if isinstance(group, dist.ProcessGroup):
        dist.distributed_c10d._set_pg_timeout(wait, group)
    else:
        group._set_default_timeout(wait)


#: One norm of each tensor of a list, and each tensor of a list times its own number, in place: a few kernels for all.
foreach_norm, foreach_mul_ = torch._foreach_norm, torch._foreach_mul_


def storage_classes() -> tuple[type, ...]:
    """What the plans of torch.distributed.checkpoint say about files: the name of a rank's, and a place in one."""
    from torch.distributed.checkpoint import filesystem

    return filesystem._StorageInfo, filesystem._StoragePrefix


def remove_hooks(module: torch.nn.Module, unwanted: Callable[[Any], bool]) -> None:
    """Take the unwanted ones of a module's forward hooks off."""
    flags = (
        module._forward_pre_hooks_with_kwargs,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
    )
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for number in [number for number, hook in hooks.items() if unwanted(hook)]:
            del hooks[number]
            for flag in flags:
                flag.pop(number, None)
