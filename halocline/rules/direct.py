"""Functions that are answered from this rank's tile and its sharding alone, without a rule.

These are shapes and dtypes, gradients and hooks, comparisons that end in a Python value, and the functions that need
the values or the memory of the whole tensor, which are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .._torch_private import autograd_state, function_of, hooked_the_old_way, may_set_data, take_place
from ..tensor import DATA, ShardedTensor, Sharding, mean_over_whole_axes, node_of, on_one_rank, unwrap, watch_leaf, wrap
from .table import direct, refuse


def getter(name: str) -> Any:
    """The function behind reading an attribute, by which torch names it."""
    return getattr(Tensor, name).__get__


def setter(name: str) -> Any:
    """The function behind writing an attribute."""
    return getattr(Tensor, name).__set__


@direct(getter("shape"))
def shape(self: ShardedTensor) -> torch.Size:
    """The global shape."""
    return torch.Size(self.sharding.shape)


@direct(Tensor.size)
def size(self: ShardedTensor, dim: int | None = None) -> torch.Size | int:
    """The global size, of one dim or of all."""
    return torch.Size(self.sharding.shape) if dim is None else self.sharding.shape[dim]


@direct(Tensor.dim, Tensor.ndimension, getter("ndim"))
def dim(self: ShardedTensor) -> int:
    """The number of dims."""
    return len(self.sharding.shape)


@direct(Tensor.numel, Tensor.nelement, torch.numel)
def numel(self: ShardedTensor) -> int:
    """Global elements."""
    return torch.Size(self.sharding.shape).numel()


@direct(Tensor.__len__)
def length(self: ShardedTensor) -> int:
    """The global size of the first dim."""
    return self.sharding.shape[0]


def _ask_tile(function: Any) -> Callable[..., Any]:
    """A direct entry that calls the same torch function on the tile."""

    def ask(self: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
        return function(unwrap(self), *args, **kwargs)

    return ask


_SAME_AS_TILE = """
dtype device is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn is_complex is_floating_point is_signed is_conj
is_neg layout requires_grad is_leaf element_size is_inference get_device names is_nested
is_sparse_csr is_xpu is_mps is_ipu is_xla is_vulkan itemsize is_shared is_pinned retains_grad output_nr _version
has_names
""".split()
for _name in _SAME_AS_TILE:
    _attribute = getattr(Tensor, _name, None)
    if _attribute is not None:
        _function = _attribute if callable(_attribute) else _attribute.__get__
        direct(_function)(_ask_tile(_function))
for _function in (torch.is_floating_point, torch.is_complex, torch.get_device):
    direct(_function)(_ask_tile(_function))


@direct(Tensor.is_contiguous)
def is_contiguous(self: ShardedTensor, *args: Any, **kwargs: Any) -> bool:
    """As on one rank: a tile may have no gaps where the global tensor has."""
    return on_one_rank(self).is_contiguous(*args, **kwargs)


@direct(getter("grad_fn"))
def grad_fn(self: ShardedTensor) -> Any:
    """The tile's node; of what an autograd Function made, its node, on which torch puts the hooks of modules."""
    node = autograd_state(self)[0]
    # torch's module hooks attach themselves to the node of an autograd Function.
    if node is not None and function_of(node) is not None:
        node_of(self, node)
        return node
    if hooked_the_old_way():
        raise refuse(
            "register_backward_hook", "hooks of the old kind would see tiles", "use register_full_backward_hook"
        )
    return unwrap(self).grad_fn


@direct(getter("_base"))
def base(self: ShardedTensor) -> Tensor | None:
    """Only whether there is one can be told: its tile may be of any shape."""
    return None if unwrap(self)._base is None else self


@direct(torch.is_tensor)
def is_tensor(obj: Any) -> bool:
    """It is one."""
    return True


@direct(torch.is_same_size)
def is_same_size(self: Tensor, other: Tensor) -> bool:
    """Of global shapes."""
    return tuple(self.shape) == tuple(other.shape)


@direct(torch.result_type)
def result_type(*args: Any) -> torch.dtype:
    """That of the tiles."""
    return torch.result_type(*(unwrap(a) if isinstance(a, ShardedTensor) else a for a in args))


@direct(Tensor.requires_grad_, setter("requires_grad"))
def requires_grad_(self: ShardedTensor, requires_grad: bool = True) -> ShardedTensor:
    """The tile is the leaf. The shell becomes an alias of it, so that the shell's node leads to the leaf.

    On axes on which the tensor is whole, its gradient is the mean of what the ranks hold: taken as it arrives.
    """
    tile = unwrap(self)
    if tile.requires_grad != requires_grad:
        tile.requires_grad_(requires_grad)
        watch_leaf(tile, self.sharding)
        # The alias is made under autograd even where the caller has switched it off.
        with torch.enable_grad():
            alias = wrap(tile, self.sharding)
        take_place(self, alias)
    return self


def _wrapped(gradient: Tensor | None, sharding: Sharding) -> Tensor | None:
    if gradient is None or not gradient.is_sparse:
        return None if gradient is None else wrap(gradient, sharding)
    lows = torch.tensor([owned.lo for owned in sharding.box[: gradient.sparse_dim()]], device=gradient.device)
    rows, values = gradient.coalesce().indices() + lows[:, None], gradient.coalesce().values()
    return torch.sparse_coo_tensor(rows, values, sharding.shape, check_invariants=False, is_coalesced=True)


@direct(getter("grad"))
def grad(self: ShardedTensor) -> Tensor | None:
    """The tile's gradient, cut as the tensor is. A sparse one is plain, of the global shape, with this rank's rows."""
    return _wrapped(self._tile.grad, self.sharding)


@direct(setter("grad"))
def set_grad(self: ShardedTensor, value: Any) -> None:
    """Assign a gradient cut alike, or None."""
    if value is not None and (not isinstance(value, ShardedTensor) or value.sharding != self.sharding):
        raise refuse("Tensor.grad", "a gradient must be cut as its tensor is", "assign None or a tensor cut alike")
    self._tile.grad = None if value is None else unwrap(value)


@direct(getter("data"), DATA.__get__)
def data(self: ShardedTensor) -> Tensor:
    """Like torch's, it writes unseen by autograd. What was fetched ahead of such a write is forgotten."""
    tile = unwrap(self)
    shell = wrap(tile.data, self.sharding)
    self._preloaded_halo, shell._copy_of, shell._strides = None, self._copy_of, self._strides
    return shell


@direct(Tensor.retain_grad)
def retain_grad(self: ShardedTensor) -> None:
    """Keep the true gradient of an intermediate result."""
    tile, sharding = unwrap(self), self.sharding
    if not tile.is_leaf:
        tile.register_hook(lambda gradient: mean_over_whole_axes(gradient, sharding))
    tile.retain_grad()


@direct(Tensor.register_hook)
def register_hook(self: ShardedTensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """The hook sees the gradient as a sharded tensor, and may return one."""
    tile, sharding = unwrap(self), self.sharding
    # The hook of a leaf sees a gradient that is averaged already.
    leaf = tile.is_leaf

    def on_tile(gradient: Tensor) -> Tensor | None:
        whole = gradient if leaf else mean_over_whole_axes(gradient, sharding)
        answer = hook(wrap(whole, sharding))
        return answer if answer is None else _as_tile(answer, sharding)

    return tile.register_hook(on_tile)


@direct(Tensor.register_post_accumulate_grad_hook)
def register_post_accumulate_grad_hook(self: ShardedTensor, hook: Callable[[Tensor], None]) -> Any:
    """The hook sees the sharded tensor."""
    sharding = self.sharding
    return unwrap(self).register_post_accumulate_grad_hook(lambda tile: hook(wrap(tile, sharding)))


def _as_tile(value: Tensor, sharding: Sharding) -> Tensor:
    if not isinstance(value, ShardedTensor) or value.sharding != sharding:
        raise refuse("register_hook", "a hook must return a gradient cut as its tensor is", "keep the sharding")
    return unwrap(value)


@direct(Tensor.backward)
def backward(self: Tensor, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
    """Every rank calls it, on its tile."""
    autograd_backward(self, gradient, *args, **kwargs)


def _tiles(values: Any) -> Any:
    """The same structure of tensors with tiles in place of sharded ones."""
    if isinstance(values, Tensor):
        return unwrap(values) if isinstance(values, ShardedTensor) else values
    return None if values is None else [_tiles(value) for value in values]


@direct(torch.autograd.backward)
def autograd_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
    """Seeds are cut as outputs are; tiles carry the graph."""
    if kwargs.get("inputs") is not None:
        kwargs["inputs"] = _tiles(kwargs["inputs"])
        if any(not tile.is_leaf for tile in kwargs["inputs"]):
            raise refuse("backward(inputs=...)", "an input that is no leaf", "use torch.autograd.grad, or retain_grad")
    outputs, seeds = _as_lists(tensors, grad_tensors)
    torch.autograd.backward(_tiles(outputs), _seeds(outputs, seeds), *args, **kwargs)


@direct(torch.autograd.grad)
def autograd_grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """True gradients, cut as the inputs are."""
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    outputs, seeds = _as_lists(outputs, grad_outputs)
    gradients = torch.autograd.grad(_tiles(outputs), _tiles(wanted), _seeds(outputs, seeds), *args, **kwargs)
    return tuple(_answer(gradient, tensor) for gradient, tensor in zip(gradients, wanted, strict=True))


def _answer(gradient: Tensor | None, tensor: Tensor) -> Tensor | None:
    """One result of ``torch.autograd.grad``: the true gradient, cut as its input is."""
    if gradient is None or not isinstance(tensor, ShardedTensor):
        return gradient
    # A leaf's hook has taken the mean already.
    whole = gradient if tensor._tile.is_leaf else mean_over_whole_axes(gradient, tensor.sharding)
    return wrap(whole, tensor.sharding)


def _as_lists(outputs: Any, seeds: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs and seeds as lists of one length, as ``torch.autograd`` takes both."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    seeds = [seeds] * len(outputs) if seeds is None or isinstance(seeds, Tensor) else list(seeds)
    return outputs, seeds


def _seeds(outputs: list[Tensor], gradients: list[Tensor | None]) -> list[Tensor | None]:
    return [_seed(output, gradient) for output, gradient in zip(outputs, gradients, strict=True)]


def _seed(output: Tensor, gradient: Tensor | None) -> Tensor | None:
    """A cut output's seed is cut alike: a whole one is re-cut, so that a tile never meets a global shape."""
    from .api import cut_like, gather

    if not isinstance(output, ShardedTensor):
        return gradient if gradient is None else gather(gradient)
    if gradient is None:
        if output.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return torch.ones_like(unwrap(output))
    if isinstance(gradient, ShardedTensor) and gradient.sharding is output.sharding:
        return unwrap(gradient)
    if type(gradient) is Tensor and gradient.shape == output.sharding.tile_shape and not gradient.any():
        return gradient  # zeros that torch made where an output of a reentrant checkpoint got no gradient
    return unwrap(cut_like(gradient, output.sharding))


@direct(torch.equal, Tensor.equal)
def equal(input: Tensor, other: Tensor) -> bool:
    """The same answer on every rank, which all must ask for."""
    return tuple(input.shape) == tuple(other.shape) and not bool((input != other).any())


@direct(torch.allclose, Tensor.allclose)
def allclose(input: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    """The same answer on every rank."""
    return bool(torch.isclose(input, other, rtol, atol, equal_nan).all())


@direct(Tensor.__contains__)
def contains(self: Tensor, element: Any) -> bool:
    """The same answer on every rank."""
    return bool((element == self).any())


@direct(Tensor.__iter__)
def iterate(self: Tensor) -> Iterator[Tensor]:
    """Over the first dim, which all ranks walk together."""
    return iter(self.unbind(0))


@direct(Tensor.__reversed__)
def reverse(self: Tensor) -> Tensor:
    """A flip of the first dim."""
    return self.flip(0)


@direct(Tensor.__format__)
def formatted(self: Tensor, format_spec: str) -> str:
    """As torch has it for more than one element: no format, but how it lies, and no values of other ranks."""
    return object.__format__(self, format_spec)


_NEEDS_VALUES = """
item tolist __bool__ __float__ __int__ __index__ __complex__ numpy __array__ __dlpack__ data_ptr storage
untyped_storage __cuda_array_interface__ storage_offset stride nonzero unique resize_ set_ share_memory_ pin_memory
""".split()


def _refuse_values(name: str) -> Callable[..., Any]:
    """A direct entry that refuses: the answer needs values or memory that this rank does not have."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        raise refuse(
            name.strip("_"),
            "it needs the values or the memory of the whole tensor, and this rank holds a tile",
            "reduce it first (x.sum(), x.mean()), or call it on hc.gather(x)",
        )

    return answer


for _name in _NEEDS_VALUES:
    _attribute = getattr(Tensor, _name, None)
    if _attribute is not None:
        direct(_attribute if callable(_attribute) else _attribute.__get__)(_refuse_values(_name))
for _function in (torch.nonzero, torch.unique):
    direct(_function)(_refuse_values(_function.__name__))
direct(setter("data"), DATA.__set__)(_refuse_values("data ="))


@direct(may_set_data)
def can_set_data(self: Tensor, other: Tensor) -> bool:
    """The assignment itself decides (``tensor/guard.py``)."""
    return True
