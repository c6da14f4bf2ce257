"""torch's random functions, computed for a box of the whole tensor.

The same code serves a rank's tile and a plain tensor, which is its own whole. A kernel gets the box, then the torch
function's own arguments with the tile in place of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tensor.undrawn import Undrawn
from .draw import Draw
from .generator import GlobalBox
from .state import current

Function = TypeVar("Function", bound=Callable[..., Any])
_SELU = 1.7580993408473766  # scale times alpha of the SELU: what alpha dropout sets elements to, before scaling


@dataclass(frozen=True)
class Kernel:
    """How a random function runs on a tile.

    ``inplace``: the function always writes into its first tensor; others may have an argument for it. ``new``: the
    result has no gradient.
    """

    run: Callable[..., Tensor]
    inplace: bool = False
    new: bool = False


KERNELS: dict[Any, Kernel] = {}


def _kernel(*functions: Any, inplace: bool = False, new: bool = False) -> Callable[[Function], Function]:
    """Register the kernel of these torch functions."""

    def keep(run: Function) -> Function:
        for function in functions:
            KERNELS[function] = Kernel(run, inplace, new)
        return run

    return keep


# ---- dropout ----


def _times(input: Tensor, factor: Any, inplace: bool) -> Tensor:
    return input.mul_(factor) if inplace else input * factor


def _dropping(finish: Callable[[Tensor, Tensor, float, bool], Tensor], training: bool) -> Callable[..., Tensor]:
    """A dropout: ``finish(input, mask, p, inplace)`` where it draws. ``training`` is torch's default of that flag."""

    def kernel(
        place: GlobalBox,
        input: Tensor,
        p: float = 0.5,
        training: bool = training,
        inplace: bool = False,
        *,
        dims: int | None = None,
    ) -> Tensor:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if training and p == 1:  # all is dropped, without a draw
            return _times(input, 0.0, inplace)
        if not training or p == 0 or place.empty:
            return input
        # What to keep, as bool: all that is saved for backward. One for each index of the first ``dims`` dims.
        kept = Draw(place if dims is None else place.leading(dims), input.device).chosen(1 - p)
        return finish(input, kept.view(*kept.shape, *(1,) * (input.ndim - kept.ndim)), p, inplace)

    return kernel


def _scaled(input: Tensor, mask: Tensor, p: float, inplace: bool) -> Tensor:
    return _times(input, mask, inplace).mul_(1 / (1 - p))


def _to_lowest(input: Tensor, mask: Tensor, p: float, inplace: bool) -> Tensor:
    """Dropped elements get SELU's lowest value; then all are scaled and shifted, so that mean and variance stay."""
    scale = 1 / math.sqrt((_SELU**2 * p + 1) * (1 - p))
    shift = mask.to(input.dtype).sub_(1).mul_(_SELU * scale).add_(_SELU * scale * p)
    return _times(input, mask, inplace).mul_(scale).add_(shift)


dropout = _kernel(F.dropout)(_dropping(_scaled, training=True))
alpha_dropout = _kernel(F.alpha_dropout)(_dropping(_to_lowest, training=False))


def _sampled_dims(name: str, ndim: int) -> int:
    """How many leading dims count the channels of the samples: without a batch it is the first alone."""
    if name == "dropout1d" and ndim not in (2, 3):
        raise RuntimeError(f"dropout1d: Expected 2D or 3D input, but received a {ndim}D input")
    # torch guesses a missing batch for these two only.
    unbatched = {"dropout1d": 2, "dropout3d": 4}.get(name)
    if ndim < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    return 1 if ndim == unbatched else 2


def _by_channel(run: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """A kernel that drops whole channels."""

    def kernel(place: GlobalBox, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return run(place, input, *args, dims=_sampled_dims(name, input.ndim), **kwargs)

    return kernel


def _low_level(run: Callable[..., Tensor], inplace: bool) -> Callable[..., Tensor]:
    """As torch.dropout and its like take their arguments."""

    def kernel(place: GlobalBox, input: Tensor, p: float, train: bool) -> Tensor:
        return run(place, input, p, train, inplace)

    return kernel


for _name in ("dropout1d", "dropout2d", "dropout3d"):
    _kernel(getattr(F, _name))(_by_channel(dropout, _name))
_kernel(F.feature_alpha_dropout)(_by_channel(alpha_dropout, "feature_alpha_dropout"))
for _name, _run in {
    "dropout": dropout,
    "alpha_dropout": alpha_dropout,
    "feature_dropout": _by_channel(dropout, "feature_dropout"),
    "feature_alpha_dropout": _by_channel(alpha_dropout, "feature_alpha_dropout"),
}.items():
    for _suffix in ("", "_"):
        _kernel(getattr(torch, _name + _suffix), inplace=bool(_suffix))(_low_level(_run, bool(_suffix)))


@_kernel(F.rrelu)
def rrelu(
    place: GlobalBox,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    """A random slope below zero for each element; the mean slope in evaluation."""
    if not training or place.empty:
        return F.leaky_relu(input, (lower + upper) / 2, inplace)
    # Drawn for all elements, so that the numbers do not depend on signs.
    slope = Draw(place, input.device).uniform(input.dtype).mul_(upper - lower).add_(lower)
    return _times(input, slope.masked_fill_(input.detach() > 0, 1.0), inplace)


def _low_level_rrelu(inplace: bool) -> Callable[..., Tensor]:
    """``torch.rrelu`` has a generator in the place of the flag ``inplace``."""

    def kernel(
        place: GlobalBox,
        input: Tensor,
        lower: float = 1 / 8,
        upper: float = 1 / 3,
        training: bool = False,
        generator: Any = None,
    ) -> Tensor:
        return rrelu(place, input, lower, upper, training, inplace)

    return kernel


_kernel(torch.rrelu)(_low_level_rrelu(False))
_kernel(torch.rrelu_, inplace=True)(_low_level_rrelu(True))


# ---- new tensors of given distributions ----


def _like(input: Tensor, dtype: Any, device: Any) -> tuple[torch.dtype, torch.device]:
    return dtype or input.dtype, input.device if device is None else torch.device(device)


def _new_like(numbers: Callable[[Draw, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    """The kernel of ``rand_like`` or ``randn_like``: a new tensor, without a gradient."""

    def kernel(
        place: GlobalBox, input: Tensor, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any
    ) -> Tensor:
        kind, where = _like(input, dtype, device)
        return numbers(Draw(place, where), kind).requires_grad_(requires_grad)

    return kernel


rand_like = _kernel(torch.rand_like, new=True)(_new_like(Draw.uniform))
randn_like = _kernel(torch.randn_like, new=True)(_new_like(Draw.normal))


@_kernel(torch.randint_like, new=True)
def randint_like(
    place: GlobalBox,
    input: Tensor,
    low: int = 0,
    high: int | None = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    **_: Any,
) -> Tensor:
    """Integers below ``high``, from ``low`` or 0 on."""
    low, high = (0, low) if high is None else (low, high)
    kind, where = _like(input, dtype, device)
    return Draw(place, where).integers(kind, low, high - low).requires_grad_(requires_grad)


@_kernel(torch.bernoulli, Tensor.bernoulli, new=True)
def bernoulli(place: GlobalBox, input: Tensor, p: float | None = None, *, generator: Any = None) -> Tensor:
    """Zeros and ones; the probability is ``p``, or stands in the input."""
    draw = Draw(place, input.device)
    chosen = draw.chosen(p) if p is not None else draw.less_than(input.detach())
    return chosen.to(input.dtype)


@_kernel(torch.normal, new=True)
def normal(place: GlobalBox, mean: Any, std: Any = 1.0, *, generator: Any = None) -> Tensor:
    """With a tensor of means, of deviations, or both."""
    mean, std = (v.detach() if isinstance(v, Tensor) else v for v in (mean, std))
    like = mean if isinstance(mean, Tensor) else std
    return Draw(place, like.device).normal(like.dtype).mul_(std).add_(mean)


# ---- in place ----


def _range(dtype: torch.dtype, args: tuple[Any, ...], ends: dict[str, Any]) -> tuple[int, int]:
    """``random_()``, ``random_(to)`` or ``random_(from, to)``: the first number and how many there are.

    Without bounds, all whole numbers from 0 that the dtype holds exactly.
    """
    if len(args) == 1 and "to" not in ends:
        low, high = 0, args[0]
    else:
        low, high = ends.get("from", args[0] if args else 0), ends.get("to", args[1] if len(args) > 1 else None)
    if high is None and dtype.is_floating_point:
        high = round(2 / torch.finfo(dtype).eps) + 1
    elif high is None:
        high = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    return low, high - low


@_kernel(Tensor.random_, inplace=True)
def random_(place: GlobalBox, self: Tensor, *args: Any, generator: Any = None, **ends: Any) -> Tensor:
    """Whole numbers in the range that the arguments ask for."""
    return self.copy_(Draw(place, self.device).integers(self.dtype, *_range(self.dtype, args, ends)))


@_kernel(Tensor.uniform_, inplace=True)
def uniform_(place: GlobalBox, self: Tensor, *args: Any, generator: Any = None, **ends: Any) -> Tensor:
    """Uniform between two ends, which torch calls ``from`` and ``to``."""
    low = ends.get("from", args[0] if args else 0.0)
    high = ends.get("to", args[1] if len(args) > 1 else 1.0)
    return self.copy_(Draw(place, self.device).uniform(self.dtype).mul_(high - low).add_(low))


@_kernel(Tensor.normal_, inplace=True)
def normal_(place: GlobalBox, self: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:
    """Normal with this mean and deviation."""
    return self.copy_(Draw(place, self.device).normal(self.dtype).mul_(std).add_(mean))


@_kernel(Tensor.log_normal_, inplace=True)
def log_normal_(
    place: GlobalBox, self: Tensor, mean: float = 1.0, std: float = 2.0, *, generator: Any = None
) -> Tensor:
    """The exponential of normal numbers."""
    return self.copy_(Draw(place, self.device).normal(self.dtype).mul_(std).add_(mean).exp_())


@_kernel(Tensor.exponential_, inplace=True)
def exponential_(place: GlobalBox, self: Tensor, lambd: float = 1.0, *, generator: Any = None) -> Tensor:
    """Exponential with rate ``lambd``."""
    return self.copy_(Draw(place, self.device).exponential(self.dtype, lambd))


@_kernel(Tensor.cauchy_, inplace=True)
def cauchy_(
    place: GlobalBox, self: Tensor, median: float = 0.0, sigma: float = 1.0, *, generator: Any = None
) -> Tensor:
    """Cauchy's distribution around a median."""
    return self.copy_(Draw(place, self.device).cauchy(self.dtype, median, sigma))


@_kernel(Tensor.geometric_, inplace=True)
def geometric_(place: GlobalBox, self: Tensor, p: float, *, generator: Any = None) -> Tensor:
    """The number of trials until the first success."""
    return self.copy_(Draw(place, self.device).geometric(self.dtype, p))


@_kernel(Tensor.bernoulli_, inplace=True)
def bernoulli_(place: GlobalBox, self: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    """Zeros and ones by one probability, or by one for each element."""
    draw = Draw(place, self.device)
    return self.copy_(draw.less_than(p) if isinstance(p, Tensor) else draw.chosen(p))


Undrawn.drawing = frozenset(function for function, kernel in KERNELS.items() if kernel.inplace)
Undrawn.explained = staticmethod(lambda draw: current().explained(draw))
