"""Functions of one element at a time, broadcast like torch's own: every operand is needed where the output is.

Operands cut alike are used where they lie, and most calls go the executor's short way. Where two operands are cut
otherwise the first decides, and the other's needed box is fetched. A plain operand is whole on every rank: its part is
cut out locally, and its gradient is counted by law 3.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import ShardingError
from ...tensor import ShardedTensor, here, unwrap, wrap
from ..recipe import Operand, Read, Recipe, as_called, follow, per_tile, stretched
from ..table import composite, direct, refuse, rule

_NAMES = """
abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan
atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil clamp clamp_max
clamp_min clip conj conj_physical copysign cos cosh deg2rad digamma div divide eq erf erfc erfinv exp exp2 expm1 fix
float_power floor floor_divide fmax fmin fmod frac ge greater greater_equal gt heaviside hypot i0 imag isclose isfinite
isinf isnan isneginf isposinf isreal ldexp le lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2
logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mul multiply mvlgamma nan_to_num ne
neg negative nextafter not_equal polygamma positive pow rad2deg real reciprocal relu remainder resolve_conj resolve_neg
round rsqrt rsub sgn sigmoid sign signbit sin sinc sinh sqrt square sub subtract tan tanh threshold true_divide trunc
where xlogy clone detach nan_to_num zeros_like ones_like full_like double float half bfloat16 int long short
char bool byte zero_ fill_ copy_ cfloat cdouble complex polar
entr erfcx expit gammainc gammaincc gammaln gcd i0e i1 i1e igamma igammac lcm log_ndtr multigammaln ndtr ndtri psi
xlog1py zeta bessel_j0 bessel_j1
""".split()
_ACTIVATIONS = """
relu relu6 elu selu celu leaky_relu hardtanh hardswish hardsigmoid silu mish gelu softplus softsign logsigmoid
tanhshrink softshrink hardshrink sigmoid tanh threshold
""".split()
_OPERATORS = """
add radd sub rsub mul rmul truediv rtruediv div rdiv floordiv rfloordiv mod rmod pow rpow neg pos abs invert and rand or
ror xor rxor eq ne lt le gt ge lshift rshift iadd isub imul itruediv idiv ifloordiv imod ipow iand ior ixor
""".split()


def _functions() -> dict[Any, bool]:
    """Every pointwise function torch has under these names, and whether its name says that it works in place."""
    functions: dict[Any, bool] = {}
    for name in _NAMES:
        for home in (torch, Tensor, torch.special):
            for variant in (name, f"{name}_") if not name.endswith("_") else (name,):
                if callable(getattr(home, variant, None)):  # torch.float and its kind are dtypes
                    functions[getattr(home, variant)] = variant.endswith("_")
    functions |= {getattr(Tensor, name).__get__: False for name in ("real", "imag")}
    for name in _ACTIVATIONS:
        for variant in (name, f"{name}_"):
            if hasattr(F, variant):
                functions[getattr(F, variant)] = variant.endswith("_")
    # Operators have names of their own, which __torch_function__ gets to see.
    for name in _OPERATORS:
        dunder = f"__{name}__"
        if hasattr(Tensor, dunder):
            inplace = name.startswith("i") and name not in ("invert",)
            functions[getattr(Tensor, dunder)] = inplace
    return functions


def broadcast_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """As torch broadcasts, in global shapes; tells a tile that was taken for the whole."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError as error:
        raise ShardingError(
            f"shapes {', '.join(str(list(s)) for s in shapes)} in {here()} do not broadcast: sharded tensors show "
            "their global shape and a plain tensor is whole; make a tile of your own into hc.from_tile(...)"
        ) from error


def elementwise(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inplace: bool) -> Recipe:
    """A recipe in which every dim of every operand follows one of the result, or is stretched."""
    if function in (torch.where, Tensor.where) and len(args) + len(kwargs) == 1:
        raise refuse(function, "with a condition alone it lists positions, of unknown number", "use hc.gather")
    leaves = _leaves((args, kwargs))
    if any(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves):
        raise refuse(function, "a numpy array is not cut as the tensor is", "use torch.from_numpy: a whole operand")
    operands = [v for v in leaves if isinstance(v, Operand)]
    space = broadcast_shape(*(operand.shape for operand in operands))
    # torch's own error would be about tiles.
    if inplace and space != operands[0].shape:
        raise ShardingError(f"in place, {operands[0].shape} cannot hold a result of shape {space} (in {here()})")
    return Recipe(
        space=space,
        reads=tuple(Read(operand, stretched(operand.shape, space)) for operand in operands),
        local=as_called(function),
        inplace=inplace,
        runs_empty=True,
    )


def _leaves(value: Any) -> list[Any]:
    """All arguments of a call, out of nested lists and dicts."""
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return [value]


def _inplace_argument(function: Any) -> int | None:
    """Where an activation takes its ``inplace`` flag."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def register_elementwise(function: Any, inplace: bool = False) -> None:
    """Give a function its rule; where it has an argument that asks for it, the call is in place."""
    position = _inplace_argument(function)

    def describe(*args: Any, **kwargs: Any) -> Recipe:
        flag = kwargs.get("inplace", position is not None and len(args) > position and args[position])
        return elementwise(function, args, kwargs, inplace or bool(flag))

    # x * 0.5 and x * 0.25 share a plan: the number goes to torch as it is.
    rule(function, family="pointwise", by_value=False)(describe)


for _function, _inplace in _functions().items():
    register_elementwise(_function, _inplace)


@rule(torch.prelu, F.prelu, Tensor.prelu)
def prelu(input: Operand, weight: Operand) -> Recipe:
    """One slope for all, or one for each channel (dim 1)."""
    channel = 1 if weight.numel() > 1 else None
    return per_tile(input, as_called(F.prelu), follow(weight, *[channel] * weight.ndim))


@direct(Tensor.to, family="pointwise")
def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Dtype, device and memory format of the tile; itself, where nothing changes."""
    if isinstance(self, Tensor) and args and isinstance(args[0], Tensor):
        args = (args[0].device, args[0].dtype, *args[1:])
    return _convert(self, Tensor.to, args, kwargs)


@composite(Tensor.type_as, family="pointwise")
def type_as(self: Tensor, other: Tensor) -> Tensor:
    """Another tensor's dtype."""
    return self.to(other.dtype)


@composite(Tensor.cpu, family="pointwise")
def cpu(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The tile on the CPU."""
    return self.to("cpu")


@composite(Tensor.cuda, family="pointwise")
def cuda(self: Tensor, device: Any = None, **kwargs: Any) -> Tensor:
    """The tile on a GPU."""
    return self.to("cuda" if device is None else device, **kwargs)


@direct(Tensor.type, family="pointwise")
def type_(self: Tensor, dtype: Any = None, **kwargs: Any) -> Any:
    """torch's older way to ask for a dtype, or for its name."""
    if isinstance(dtype, torch.dtype):
        return self.to(dtype)
    return _convert(self, Tensor.type, () if dtype is None else (dtype,), kwargs)


def _convert(tensor: Tensor, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tile converted by ``function``; the tensor itself where that changes nothing."""
    if not isinstance(tensor, ShardedTensor):
        return function(tensor, *args, **kwargs)
    tile = unwrap(tensor)
    converted = function(tile, *args, **kwargs)
    if converted is tile and kwargs.get("memory_format", torch.preserve_format) is not torch.preserve_format:
        return tensor.contiguous(memory_format=kwargs["memory_format"])  # itself, or a copy where one rank makes one
    if not isinstance(converted, Tensor) or converted is tile:
        return converted if converted is not tile else tensor
    return wrap(converted, tensor.sharding)
